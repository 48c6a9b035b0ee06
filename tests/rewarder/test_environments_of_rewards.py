"""Reward functions with ``environments``, as in TRL: stand-ins with the attributes at the rollouts' end."""

import json

import msgspec
import pytest

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.wire_formats.headrace_format import HeadraceFormat
from services.rewarder.endpoints.wire_formats.trl_format import TrlFormat
from services.rewarder.endpoints.wire_formats.wire_format import RequestContext
from services.rewarder.reward_call import RewardCall
from services.rewarder.scoring import Scorer
from shared.messages import PlayedEnvironment
from tests.rewarder.conftest import call_with
from tests.rewarder.scoring_rig import outcomes_of

GAMES = [
    PlayedEnvironment(
        "my_envs:Game", False, reward=None, left_out={"client": "TypeError: JSON does not have the type Client"},
        attributes={"reward": 1.0, "active": "wordle", "board": [1, 2]},
    ),
    PlayedEnvironment("my_envs:Game", False, attributes={"reward": 0.25, "active": "catch", "board": []}),
]  # fmt: skip


def played() -> RewardCall:
    return msgspec.structs.replace(call_with("a", "b"), environments=GAMES)


async def values_of(scorer: Scorer, *names: str) -> list[list[float | None]]:
    rows = await outcomes_of(scorer, *(f"environment_rewards:{name}" for name in names), call=played())
    return [[outcome.value for outcome in row] for row in rows]


async def test_the_function_of_trl_s_documentation_reads_the_attributes(scorer: Scorer) -> None:
    names = ["of_trl", "of_trl_later", "only_wordle", "takes_none_if_missing", "wants_no_environment"]
    assert await values_of(scorer, *names) == [[1.0, 1.0, 1.0, None, 0.0], [0.25, 0.25, None, None, 0.0]]


async def test_a_function_that_changes_an_environment_changes_only_its_own(scorer: Scorer) -> None:
    assert await values_of(scorer, "spoils", "spoils", "of_trl_later") == [[3.0, 3.0, 1.0], [1.0, 1.0, 0.25]]
    assert GAMES[0].attributes["board"] == [1, 2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "asks_for_a_client",
            "AttributeError: the environment my_envs:Game has no attribute 'client' here: TypeError: JSON does not "
            "have the type Client",
        ),
        (
            "calls_a_method",
            "AttributeError: the environment my_envs:Game has no attribute 'get_reward' here: reward functions get the "
            "public attributes at the rollout's end, and no methods; these are: reward, active, board",
        ),
    ],
)
async def test_an_attribute_that_is_not_there_says_why(scorer: Scorer, name: str, says: str) -> None:
    for (outcome,) in await outcomes_of(scorer, f"environment_rewards:{name}", call=played()):
        assert (outcome.outcome, outcome.detail) == ("error", says)


async def test_without_environments_a_function_that_needs_them_is_an_error(scorer: Scorer) -> None:
    ((outcome,),) = await outcomes_of(scorer, "environment_rewards:only_wordle", call=call_with("a"))
    assert outcome.outcome == "error"
    assert outcome.detail == "needs 'environments', which only a run with environment_factory has"
    checked = (await scorer.check(["environment_rewards:only_wordle"]))["environment_rewards:only_wordle"]
    assert getattr(checked, "required_columns") == []  # noqa: B009  it is not refused


async def test_without_a_function_each_completion_has_no_outcome(scorer: Scorer) -> None:
    assert await outcomes_of(scorer, call=played()) == [(), ()]


def test_endpoints_get_the_attributes_as_objects() -> None:
    spec = EndpointSpec(url="http://judge.example/score")
    context = RequestContext(request_id="r", run_id="run-test", deadline_at_s=1.0)
    attributes = [game.attributes for game in GAMES]
    body = json.loads(TrlFormat().encode(played(), spec=spec, context=context).body)
    assert body["environments"] == attributes
    body = json.loads(HeadraceFormat().encode(played(), spec=spec, context=context).body)
    assert [item["environment"] for item in body["items"]] == attributes
    plain = json.loads(TrlFormat().encode(call_with("a"), spec=spec, context=context).body)
    assert "environments" not in plain
