"""The process of one trial: `python -m thresher.sweep.child`, started by `TrialRun`.

It runs the pipeline of `thresher train` with a callback that reports each logged record and waits for the answer, so
that a decision of the scheduler takes effect after a step that does not depend on timing. The process exits when its
standard input ends: a trial does not outlive its sweep.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any, NoReturn

CONTINUE, STOP = "continue", "stop"


class Channel:
    """JSON lines from and to the parent. What the run itself prints on stdout goes to stderr, which is a file."""

    def __init__(self) -> None:
        self._answers: queue.Queue[str] = queue.Queue()
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.request: dict[str, Any] = json.loads(sys.stdin.readline())
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()

    def ask(self, message: dict[str, Any]) -> str:
        """Send a message and wait for its answer."""
        self.send(message)
        return self._answers.get()

    def _read(self) -> NoReturn:
        for line in sys.stdin:
            self._answers.put(line.strip())
        os._exit(1)  # the sweep has died: its next start resumes this run from its newest checkpoint


class Reporter:
    """A callback that reports every logged record. stops: stop after the first step."""

    def __init__(self, channel: Channel, *, stops: bool) -> None:
        self._channel = channel
        self._stops = stops

    def on_train_begin(self, _args: Any, _state: Any, control: Any) -> None:
        """Request a stop before the first step."""
        control.should_training_stop = self._stops

    def on_log(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the record that was just written to the local log."""
        if self._channel.ask({"step": state.global_step}) == STOP:
            control.should_training_stop = True


def main() -> None:
    """Run the trial that the first line on stdin describes; the last message says how it ended."""
    channel = Channel()
    request = channel.request

    from thresher.errors import HealthStopped, RunStopped, UserError
    from thresher.sweep.grid import Trial, trial_config

    end = "finished"
    message = ""
    try:
        from thresher.pipeline import DPOPipeline

        config = trial_config(request["config"], Trial(request["name"], tuple(request["overrides"]), {}))
        DPOPipeline(config, callbacks=[Reporter(channel, stops=request["stops"])]).run()
    except HealthStopped as stopped:
        end, message = "stopped by health", str(stopped)
    except RunStopped as stopped:
        end, message = "stopped", str(stopped)
    except UserError as error:
        end, message = "failed", str(error)
    except Exception as error:
        traceback.print_exc()
        end, message = "failed", f"{type(error).__name__}: {error}"
    channel.send({"end": end, "message": message})


if __name__ == "__main__":
    main()
