"""Save in the background on a simulated GPU: how often the host waits, and in which order streams do what.

    python -m tests.support.simulated_save GUARD CONFIG RESULT

In its own process, because it changes torch. GUARD: as for `thresher.plan.simulate`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from thresher.plan.simulate.fake_cuda import load_guard, pretend_one_gpu
from thresher.plan.simulate.request import RankRequest


def main(guard: str, config_file: str, result_file: str) -> None:
    if guard:
        load_guard(Path(guard))
    pretend_one_gpu(80 << 30)
    config = json.loads(Path(config_file).read_text(encoding="utf-8"))
    request = RankRequest(config, 0, 1, [[[8, 6, 6]]], 1, None, 80 << 30)
    Path(result_file).write_text(json.dumps(save_and_step(request)), encoding="utf-8")


def save_and_step(request: RankRequest) -> dict[str, Any]:
    """Make a step, capture it, make others; return the waits of the host in the capture, and the order of events."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from thresher.builders.inputs import find_layout
    from thresher.checkpoint.background import HostBuffers
    from thresher.config import parse_config
    from thresher.models.attention.interface import KERNELS
    from thresher.plan.simulate.counters import HostSide
    from thresher.plan.simulate.rank import _Step, attention_without_values

    order: list[str] = []
    make_stream: Any = torch.cuda.Stream
    side_stream, current, event = make_stream(), torch.cuda.current_stream(), torch.cuda.Event()
    torch.cuda.Stream = lambda *_device: side_stream  # type: ignore[assignment,misc]
    side_stream.wait_stream = lambda _other: order.append("the side stream waits for training")
    side_stream.record_event = lambda: order.append("copies end") or event
    current.wait_event = lambda _event: order.append("training waits for the copies")  # type: ignore[method-assign]
    event.synchronize = lambda: order.append("the host waits for the copies")  # type: ignore[method-assign]

    KERNELS["cuda"] = attention_without_values
    host, copies = HostSide(), HostBuffers()
    layout = find_layout(parse_config(request.config))[1]
    with FakeTensorMode(allow_non_fake_inputs=True), host:
        step = _Step(request, torch.device("cuda", 0), layout)
        step.run(1)
        host.reads.clear()
        step._policy.snapshot({}, copies)
        waits = dict(host.reads)
        order.append("captured")
        step._policy.parameters.optimizer.register_step_pre_hook(
            lambda *_: order.append("the optimizer changes the weights")
        )
        for _ in range(2):
            step.run(1)
        copies.wait()  # as the thread that writes
    return {"waits": waits, "order": order, "num_copies": len(copies._buffers)}


if __name__ == "__main__":
    main(*sys.argv[1:])
