"""The throughput estimates of `headrace plan`: generators, groups in flight and workers, computed by hand."""

from pathlib import Path

import pytest

from tests.headrace.plan.plan_rig import PACE, large_model, planned, value

pytestmark = pytest.mark.unit


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model of 8 190 735 360 parameters."""
    return large_model(tmp_path / "model")


def test_a_plan_that_is_slow_and_fits_ends_with_0(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = planned(capsys, "--model", model, *PACE, "--generator-tokens-per-s", 3000, "--push-standstill-s", 5000)
    assert body["plan"]["pace"]["generators"]["is_warning"]
    assert body["fits"]


def test_the_number_of_generators_keeps_the_trainer_busy_through_the_pushes(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """32 x 8 x 1500 tokens at 9000 per second take 42.67 s, 1.2 s of it at rest: 9000 / (3000 x 0.97188) = 3.09."""
    body = planned(
        capsys, "--model", model, *PACE, "--generator-tokens-per-s", 3000, "--push-standstill-s", 1.2, "--reward-s", 4,
        "--trainer-gpus", 2,
    )  # fmt: skip
    assert value(body, "pace", "a step that never waits") == pytest.approx(42.667, abs=1e-3)
    assert value(body, "pace", "generators") == 4
    assert value(body, "pace", "generator GPUs a trainer GPU") == 2
    assert value(body, "pace", "groups in flight") == 96
    assert value(body, "pace", "staleness, about") == 2
    assert value(body, "rewarder", "workers") == 3  # 0.75 groups per second, 4 s each
    assert body["missing"] == ["generator, each GPU: sequences that fit: give --gpu-gib"]


def test_a_second_pass_over_a_batch_halves_what_must_be_generated(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(
        capsys, "--model", model, *PACE, "--generator-tokens-per-s", 3000, "--set", "num_iterations=2",
        "--max-staleness", 3,
    )  # fmt: skip
    assert value(body, "pace", "generated, to keep it busy") == 4500
    assert value(body, "pace", "generators") == 2
    assert value(body, "pace", "groups in flight") == 64


def test_a_push_stops_decoding_once_a_batch_however_many_steps_that_has(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four steps of 42.67 s, and 50 s without decoding: 9000 / 4 / (3000 x (1 - 50 / 170.67)) = 1.06."""
    body = planned(
        capsys, "--model", model, *PACE, "--generator-tokens-per-s", 3000, "--set", "num_iterations=4",
        "--max-staleness", 7, "--push-standstill-s", 50,
    )  # fmt: skip
    assert value(body, "pace", "generators") == 2


def test_without_rates_nothing_is_made_up_and_each_missing_one_says_how_to_measure_it(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(capsys, "--model", model)
    assert body["plan"]["pace"]["trainer's rate"]["value"] is None
    missing = " ".join(body["missing"])
    for name in (
        "throughput/trained_tokens_per_s",
        "make bench-trainer",
        "make bench-generator",
        "completions/mean_length",
    ):
        assert name in missing
    assert "generators" not in body["plan"]["pace"]


def test_groups_that_are_dropped_are_sampled_scored_and_kept_until_a_checkpoint_too(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second group: 9000 / 0.5 tokens per second, 0.75 / 0.5 groups per second, 96 + 2 x 5 x 32 / 0.5 groups."""
    body = planned(
        capsys, "--model", model, *PACE, "--generator-tokens-per-s", 3000,
        "--drop-share", 0.5, "--reward-s", 4, "--set", "save_steps=5",
    )  # fmt: skip
    assert value(body, "pace", "generated, to keep it busy") == 18000
    assert value(body, "pace", "generators") == 6
    assert value(body, "rewarder", "groups to score") == pytest.approx(1.5)
    assert value(body, "rewarder", "workers") == 6
    assert value(body, "redis", "groups, about") == 96 + 640


def test_the_plan_of_an_on_policy_run_says_that_nothing_overlaps(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(capsys, "--model", model, *PACE, "--generator-tokens-per-s", 3000, "--max-staleness", 0)
    assert "take turns" in body["plan"]["pace"]["generators"]["how"]
