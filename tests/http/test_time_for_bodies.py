"""A body's content is checked in bounded time: lengths first, and overlong names are not searched for at all.

The tests measure processor time, which other processes do not affect. Each of these bodies took seconds before.
"""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.generator.policy_api.generate_route import GenerateRequest
from services.rewarder.built_ins.built_in_rewards import unknown_name
from services.rewarder.score_api.bodies import CheckRequest, ScoreRequest
from shared.errors import UserError
from shared.near_name import nearest
from shared.run_options.run_config import parse_run_config
from shared.serving.json_body import BodyError, decode_json
from tests.own_time import bounded_time

pytestmark = pytest.mark.unit

_GENEROUS_S = 0.5
_RUN: dict[str, Any] = {"model": "m", "dataset_name": "d", "reward_funcs": ["accuracy_reward"]}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"vllm": {f"k{n}": 1 for n in range(50_000)}},
            "vllm: it names 50000 engine arguments, but a run may set at most 150",
        ),
        ({"reward_funcs": [f"f{n}" for n in range(50_000)]}, "reward_funcs: must be a list of at most 64 items"),
        ({"reward_funcs": ["f" * 1_000_000]}, "must be text of at most 1024 characters"),
        ({"f" * 1_000_000: 1}, "there is no such setting"),
        ({"columns": [1] * 300_000}, "columns: must be a list of at most 1000 items"),
        ({"datasets": [{"path": f"a/{n}"} for n in range(50_000)]}, "datasets: must be a list of at most 64 items"),
        ({"report_to": ["x"] * 300_000}, "report_to: must be a list of at most 16 items"),
        ({"reward_weights": ["x"] * 300_000}, "reward_weights: must be a list of at most 64 items"),
        ({"generation_kwargs": {f"temperatur{n}": 1 for n in range(9_000)}}, "there is no such setting"),
        ({"reward_kwargs": {"accuracy_reward": {"a": [0] * 400_000}}}, "longer than 262144 characters"),
    ],
)
def test_a_run_is_refused_in_bounded_time_and_few_words(settings: dict[str, Any], says: str) -> None:
    with bounded_time(_GENEROUS_S), pytest.raises(UserError) as refused:
        parse_run_config(_RUN | settings)
    assert says in str(refused.value)
    assert len(refused.value.problems) <= 100


@pytest.mark.parametrize("kind", [CheckRequest, ScoreRequest])
def test_reward_names_are_bounded_wherever_they_are_sent(kind: type[CheckRequest] | type[ScoreRequest]) -> None:
    rows: dict[str, Any] = {} if kind is CheckRequest else {"prompts": ["p"], "completions": ["c"]}
    for names in (["f"] * 65, ["f" * 1025]):
        with pytest.raises(ValueError, match="should have at most"):
            kind.model_validate(rows | {"reward_funcs": names})


def test_no_similar_name_is_searched_for_a_megabyte() -> None:
    with bounded_time(_GENEROUS_S):
        assert nearest("accuracy_rewrad", ["accuracy_reward", "exact_match"]) == "accuracy_reward"
        assert nearest("a" * 1_000_000, ["a" * 60]) is None
        assert "Did you mean" not in str(unknown_name("f" * 1_000_000))


@pytest.mark.parametrize(
    "body", [b"[" + b"[]," * 2_000_000 + b"[]]", b'{"' + b'k":{"' * 200_000 + b'k":1}' + b"}" * 200_000]
)
def test_more_lists_and_tables_than_anybody_means_are_refused_before_they_are_made(body: bytes) -> None:
    with bounded_time(_GENEROUS_S), pytest.raises(BodyError) as refused:
        decode_json(body)
    assert refused.value.status == 422


def test_brackets_inside_text_do_not_count() -> None:
    code = "if (a[0] && b) { return {k: [1]}; } // \\" + '"' * 3
    assert decode_json(json.dumps([code] * 50_000).encode()) == [code] * 50_000


@pytest.mark.parametrize(
    "body",
    [
        {"prompts": [[1] * 1_000_000 + ["x"]]},
        {"prompts": [["x"] * 1_000_000]},
        {"prompts": [1] * 1024},
        {"prompts": ["p"] * 1024, "n": 1024},
        {"prompts": ["p"], "generation_kwargs": {f"k{n}": 1 for n in range(50_000)}},
    ],
)
def test_sampling_options_are_refused_in_bounded_time_and_few_words(body: dict[str, Any]) -> None:
    with bounded_time(_GENEROUS_S), pytest.raises(ValidationError) as refused:
        GenerateRequest.model_validate(body)
    assert refused.value.error_count() <= 10
    assert len(str(refused.value)) < 10_000
