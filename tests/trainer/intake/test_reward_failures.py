"""When rewards pause a run: how often which function failed in the newest groups, and when it works again."""

from typing import Any

import pytest

from services.trainer.intake.reward_failures import RewardFailures, first_failure
from services.trainer.objective.advantages import GroupOutcomes
from shared.messages import Outcome, RewardOutcome
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


def failures(config: RunConfig, **changes: Any) -> RewardFailures:
    plain = {"reward_failure_window": 2, "reward_failure_threshold": 0.5, "min_scored_completions": 2}
    return RewardFailures(config.model_copy(update=plain | changes))


def said(*outcomes: Outcome, name: str = "judge", detail: str = "") -> GroupOutcomes:
    """Return the outcomes of one function for this many completions."""
    return [
        (
            RewardOutcome(
                name, outcome, 1.0 if outcome == "scored" else None, 1.0, detail if outcome != "scored" else ""
            ),
        )
        for outcome in outcomes
    ]


def test_a_function_that_fails_for_more_than_the_threshold_is_named_with_its_share_and_what_it_said_last(
    run_config: RunConfig,
) -> None:
    found = failures(run_config)
    found.note(0, said("scored", "scored", "error", "error", detail="at first"), is_scorable=True)
    assert found.verdict() is None, "the window is not full"
    found.note(1, said("scored", "timeout", "invalid", "overload", detail="no answer"), is_scorable=False)
    verdict = found.verdict()
    assert verdict is not None
    assert (verdict.reward_func, verdict.failed_ratio, verdict.last_failure) == ("judge", 5 / 8, "overload no answer")
    assert verdict.reason == (
        "reward function judge failed for 62% of the completions of the last 2 groups, more than "
        "reward_failure_threshold=0.5; it last said: overload no answer"
    )


def test_a_share_that_equals_the_threshold_is_not_above_it(run_config: RunConfig) -> None:
    found = failures(run_config)
    for number in range(2):
        found.note(number, said("scored", "scored", "error", "error"), is_scorable=True)
    assert found.verdict() is None


def test_a_function_that_does_not_apply_has_not_failed_unless_nothing_applies_in_the_whole_window(
    run_config: RunConfig,
) -> None:
    found = failures(run_config)
    found.note(0, said("not_applicable", "not_applicable"), is_scorable=False)
    found.note(1, said("scored", "scored"), is_scorable=True)
    assert found.verdict() is None
    for number in (2, 3):
        found.note(number, said("not_applicable", "not_applicable"), is_scorable=False)
    verdict = found.verdict()
    assert verdict is not None
    assert (verdict.reward_func, verdict.failed_ratio, verdict.last_failure) == ("", 0.0, "")
    assert verdict.reason == (
        "no group of the last 2 groups had 2 scored completions: no reward function applies to them"
    )


def test_functions_that_fail_rarely_each_but_leave_no_group_scorable_stop_the_run_too(run_config: RunConfig) -> None:
    """Each function fails for a different completion of 4, and three scored completions are needed."""
    found = failures(run_config, min_scored_completions=3)
    a, b = (
        said("error", "scored", "scored", "scored", name="a"),
        said("scored", "timeout", "scored", "scored", name="b"),
    )
    for number in range(2):
        found.note(number, [(*x, *y) for x, y in zip(a, b, strict=True)], is_scorable=False)
    verdict = found.verdict()
    assert verdict is not None
    assert verdict.reason == (
        "no group of the last 2 groups had 3 scored completions: reward function a failed most often, for 25% "
        "of the completions; it last said: error"
    )


def test_of_several_functions_the_one_that_fails_most_is_named(run_config: RunConfig) -> None:
    found = failures(run_config, reward_failure_window=1)
    fine, bad = said("scored", "error", name="fine"), said("error", "error", name="bad", detail="it is away")
    found.note(0, [(*x, *y) for x, y in zip(fine, bad, strict=True)], is_scorable=False)
    verdict = found.verdict()
    assert verdict is not None
    assert (verdict.reward_func, verdict.failed_ratio, verdict.last_failure) == ("bad", 1.0, "error it is away")
    assert "of the completions of the last group, more than" in verdict.reason


def test_lost_rollouts_are_no_failures_of_the_functions_that_were_never_called(run_config: RunConfig) -> None:
    found = failures(run_config)
    a_group = said("lost", "lost", "lost", "scored", detail="Game: reset ended with an exception")
    for number in range(2):
        found.note(number, a_group, is_scorable=False)
    verdict = found.verdict()
    assert verdict is not None
    assert (verdict.reward_func, verdict.failed_ratio) == ("", 0.75)
    assert verdict.last_failure == "Game: reset ended with an exception"
    assert verdict.reason == (
        "75% of the rollouts of the last 2 groups were lost, more than reward_failure_threshold=0.5; it last said: "
        "Game: reset ended with an exception"
    )
    assert first_failure(a_group) == "a rollout was lost: Game: reset ended with an exception"


def test_only_the_newest_groups_count(run_config: RunConfig) -> None:
    found = failures(run_config)
    for number in range(2):
        found.note(number, said("error", "error"), is_scorable=False)
    assert found.verdict() is not None
    found.note(2, said("scored", "scored"), is_scorable=True)
    assert found.verdict() is None, "one of two failed"


def test_groups_that_a_trainer_before_has_judged_are_left_out(run_config: RunConfig) -> None:
    found = failures(run_config)
    found.leave_out([0, 1])
    for number in range(3):
        found.note(number, said("error", "error"), is_scorable=False)
    assert found.verdict() is None
    found.note(3, said("error", "error"), is_scorable=False)
    assert found.verdict() is not None


@pytest.mark.parametrize(
    ("outcomes", "is_scorable", "has_recovered"),
    [
        (("scored", "scored", "scored", "error"), True, True),
        (("scored", "scored", "error", "error"), True, True),
        (("scored", "scored", "error", "error", "error"), True, False),
        (("error", "error", "error", "error"), False, False),
        (("not_applicable", "not_applicable", "not_applicable", "scored"), False, False),
    ],
)
def test_a_test_group_is_judged_by_what_pauses_a_run_and_no_other_group_is_a_test_group(
    outcomes: tuple[Outcome, ...], is_scorable: bool, has_recovered: bool, run_config: RunConfig
) -> None:
    found = failures(run_config)
    for number in range(2):
        found.note(number, said("error", "error"), is_scorable=False)
    found.expect_test_group(7)
    found.note(6, said("scored", "scored"), is_scorable=True)
    assert not found.has_recovered
    found.note(7, said(*outcomes), is_scorable=is_scorable)
    assert found.has_recovered == has_recovered


def test_a_run_that_goes_on_begins_with_an_empty_window(run_config: RunConfig) -> None:
    found = failures(run_config, reward_failure_window=1)
    found.expect_test_group(0)
    found.note(0, said("error", "error", detail="no"), is_scorable=False)
    assert found.last_failure() == "error no"
    found.begin_anew()
    assert found.verdict() is None
    assert found.last_failure() == ""
    found.expect_test_group(1)
    found.note(1, said("scored", "scored"), is_scorable=True)
    found.begin_anew()
    assert not found.has_recovered


def test_the_message_of_a_failure_is_shortened_and_the_first_failure_of_a_group_is_found() -> None:
    assert first_failure(said("scored", "error", detail="x" * 1000)) == f"judge: error {'x' * 300}"
    assert first_failure(said("scored", "not_applicable")) == ""


def test_groups_that_all_became_dead_letters_pause_the_run_with_the_reason(run_config: RunConfig) -> None:
    found = failures(run_config)
    found.note_buried(0, "the prompt is too long")
    assert found.verdict() is None, "the window is not full"
    found.note_buried(1, "the prompt is too long")
    verdict = found.verdict()
    assert verdict is not None
    assert verdict.reason == (
        "no group of the last 2 groups had 2 scored completions: they became dead letters, the last because the "
        "prompt is too long"
    )
    assert (verdict.reward_func, verdict.last_failure) == ("", "the prompt is too long")
    found.note(2, said("scored", "scored"), is_scorable=True)
    assert found.verdict() is None
    found.begin_anew()
    assert found.last_failure() == ""


def test_a_dead_letter_that_an_earlier_trainer_has_counted_is_not_counted_again(run_config: RunConfig) -> None:
    found = failures(run_config, reward_failure_window=1)
    found.leave_out([0])
    found.note_buried(0, "the prompt is too long")
    assert found.verdict() is None
