"""Metrics have one name, one unit and one meaning: in the log, on their page and in Prometheus."""

import json
import math
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.trainer.run_api.training_gauges import TrainingGauges
from services.trainer.run_outputs import read_last_evaluation, read_last_metrics
from services.trainer.telemetry.metric_catalogue import METRICS, find_metric
from services.trainer.telemetry.reports import MetricWindow, tracker_names

pytestmark = pytest.mark.unit


def test_no_two_metrics_share_a_name_in_the_log_or_on_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert len({metric.prometheus_name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize(
    ("name", "prometheus_name", "labels"),
    [
        ("reward", "headrace_training_reward", {}),
        ("completions/mean_length", "headrace_training_completions_mean_length_tokens", {}),
        ("rewards/exact/mean", "headrace_training_rewards_mean", {"reward": "exact"}),
        ("groups/dropped", "headrace_training_groups_dropped", {}),
        ("groups/dropped/stale", "headrace_training_groups_dropped_by_reason", {"reason": "stale"}),
        ("push/standstill_s", "headrace_training_push_standstill_seconds", {}),
        ("throughput/trained_tokens_per_s", "headrace_training_throughput_trained_tokens_per_second", {}),
        ("clip_ratio/low_mean", "headrace_training_clip_ratio_low_mean", {}),
        ("memory/rss_bytes", "headrace_training_memory_rss_bytes", {}),
    ],
)
def test_a_metric_is_found_by_its_name_and_has_its_unit_on_prometheus(
    name: str, prometheus_name: str, labels: dict[str, str]
) -> None:
    found = find_metric(name)
    assert found is not None
    assert (found[0].prometheus_name, found[1]) == (prometheus_name, labels)


def test_an_unlisted_metric_is_not_found() -> None:
    assert find_metric("rewards/exact/median") is None
    assert find_metric("eval_") is None


def served(gauges: TrainingGauges) -> list[str]:
    registry = CollectorRegistry()
    registry.register(gauges)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_the_newest_metrics_are_gauges_of_their_run_until_it_leaves() -> None:
    gauges = TrainingGauges()
    gauges.show(
        "run-a", {"reward": 0.5, "rewards/exact/mean": 0.25, "eval_reward": 0.75, "kl": None, "unheard_of": 1.0}
    )
    assert sorted(served(gauges)) == [
        'headrace_training_eval_reward{run_id="run-a"} 0.75',
        'headrace_training_rewards_mean{reward="exact",run_id="run-a"} 0.25',
        'headrace_training_reward{run_id="run-a"} 0.5',
    ]
    gauges.show("run-b", {"reward": 1.0})
    assert served(gauges) == ['headrace_training_reward{run_id="run-b"} 1.0']
    gauges.clear()
    assert served(gauges) == []


def test_steps_are_reported_as_their_mean_and_totals_as_the_newest() -> None:
    window = MetricWindow()
    window.add({"reward": 0.0, "num_tokens": 100.0, "groups/dropped/stale": 1.0, "kl": math.nan, "learning_rate": 0.5})
    window.add({"reward": 1.0, "num_tokens": 200.0, "groups/dropped/stale": 3.0, "kl": 2.0, "learning_rate": 0.25})
    window.add({"num_tokens": 300.0})
    assert window.take() == {
        "reward": 0.5, "num_tokens": 300.0, "groups/dropped/stale": 3.0, "kl": 2.0, "learning_rate": 0.25,
    }  # fmt: skip
    assert window.take() == {}


def test_trackers_get_the_names_that_trls_have_there() -> None:
    assert tracker_names({"step": 3.0, "at_s": 9.0, "reward": 1.0, "eval_reward": 0.5, "loss": math.nan}) == {
        "train/reward": 1.0,
        "eval/reward": 0.5,
    }


def test_the_newest_lines_are_read_without_the_rest(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "filler": "{"x" * 4000}"}}\n' for step in range(50)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 50')
    assert [line["step"] for line in read_last_metrics(tmp_path, limit=2)] == [48, 49]
    assert [line["step"] for line in read_last_metrics(tmp_path, limit=60)] == list(range(50))
    assert read_last_metrics(tmp_path / "nowhere", limit=2) == []
    assert read_last_evaluation(tmp_path) == {}
    (tmp_path / "evaluations.jsonl").write_text('{"step": 5, "eval_reward": 0.5}\n{"step": 10, "eval_reward": null}\n')
    assert read_last_evaluation(tmp_path) == {"step": 10, "eval_reward": None}


def test_the_newest_lines_are_read_however_long_they_are(tmp_path: Path) -> None:
    """Each reward function and each tool adds metrics to a line."""
    long = {f"rewards/function_{number}/mean": 0.5 for number in range(2000)}
    lines = [{"step": step} | long for step in range(4)]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert len(json.dumps(lines[0])) > 64 * 1024
    assert read_last_metrics(tmp_path, limit=2) == lines[2:]
    assert read_last_evaluation(tmp_path) == lines[3]
