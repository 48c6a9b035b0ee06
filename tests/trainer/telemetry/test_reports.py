"""Trackers get every report once through their own libraries, and they cannot stop, slow or outlive a run."""

import asyncio
import errno
import importlib
import importlib.util
import io
import json
import logging
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.telemetry.reports import Reports
from services.trainer.telemetry.step_metrics import TrainedGroup
from services.trainer.telemetry.tracker_process import TrackerProcess
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.groups import scored_group

RUN_ID = "run-abc"
NO_NETWORK = """
import socket
def connect(self, address):
    if self.family != socket.AF_UNIX:
        open({log!r}, "a").write(repr(address) + "\\n")
        raise OSError("no network in this test")
socket.socket.connect = connect
socket.socket.connect_ex = connect
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the files of the libraries below the test's directory."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path))


def reports(tmp_path: Path, *, resumed_step: int = 0, **options: Any) -> Reports:
    config = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"], learning_rate=0.5, **options)
    return Reports(config, run_id=RUN_ID, run_dir=tmp_path, total_steps=8, resumed_step=resumed_step)


def events_of_tensorboard(run_dir: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    library: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = library.EventAccumulator(str(run_dir / "reports" / "tensorboard"))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(name)]


def scalars_of_tensorboard(run_dir: Path, name: str = "train/loss") -> dict[int, float]:
    return dict(events_of_tensorboard(run_dir, name))


def rows_of_trackio(run_dir: Path, project: str = "headrace") -> list[tuple[str, int, dict[str, Any]]]:
    database = sqlite3.connect(run_dir / "trackio" / f"{project}.db")
    found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    database.close()
    return [(name, step, json.loads(metrics)) for name, step, metrics in found]


def records_of_wandb(run_dir: Path) -> Iterator[Any]:
    """Yield the records of its offline files, which are LevelDB logs of protocol buffers."""
    internal: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted((run_dir / "reports" / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime):
        data, position, whole = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            _, length, kind = struct.unpack("<IHB", data[position : position + 7])
            whole += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):
                yield internal.Record.FromString(whole)
                whole = b""


def history_of_wandb(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records_of_wandb(run_dir)
        if record.WhichOneof("record_type") == "history"
    ]


def train_resume_train(tmp_path: Path, tracker: str) -> None:
    """Report steps 1 to 4. Then, from the checkpoint of step 2, report steps 3 to 6 with other numbers."""
    first = reports(tmp_path, report_to=[tracker], name="mine")
    for step in range(1, 5):
        first.step(step, {"step": float(step), "at_s": 1.0, "loss": step / 4, "reward": float("nan")})
    first.close()
    second = reports(tmp_path, report_to=[tracker], name="mine", resumed_step=2)
    for step in range(3, 7):
        second.step(step, {"step": float(step), "at_s": 1.0, "loss": float(step)})
    second.evaluation(5, {"eval_reward": 0.75})
    second.close()
    assert first.metrics() == second.metrics() == {"reports/lost": 0.0}
    assert first.take_failures() + second.take_failures() == []


def test_event_files_hold_the_steps_of_the_weights_that_survive(tmp_path: Path) -> None:
    train_resume_train(tmp_path, "tensorboard")
    assert scalars_of_tensorboard(tmp_path) == {1: 0.25, 2: 0.5, 3: 3.0, 4: 4.0, 5: 5.0, 6: 6.0}
    assert scalars_of_tensorboard(tmp_path, "eval/reward") == {5: 0.75}


@pytest.mark.parametrize(("run_is_over", "reported"), [(True, {4: 2.5, 6: 5.5}), (False, {4: 2.5})])
def test_the_last_steps_are_reported_when_the_run_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_is_over: bool, reported: dict[int, float]
) -> None:
    told = reports(tmp_path, report_to=["tensorboard"], logging_steps=0.5, log_completions=True)
    for step in range(1, 7):
        told.step(step, {"loss": float(step)}, [one_group(number=step)])
    told.close(run_is_over=run_is_over)
    assert scalars_of_tensorboard(tmp_path) == reported
    assert ("Step 6" in capsys.readouterr().err) == run_is_over


@pytest.mark.parametrize(("resumed_step", "mean"), [(7, 4.75), (6, 4.0), (4, 1.0)])
def test_steps_before_a_restart_that_were_not_reported_count_in_the_next_report(
    tmp_path: Path, resumed_step: int, mean: float
) -> None:
    lines = [{"step": float(step), "loss": float(step), "kl": None} for step in range(1, resumed_step + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    told = reports(tmp_path, report_to=["tensorboard"], logging_steps=4, resumed_step=resumed_step)
    told.step(resumed_step + 1, {"loss": 1.0})
    told.close()
    assert scalars_of_tensorboard(tmp_path) == {resumed_step + 1: mean}


def test_event_files_have_no_step_twice_after_a_death_before_the_first_checkpoint(tmp_path: Path) -> None:
    for loss in (0.25, 0.5):
        told = reports(tmp_path, report_to=["tensorboard"])
        for step in (1, 2):
            told.step(step, {"loss": loss})
        told.close()
    assert events_of_tensorboard(tmp_path) == [(1, 0.5), (2, 0.5)]


def test_a_resumed_run_goes_on_in_the_same_run_of_trackio_without_a_step_twice(tmp_path: Path) -> None:
    train_resume_train(tmp_path, "trackio")
    rows = rows_of_trackio(tmp_path)
    assert [(step, metrics) for _, step, metrics in rows] == [
        (1, {"train/loss": 0.25}),
        (2, {"train/loss": 0.5}),
        (3, {"train/loss": 0.75}),
        (4, {"train/loss": 1.0}),
        (5, {"train/loss": 5.0}),
        (6, {"train/loss": 6.0}),
        (5, {"eval/reward": 0.75}),
    ]
    assert {name for name, _, _ in rows} == {"mine-run-abc"}


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_without_a_step_twice(tmp_path: Path) -> None:
    train_resume_train(tmp_path, "wandb")
    runs = [record.run for record in records_of_wandb(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(RUN_ID, "headrace", "mine")}
    (rate,) = {item.value_json for item in runs[0].config.update if item.key == "learning_rate"}
    assert float(rate) == 0.5
    history = history_of_wandb(tmp_path)
    assert [(row["train/global_step"], row.get("train/loss")) for row in history] == [
        (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 5.0), (6, 6.0), (5, None),
    ]  # fmt: skip
    assert history[-1]["eval/reward"] == 0.75


def evaluate_crash_evaluate(tmp_path: Path, tracker: str) -> None:
    """Report step 4 before the evaluation of step 2 is done. Resume from step 1, and resume again when it is done."""
    first = reports(tmp_path, report_to=[tracker])
    for step in range(1, 5):
        first.step(step, {"loss": step / 4})
    first.close()
    second = reports(tmp_path, report_to=[tracker], resumed_step=1)
    second.step(2, {"loss": 9.0})
    second.evaluation(2, {"eval_reward": 0.5})
    second.evaluation(4, {"eval_reward": 0.625})
    second.close()
    third = reports(tmp_path, report_to=[tracker], resumed_step=3)
    third.evaluation(3, {"eval_reward": 0.75})
    third.evaluation(4, {"eval_reward": 9.0})
    third.close()
    assert third.metrics() == {"reports/lost": 0.0}


def test_trackio_gets_the_evaluation_of_a_step_that_was_reported_before_a_crash(tmp_path: Path) -> None:
    evaluate_crash_evaluate(tmp_path, "trackio")
    rows = rows_of_trackio(tmp_path)
    evaluations = [(step, metrics["eval/reward"]) for _, step, metrics in rows if "eval/reward" in metrics]
    assert evaluations == [(2, 0.5), (4, 0.625), (3, 0.75)]
    assert len(rows) == 4 + 3, "no step is reported twice"


def test_wandb_gets_the_evaluation_of_a_step_that_was_reported_before_a_crash(tmp_path: Path) -> None:
    evaluate_crash_evaluate(tmp_path, "wandb")
    history = history_of_wandb(tmp_path)
    rows = [(row["train/global_step"], row["eval/reward"]) for row in history if "eval/reward" in row]
    assert rows == [(2, 0.5), (4, 0.625), (3, 0.75)]
    assert len(history) == 4 + 3, "no step is reported twice"


def one_group(*, prompt: str = "abc", number: int = 0) -> TrainedGroup:
    group = scored_group(f"{number:08d}", rewards=[0.0, 1.0])
    return TrainedGroup(
        WaitingGroup(number, group, 0), np.array([0.0, 1.0]), np.array([-0.7071, 0.7071]), has_signal=True
    )


@pytest.mark.parametrize(("content", "key"), [("secret-1\n", "secret-1"), ("", None)])
def test_the_key_of_a_tracker_is_read_from_a_file_by_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, key: str | None
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "key").write_text(content)
    monkeypatch.setenv("WANDB_API_KEY_FILE", str(tmp_path / "key"))
    (tmp_path / "wandb.py").write_text("import os, sys; sys.exit('key: %s' % os.environ.get('WANDB_API_KEY'))")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    trackers = reports(tmp_path, report_to=["wandb"])
    trackers.close()
    assert f"key: {key}" in (tmp_path / "reports" / "wandb.log").read_text()
    assert "WANDB_API_KEY" not in os.environ


def test_completions_are_printed_and_reported_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = reports(tmp_path, report_to=["trackio", "wandb"], project="tables", log_completions=True, logging_steps=2)
    told.step(1, {"loss": 1.0}, [one_group(number=0)])
    assert capsys.readouterr().err == ""
    told.step(2, {"loss": 2.0}, [one_group(number=1)])
    printed = capsys.readouterr().err
    told.close()

    assert "Step 2" in printed
    for word in ("Prompt", "Completion", "exact", "Advantage", "abc", " 0.71", "-0.71"):
        assert word in printed
    expected = [
        {"step": 2, "prompt": "abc", "completion": "42", "exact": 0.0, "advantage": -0.7071},
        {"step": 2, "prompt": "abc", "completion": "42", "exact": 1.0, "advantage": 0.7071},
    ]
    (_, _, metrics), (_, _, table) = rows_of_trackio(tmp_path, "tables")
    assert metrics == {"train/loss": 1.5}
    assert table["completions"]["_value"] == expected
    (path,) = (tmp_path / "reports" / "wandb").glob("offline-run-*/files/media/table/*.json")
    media = json.loads(path.read_text())
    assert [dict(zip(media["columns"], row, strict=True)) for row in media["data"]] == expected


def test_a_table_that_a_full_disk_does_not_take_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str, /) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    told = reports(tmp_path, log_completions=True)
    monkeypatch.setattr(sys, "stderr", Full())
    told.step(1, {"loss": 1.0}, [one_group(number=0)])
    told.close()


def test_completions_are_a_markdown_table_in_tensorboard(tmp_path: Path) -> None:
    told = reports(tmp_path, report_to=["tensorboard"], log_completions=True)
    told.step(1, {"loss": 1.0}, [one_group(number=0)])
    told.close()
    library: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = library.EventAccumulator(str(tmp_path / "reports" / "tensorboard"))
    read.Reload()
    (event,) = read.Tensors("completions")
    assert event.step == 1
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "| step | prompt | completion | exact | advantage |",
        "| --- | --- | --- | --- | --- |",
        "| 1 | abc | 42 | 0 | -0.7071 |",
        "| 1 | abc | 42 | 1 | 0.7071 |",
    ]


@pytest.mark.parametrize("name", ["mlflow", "swanlab", "comet_ml"])
def test_a_resumed_run_goes_on_in_trackers_that_are_not_in_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Offline, with the library itself; it is not in the locked environment."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"pip install {name}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    for resumed_step in (0, 1):
        told = reports(tmp_path, report_to=[name], log_completions=True, resumed_step=resumed_step, name="n")
        for step in (1, 2):
            told.step(step, {"loss": 1.0 / step, "rewards/a:b@c/mean": 2.0}, [one_group(number=step)])
        told.evaluation(1, {"eval_loss": 0.5})
        told.close()
        assert told.take_failures() == []
        assert told.metrics() == {"reports/lost": 0.0}
    (sent,) = (tmp_path / "reports").glob("*.reported")
    assert sorted(sent.read_text().splitlines()) == [
        *("completions 1", "completions 2", "evaluation 1", "step 1", "step 2")
    ]
    if name == "mlflow":
        (losses,) = tmp_path.glob("mlruns/*/*/metrics/train/loss")
        assert [line.split()[1:] for line in losses.read_text().splitlines()] == [["1.0", "1"], ["0.5", "2"]]


def test_trackio_and_tensorboard_make_no_network_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK.format(log=str(calls)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    probe = "import socket; socket.create_connection(('127.0.0.1', 9))"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False, timeout=120).returncode == 1
    assert "9" in calls.read_text(), "the trap works"
    calls.unlink()

    told = reports(tmp_path, report_to=["trackio", "tensorboard"])
    told.step(1, {"loss": 1.0})
    told.close()

    assert told.metrics() == {"reports/lost": 0.0}
    assert len(rows_of_trackio(tmp_path)) == len(scalars_of_tensorboard(tmp_path)) == 1
    assert not calls.exists()


def test_a_tracker_that_refuses_costs_its_reports_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of Weights & Biases: it needs a key that is not there."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    told = reports(tmp_path, report_to=["wandb", "tensorboard"])
    for step in range(1, 4):
        told.step(step, {"loss": float(step)})
    told.close()

    assert told.metrics() == {"reports/lost": 3.0}
    assert scalars_of_tensorboard(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "reports to wandb have stopped" in warning
    (failure,) = told.take_failures()
    assert "reports to wandb have stopped: it ended with status 1" in failure
    assert told.take_failures() == [], "the message is logged once"
    assert "api_key" in (tmp_path / "reports" / "wandb.log").read_text().lower().replace("api key", "api_key")


@pytest.fixture
async def tracker(tmp_path: Path) -> AsyncIterator[TrackerProcess]:
    """Yield a tracker that has received its first report."""
    head: dict[str, Any] = {"run_id": RUN_ID, "name": None, "project": "p", "config": {}, "resumed_step": 0}
    tracker = TrackerProcess(
        "tensorboard", head={**head, "directory": str(tmp_path)}, output=tmp_path / "tensorboard.log"
    )
    tracker.start()
    tracker.put({"kind": "step", "step": 1, "metrics": {"train/loss": 1.0}})
    await eventually(lambda: tracker.num_waiting == 0)
    assert (tmp_path / "tensorboard.reported").read_text() == "step 1\n"
    yield tracker
    tracker.end()
    tracker.wait(timeout_s=0.1)


def has_ended(pid: int) -> bool:
    """Whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def pid_of(tracker: TrackerProcess) -> int:
    assert tracker.pid is not None
    return tracker.pid


async def test_a_tracker_that_was_killed_is_left_behind(
    tracker: TrackerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(pid_of(tracker), signal.SIGKILL)
    for step in range(2, 5):
        tracker.put({"kind": "step", "step": step, "metrics": {"train/loss": 1.0}})
    await eventually(lambda: tracker.num_lost == 3)
    tracker.wait(timeout_s=120.0)  # its thread counts what is lost first, and then logs why
    assert tracker.failure == "it ended with status -9"
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


async def test_a_tracker_that_hangs_takes_only_bounded_time_and_memory(tracker: TrackerProcess) -> None:
    pid = pid_of(tracker)
    os.kill(pid, signal.SIGSTOP)
    began_at = time.monotonic()
    for step in range(2, 102):
        tracker.put({"kind": "completions", "step": step, "columns": ["completion"], "rows": [["x" * 500_000]]})
    assert time.monotonic() - began_at < 30
    num_kept = 32 * 1024 * 1024 // 500_050
    assert tracker.num_lost == pytest.approx(100 - num_kept, abs=2)
    tracker.end()
    tracker.wait(timeout_s=0.2)
    assert time.monotonic() - began_at < 30
    assert tracker.num_lost == 100
    assert tracker.failure == "it did not finish within 0 s after the run"
    assert has_ended(pid)


async def test_a_tracker_ends_with_all_that_was_reported_when_the_rank_is_killed(tmp_path: Path) -> None:
    rank = f"""
import os, signal, time
from pathlib import Path
from services.trainer.telemetry.reports import Reports
from shared.run_options.run_config import RunConfig
config = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"], report_to=["tensorboard"])
reports = Reports(config, run_id="run-abc", run_dir=Path({str(tmp_path)!r}), total_steps=3, resumed_step=0)
for step in range(1, 4):
    reports.step(step, {{"loss": float(step)}})
while reports._trackers[0]._num_waiting:
    time.sleep(0.01)
print(reports._trackers[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", rank]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    await eventually(lambda: has_ended(int(done.stdout)))
    assert scalars_of_tensorboard(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0}
