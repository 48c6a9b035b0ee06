"""The engine's samples become rollouts, or are refused."""

import math

import pytest

from services.generator.rollouts import SampledCompletion, completed_group
from shared.arrays import unpack_ids, unpack_mask
from shared.errors import MessageError
from shared.messages import CompletedGroup, Turn, VersionSpan, decode_completed_group, encode
from tests.groups import prompt_group

pytestmark = pytest.mark.unit

Spans = list[tuple[str, int, int]]


def a_completion(
    token_ids: tuple[int, ...] = (8, 9, 2),
    logprobs: tuple[float, ...] = (-0.5, -1.5, -0.25),
    spans: Spans | None = None,
) -> SampledCompletion:
    return SampledCompletion("xy", token_ids, logprobs, spans or [("3", 0, len(token_ids))], "stop")


def make(*completions: SampledCompletion) -> CompletedGroup:
    return completed_group(
        prompt_group(num_generations=len(completions)), completions, claimed_at_s=10.0, generated_at_s=12.0, by="g-0"
    )


def test_a_row_is_prompt_and_completion_with_the_mask_only_on_sampled_tokens() -> None:
    group = make(a_completion(), a_completion((9,), (-2.0,)))
    first, second = group.rollouts
    (row,) = first.rows
    assert unpack_ids(row.token_ids).tolist() == [5, 6, 7, 8, 9, 2]
    assert unpack_mask(row.loss_mask).tolist() == [0, 0, 0, 1, 1, 1]
    assert row.generator_logprobs().tolist() == [-0.5, -1.5, -0.25]
    assert row.turns == (Turn("assistant", 3, 6, "stop", 10.0, 12.0),)
    assert first.completion == "xy"
    assert (first.rollout_id, second.rollout_id) == ("00000000-0", "00000000-1")
    assert unpack_ids(second.rows[0].token_ids).tolist() == [5, 6, 7, 9]
    assert [(stamp.event, stamp.at_s, stamp.by) for stamp in group.stamps] == [
        ("claimed", 10.0, "g-0"),
        ("generated", 12.0, "g-0"),
    ]


def test_a_change_of_weights_mid_completion_is_two_spans() -> None:
    group = make(a_completion(spans=[("3", 0, 1), ("4", 1, 3)]))
    assert group.rollouts[0].rows[0].version_spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))


def test_rollouts_pass_the_check_of_their_readers() -> None:
    group = make(a_completion(), a_completion())
    assert decode_completed_group(encode(group)) == group


def test_weights_that_were_never_pushed_are_refused() -> None:
    with pytest.raises(MessageError, match="without a version"):
        make(a_completion(spans=[("default", 0, 3)]))


@pytest.mark.parametrize(
    "spans", [[("3", 0, 2)], [("3", 1, 3)], [("3", 0, 1), ("4", 2, 3)], [("3", 0, 0), ("4", 0, 3)]]
)
def test_spans_that_do_not_tile_the_completion_are_refused(spans: Spans) -> None:
    with pytest.raises(MessageError, match="version"):
        make(a_completion(spans=spans))


@pytest.mark.parametrize("logprobs", [(math.nan,) * 3, (-0.5, -math.inf, -1.0)])
def test_diverged_weights_are_reported_as_diverged(logprobs: tuple[float, ...]) -> None:
    with pytest.raises(MessageError, match="diverged"):
        make(a_completion(logprobs=logprobs))


def test_a_token_with_an_unknown_logprob_is_published_with_the_others() -> None:
    (first, *_) = make(a_completion(logprobs=(-0.5, math.nan, -1.0))).rollouts
    assert first.rows[0].generator_logprobs().tolist() == pytest.approx([-0.5, math.nan, -1.0], nan_ok=True)


def test_a_completion_without_a_token_or_with_too_few_logprobs_is_refused() -> None:
    with pytest.raises(MessageError, match="no sampled token"):
        make(a_completion((), ()))
    with pytest.raises(MessageError, match="2 logprobs for 3 tokens"):
        make(a_completion(logprobs=(-0.5, -0.5)))


def test_a_group_that_is_not_whole_is_refused() -> None:
    with pytest.raises(MessageError, match="1 completions instead of 2"):
        completed_group(
            prompt_group(num_generations=2), [a_completion()], claimed_at_s=1.0, generated_at_s=2.0, by="g-0"
        )
