"""The real tracker libraries, offline: metrics can be read back, and a resume continues the same run."""

import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from thresher.errors import UserError
from thresher.observability.trackers.libraries import (
    MlflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandbMode,
    WandbTracker,
)
from thresher.observability.trackers.tracker import RunInfo, Table, Tracker


def run_in(directory: Path) -> RunInfo:
    config = {"actor_train": {"lr": 1e-6}, "beta": 0.1}
    return RunInfo("my-run", directory, config, total_steps=6, total_pairs=60)


def log_steps(tracker: Tracker, directory: Path, resume_step: int | None, steps: range) -> None:
    tracker.start(run_in(directory), resume_step)
    for step in steps:
        tracker.log(step, {"loss": 1 / step, "rewards/margins": -step})
        if step == 4:
            tracker.log(step, {"eval/loss": 0.25})


EXPECTED = [(step, pytest.approx(1 / step)) for step in range(1, 7)]


# a prompt that is Markdown and HTML
TABLE = Table(
    "samples/answers", ["step", "prompt", "tokens", "ended"], [[4, "a | b\n<b>*c*", 7.5, True], [4, "d", 2, False]]
)


class TestTensorBoard:
    @staticmethod
    def read(directory: Path, name: str) -> list[tuple[int, float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(directory / "tensorboard"))
        accumulator.Reload()
        return [(event.step, event.value) for event in accumulator.Scalars(name)]

    def test_a_resumed_run_shows_each_step_once(self, tmp_path: Path) -> None:
        first = TensorBoardTracker()
        log_steps(first, tmp_path, None, range(1, 6))  # killed: never closed
        assert len(self.read(tmp_path, "loss")) == 5
        second = TensorBoardTracker()
        log_steps(second, tmp_path, 3, range(4, 7))
        second.close("finished")
        assert self.read(tmp_path, "loss") == EXPECTED
        assert self.read(tmp_path, "rewards/margins") == [(step, -step) for step in range(1, 7)]
        assert self.read(tmp_path, "eval/loss") == [(4, 0.25)]
        first.close("failed")

    def test_a_table_is_a_text_of_its_step_without_markup(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        tracker = TensorBoardTracker()
        tracker.start(run_in(tmp_path), None)
        tracker.log_table(4, TABLE)
        tracker.close("finished")
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("samples/answers/text_summary")
        ((text,),) = [event.tensor_proto.string_val for event in events]
        assert events[0].step == 4
        assert text.decode().splitlines() == [
            "| step | prompt | tokens | ended |",
            "| --- | --- | --- | --- |",
            "| 4 | a &#124; b<br>&#60;b&#62;&#42;c&#42; | 7.5 | True |",
            "| 4 | d | 2 | False |",
        ]

    def test_a_new_run_renames_the_events_of_an_earlier_run(self, tmp_path: Path) -> None:
        for steps in (range(1, 6), range(1, 3)):
            tracker = TensorBoardTracker()
            log_steps(tracker, tmp_path, None, steps)
            tracker.close("finished")
        assert len(self.read(tmp_path, "loss")) == 2
        assert (tmp_path / "tensorboard.1").is_dir()

    def test_events_go_to_the_directory_that_the_user_names(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        tracker = TensorBoardTracker(tensorboard_dir=str(tmp_path / "events"))
        log_steps(tracker, tmp_path, None, range(1, 3))
        tracker.close("finished")
        assert not (tmp_path / "tensorboard").exists()
        accumulator = EventAccumulator(str(tmp_path / "events" / "my-run"))
        assert accumulator.Reload().Scalars("loss")[1].step == 2


@pytest.mark.slow
class TestMlflow:
    @pytest.fixture(autouse=True)
    def _needs_sqlite_store(self) -> None:
        pytest.importorskip("sqlalchemy", reason="the mlflow extra is not installed")
        pytest.importorskip("alembic", reason="the mlflow extra is not installed")

    @staticmethod
    def client(directory: Path) -> object:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")

    def test_a_resumed_run_is_the_same_run_with_each_step_once(self, tmp_path: Path) -> None:
        log_steps(MlflowTracker(), tmp_path, None, range(1, 6))  # killed: never closed
        second = MlflowTracker()
        log_steps(second, tmp_path, 3, range(4, 7))
        client = self.client(tmp_path)
        experiment = client.get_experiment_by_name("my-run")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "RUNNING"
        second.close("finished")

        def history(name: str) -> list[tuple[int, float]]:
            return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]

        assert history("loss") == [(step, 1 / step) for step in range(1, 7)]
        assert history("eval/loss") == [(4, 0.25)]
        assert client.get_run(run.info.run_id).info.status == "FINISHED"
        assert run.data.params == {"actor_train.lr": "1e-06", "beta": "0.1"}

    def test_a_table_is_an_artifact_of_its_step(self, tmp_path: Path) -> None:
        import json

        tracker = MlflowTracker()
        tracker.start(run_in(tmp_path), None)
        for _ in range(2):  # a resumed run logs a step again
            tracker.log_table(4, TABLE)
        tracker.close("finished")
        client = self.client(tmp_path)
        (run,) = client.search_runs([client.get_experiment_by_name("my-run").experiment_id])
        (file,) = client.list_artifacts(run.info.run_id, "samples/answers")
        stored = json.loads(Path(client.download_artifacts(run.info.run_id, file.path)).read_text())
        assert stored == {"columns": TABLE.columns, "data": TABLE.rows}

    def test_name_notes_and_tags_are_those_of_the_run(self, tmp_path: Path) -> None:
        tracker = MlflowTracker(name="first try", notes="small beta", tags=["dpo", "baseline"])
        tracker.start(run_in(tmp_path), None)
        tracker.close("finished")
        client = self.client(tmp_path)
        (run,) = client.search_runs([client.get_experiment_by_name("my-run").experiment_id])
        assert run.info.run_name == "first try"
        assert run.data.tags["mlflow.note.content"] == "small beta"
        assert {"dpo", "baseline"} <= run.data.tags.keys()

    def test_a_new_run_in_the_same_directory_is_another_run(self, tmp_path: Path) -> None:
        for status in ("failed", "interrupted"):
            tracker = MlflowTracker()
            tracker.start(run_in(tmp_path), None)
            tracker.log(1, {"loss": math.nan})
            tracker.close(status)
        client = self.client(tmp_path)
        runs = client.search_runs([client.get_experiment_by_name("my-run").experiment_id])
        assert sorted(run.info.status for run in runs) == ["FAILED", "KILLED"]

    def test_all_files_are_written_to_the_run_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "run").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        log_steps(MlflowTracker(), tmp_path / "run", None, range(1, 2))
        assert list((tmp_path / "elsewhere").iterdir()) == []


def read_wandb_history(path: Path) -> list[dict[str, str]]:
    from wandb.proto.wandb_internal_pb2 import Record

    return [
        {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        for record in read_wandb_records(path, Record)
        if record.HasField("history")
    ]


def read_wandb_records(path: Path, record_type: type) -> list:
    """Read a .wandb file: LevelDB's log format (32 KiB blocks of checksum, length, type, data) of protobuf records."""
    data, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or its last fragment
            records.append(record_type.FromString(parts))
            parts = b""
    return records


class TestWandb:
    @pytest.fixture(autouse=True)
    def _isolated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        yield
        import wandb

        wandb.teardown()

    @staticmethod
    def runs(directory: Path) -> list[Path]:
        return sorted((directory / "wandb").glob("offline-run-*"))

    def test_without_a_key_it_runs_offline_and_a_resume_appends_to_the_same_id(self, tmp_path: Path) -> None:
        first = WandbTracker(wandb_project="p")
        log_steps(first, tmp_path, None, range(1, 6))
        first.close("interrupted")
        second = WandbTracker(wandb_project="p")
        log_steps(second, tmp_path, 3, range(4, 7))
        second.close("finished")
        files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime)
        assert len({path.name for path in files}) == 1
        deadline = time.monotonic() + 60  # a process of wandb writes the last record, on a busy machine after the end
        while len(rows := [row for path in files for row in read_wandb_history(path)]) < len(EXPECTED):
            assert time.monotonic() < deadline, rows
            time.sleep(0.1)
        assert [(int(row["_step"]), float(row["loss"])) for row in rows] == EXPECTED
        assert [row["_step"] for row in rows if "eval/loss" in row] == ["4"]

    def test_a_table_belongs_to_its_step_and_is_not_sent_again(self, tmp_path: Path) -> None:
        import json

        for resume_step in (None, 3):
            tracker = WandbTracker(wandb_project="p", wandb_mode="offline")
            tracker.start(run_in(tmp_path), resume_step)
            tracker.log_table(4, TABLE)
            tracker.log(4, {"samples/win_rate": 0.5})
            tracker.close("finished")
        rows = [row for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb") for row in read_wandb_history(path)]
        (row,) = rows
        (file,) = tmp_path.glob(f"wandb/offline-run-*/files/{json.loads(row['samples/answers.path'])}")
        assert (row["_step"], row["samples/win_rate"]) == ("4", "0.5")
        assert json.loads(file.read_text())["data"] == TABLE.rows

    @pytest.mark.parametrize(("mode", "level"), [("auto", "WARNING"), ("offline", "INFO")])
    def test_an_offline_run_is_announced_with_the_command_that_uploads_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: WandbMode, level: str
    ) -> None:
        caplog.set_level("INFO", "thresher")
        tracker = WandbTracker(wandb_project="p", wandb_mode=mode)
        tracker.start(run_in(tmp_path), None)
        tracker.close("finished")
        (directory,) = self.runs(tmp_path)
        (record,) = [each for each in caplog.records if each.name.startswith("thresher.")]
        reason = "no API key is configured, so " if mode == "auto" else ""
        assert record.levelname == level
        assert record.getMessage() == (
            f"wandb: {reason}this run is logged offline; upload it later with: wandb sync {directory}"
        )

    def test_name_notes_and_tags_are_those_of_the_run(self, tmp_path: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        tracker = WandbTracker(
            wandb_project="p", wandb_mode="offline", name="first try", notes="small beta", tags=["dpo"]
        )
        log_steps(tracker, tmp_path, None, range(1, 2))
        tracker.close("finished")
        (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
        (run,) = [record.run for record in read_wandb_records(path, Record) if record.HasField("run")]
        assert (run.display_name, run.notes, list(run.tags)) == ("first try", "small beta", ["dpo"])

    def test_an_api_key_in_the_config_selects_online(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tracker = WandbTracker(wandb_project="p", wandb_api_key="k" * 40)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("WANDB_API_KEY", "of another account")
        assert tracker._choose_mode() == "online"
        assert os.environ["WANDB_API_KEY"] == "k" * 40
        assert not (tmp_path / "netrc").exists(), "the key is for this run alone"

    def test_a_new_run_in_the_same_directory_gets_another_id(self, tmp_path: Path) -> None:
        for _ in range(2):
            tracker = WandbTracker(wandb_project="p", wandb_mode="offline")
            log_steps(tracker, tmp_path, None, range(1, 2))
            tracker.close("finished")
        assert len({path.name.rpartition("-")[2] for path in self.runs(tmp_path)}) == 2

    @pytest.mark.slow
    def test_a_killed_process_loses_no_complete_step(self, tmp_path: Path) -> None:
        code = (
            "import os, signal, sys, time, pathlib; from thresher.observability.trackers.tracker import RunInfo; "
            "from thresher.observability.trackers.libraries import WandbTracker; "
            "t = WandbTracker(wandb_project='p'); "
            "t.start(RunInfo('my-run', pathlib.Path(sys.argv[1]), {}, 6, 60), None); "
            "[t.log(s, {'loss': 1 / s}) for s in range(1, 6)]; time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == -9
        assert done.stdout == ""
        second = WandbTracker(wandb_project="p")
        log_steps(second, tmp_path, 3, range(4, 7))
        second.close("finished")
        files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime)
        steps = [int(row["_step"]) for path in files for row in read_wandb_history(path)]
        assert steps == list(range(1, 7))

    def test_online_without_a_key_names_the_fix_instead_of_prompting(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no API key.*wandb login.*offline"):
            WandbTracker(wandb_project="p", wandb_mode="online").start(run_in(tmp_path), None)

    @pytest.mark.parametrize(("given", "reports"), [(None, False), ("true", True)])
    def test_errors_are_reported_to_its_makers_only_on_request(
        self, monkeypatch: pytest.MonkeyPatch, given: str | None, reports: bool
    ) -> None:
        monkeypatch.setenv("WANDB_ERROR_REPORTING", given or "")
        if given is None:
            monkeypatch.delenv("WANDB_ERROR_REPORTING")
        WandbTracker(wandb_project="p")
        from wandb.env import error_reporting_enabled

        assert error_reporting_enabled() is reports

    def test_the_command_line_is_not_collected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["thresher", "hf_token=c4n4ry"])
        tracker = WandbTracker(wandb_project="p")
        log_steps(tracker, tmp_path, None, range(1, 2))
        tracker.close("finished")
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or b"c4n4ry" not in path.read_bytes()


class TestTrackio:
    @pytest.fixture
    def project(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
        """A project in a database below the directory of temporary files: Trackio reads the variable on import."""
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path_factory.getbasetemp() / "trackio"))
        import trackio

        assert trackio.utils.TRACKIO_DIR.is_relative_to(tmp_path_factory.getbasetemp())
        return tmp_path.name

    @staticmethod
    def read(project: str) -> tuple[object, list[dict[str, object]]]:
        import trackio

        (run,) = trackio.Api().runs(project)
        return run, trackio.SQLiteStorage.get_logs(project, run.name, run_id=run.id)

    def test_a_resumed_run_is_the_same_run_with_each_step_once(
        self, tmp_path: Path, project: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first = TrackioTracker(trackio_project=project)
        log_steps(first, tmp_path, None, range(1, 6))
        first.log_table(4, TABLE)
        first.close("interrupted")
        second = TrackioTracker(trackio_project=project)
        log_steps(second, tmp_path, 3, range(4, 7))
        second.log_table(4, TABLE)
        second.close("finished")
        run, rows = self.read(project)
        assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == EXPECTED
        assert [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row] == [(4, 0.25)]
        (table,) = [row["samples/answers"] for row in rows if "samples/answers" in row]
        assert [list(each.values()) for each in table["_value"]] == TABLE.rows
        assert run.name == "my-run"
        assert run.config["actor_train"] == {"lr": 1e-6}
        assert capsys.readouterr().out == ""

    def test_runs_of_one_name_are_told_apart(self, tmp_path: Path, project: str) -> None:
        import trackio

        for directory, resume_step in (("a", None), ("b", None), ("a", 2), ("a", None)):
            (tmp_path / directory).mkdir(exist_ok=True)
            tracker = TrackioTracker(trackio_project=project)
            log_steps(tracker, tmp_path / directory, resume_step, range(1, 3))
            tracker.close("finished")
        runs = list(trackio.Api().runs(project))
        assert [run.name for run in runs] == ["my-run"] * 3
        counts = [len(trackio.SQLiteStorage.get_logs(project, run.name, run_id=run.id)) for run in runs]
        assert counts == [2, 2, 2]

    def test_a_run_stays_on_this_machine(
        self, tmp_path: Path, project: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        import huggingface_hub

        monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")
        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: pytest.fail("contacts the Hub"))
        tracker = TrackioTracker(trackio_project=project)
        log_steps(tracker, tmp_path, None, range(1, 2))
        tracker.close("finished")
        assert f"trackio sync --project {project} --space-id SPACE" in caplog.text
        assert len(self.read(project)[1]) == 1

    @pytest.mark.usefixtures("project")
    def test_a_project_name_that_trackio_reserves_is_a_user_error(self) -> None:
        with pytest.raises(UserError, match=r"trackio_project: .*'registry-a' is not allowed.* Choose a different"):
            TrackioTracker(trackio_project="registry-a")

    @pytest.mark.slow
    def test_a_killed_process_loses_no_step_older_than_a_second(self, tmp_path: Path, project: str) -> None:
        code = (
            "import os, signal, sys, time, pathlib; from thresher.observability.trackers.tracker import RunInfo; "
            "from thresher.observability.trackers.libraries import TrackioTracker; "
            "t = TrackioTracker(trackio_project=sys.argv[2]); "
            "t.start(RunInfo('my-run', pathlib.Path(sys.argv[1]), {}, 6, 60), None); "
            "[t.log(s, {'loss': 1 / s}) for s in range(1, 6)]; time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), project],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == -9
        assert done.stdout == ""
        second = TrackioTracker(trackio_project=project)
        log_steps(second, tmp_path, 3, range(4, 7))
        second.close("finished")
        _, rows = self.read(project)
        assert sorted(row["step"] for row in rows if "loss" in row) == list(range(1, 7))
