"""Allowed content of a request body, and the short message for a body that is completely wrong."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.rewarder.score_api.bodies import ScoreRequest
from services.rewarder.score_api.endpoint_bodies import TrialRequest

pytestmark = pytest.mark.unit

GOOD: dict[str, Any] = {"reward_funcs": ["accuracy_reward"], "prompts": ["p"], "completions": ["c"]}


NOTHING: dict[str, Any] = {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"completions": [1] * 100_000},
        {"completions": [[NOTHING] * 100_000]},
        {"completions": [[1] * 100_000]},
        {"prompts": [[NOTHING] * 100_000]},
        {"completion_ids": [["a"] * 100_000]},
        {"completion_ids": ["a"] * 100_000},
        {"completion_ids": [["a"]] * 100_000},
        {"reward_weights": ["a"] * 100_000},
        {"reward_funcs": [1] * 100_000},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_the_answer_to_a_body_that_is_wrong_everywhere_lists_only_some_mistakes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        ScoreRequest.model_validate({**GOOD, **wrong})
    assert error.value.error_count() <= 10


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1, 10**30])
def test_a_token_id_that_32_bits_do_not_hold_is_refused(token_id: int) -> None:
    with pytest.raises(ValidationError, match=r"2147483647|-2147483648|parse") as error:
        ScoreRequest.model_validate({**GOOD, "completion_ids": [[1, token_id]] * len(GOOD["prompts"])})
    assert error.value.errors()[0]["loc"] == ("completion_ids", 0, 1)


@pytest.mark.parametrize("weight", [1e6 + 1, -1e7, 1e308])
def test_a_weight_that_a_sum_could_not_hold_is_refused(weight: float) -> None:
    with pytest.raises(ValidationError, match="reward_weights"):
        ScoreRequest.model_validate({**GOOD, "reward_weights": [weight]})
    assert ScoreRequest.model_validate({**GOOD, "reward_weights": [-1e6]}).weights() == [-1e6]


def test_one_prompt_is_one_prompt() -> None:
    with pytest.raises(ValidationError, match="there is 1 prompt, but completions has 2"):
        ScoreRequest.model_validate({**GOOD, "completions": ["c", "d"]})


def test_a_trial_has_a_thousand_rows_at_most() -> None:
    for rows in ({"prompts": ["p"] * 1025}, {"completions": ["c"] * 1025}):
        with pytest.raises(ValidationError, match="at most 1024 items"):
            TrialRequest.model_validate(rows)
