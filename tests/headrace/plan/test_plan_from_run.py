"""`headrace plan --from-run`: rates from a run's own metrics."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.plan.from_run import measured
from shared.errors import UserError
from tests.headrace.plan.plan_rig import TINY, planned, value
from tests.headrace.scripted_api import Asked, serving

pytestmark = pytest.mark.unit


def lines(*, train_s: float, step_s: float) -> list[dict[str, Any]]:
    """Return eight steps of 2 groups of 4 with completions of 100 tokens after prompts of 30: 1040 tokens per step."""
    return [
        {
            "step": step, "train_time": train_s, "step_time": step_s, "num_tokens": 1040.0 * step,
            "completions/mean_length": 100.0, "throughput/trained_tokens_per_s": 800 / train_s,
            "throughput/generated_tokens_per_s": 800 / step_s, "push/standstill_s": 0.5,
        }
        for step in range(1, 9)
    ]  # fmt: skip


SETTINGS = {"groups_per_step": 2, "num_generations": 4, "steps_per_generation": 1}


def test_a_run_that_waited_shows_the_capacity_of_its_generators() -> None:
    found = measured("run-a", SETTINGS, lines(train_s=2.0, step_s=8.0), num_generators=2)
    assert found.rates.trainer_tokens_per_s == 400
    assert found.rates.generator_tokens_per_s == 50
    assert not found.rates.is_generator_lower_bound
    assert found.completion_tokens == 100
    assert found.prompt_tokens == pytest.approx(30)


def test_of_a_run_whose_trainer_never_waited_the_generators_rate_is_a_lower_bound() -> None:
    assert measured("run-a", SETTINGS, lines(train_s=7.9, step_s=8.0), num_generators=2).rates.is_generator_lower_bound


def test_a_run_that_has_just_begun_shows_no_capacity() -> None:
    with pytest.raises(UserError, match="run-a has made 2 steps"):
        measured("run-a", SETTINGS, lines(train_s=1.0, step_s=2.0)[:2], num_generators=1)


def test_a_plan_from_a_run_takes_its_settings_and_rates_over_http(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "qwen3"}))
    config = {
        "model": str(tmp_path), "dataset_name": "/data/train.jsonl", "reward_funcs": ["accuracy_reward"], **SETTINGS,
        "max_staleness": 1, "max_steps": 8,
    }  # fmt: skip

    def script(asked: Asked) -> Any:
        if asked.path.startswith("/v1/runs/run-a/metrics"):
            return {"metrics": lines(train_s=2.0, step_s=8.0), "next_after_step": None}
        return {"run_id": "run-a", "config": config, "generators": [], "progress": {"num_generators": 1}}

    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    with serving(script) as api:
        body = planned(capsys, "--from-run", "run-a", "--url", api.url)
    assert value(body, "pace", "trainer's rate") == 400
    assert value(body, "pace", "generators") == 4
    assert value(body, "pace", "groups in flight") == 4
    assert "run-a" in body["plan"]["pace"]["trainer's rate"]["how"]
