"""Options of agents: tools are distinct, and there is a parser for their calls."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

RUN: dict[str, Any] = {"model": "m", "dataset_name": "org/data", "reward_funcs": ["accuracy_reward"]}


def test_a_run_has_no_tools_unless_it_names_some() -> None:
    assert parse_run_config(RUN).tools == []
    config = parse_run_config(RUN | {"tools": ["my.tools:add", "my.tools:mul"], "max_tool_calling_iterations": 4})
    assert (config.tools, config.max_tool_calling_iterations) == (["my.tools:add", "my.tools:mul"], 4)
    assert config.tool_timeout_s == 30


def test_an_environment_makes_an_agent_and_may_be_the_only_reward() -> None:
    assert not parse_run_config(RUN).is_agentic
    config = parse_run_config(RUN | {"environment_factory": "my_envs:Game", "tools": ["my.tools:add"]})
    assert (config.environment_factory, config.tools) == ("my_envs:Game", ["my.tools:add"])
    alone = parse_run_config({**RUN, "environment_factory": "my_envs:Game", "reward_funcs": []})
    assert alone.is_agentic
    assert alone.weights() == ()


def test_several_environments_have_names() -> None:
    several = {"game": "my_envs:Game", "envs": "http://envs:8000"}
    config = parse_run_config({**RUN, "environment_factory": several, "reward_funcs": []})
    assert config.is_agentic
    assert config.environment_factories() == several
    assert config.environment_names() == ("game", "envs")
    one = parse_run_config(RUN | {"environment_factory": "my_envs:Game"})
    assert (one.environment_factories(), one.environment_names()) == ({None: "my_envs:Game"}, ())
    assert parse_run_config(RUN).environment_factories() == {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tools": ["my:add", "my:mul", "my:add"]}, "tools: my:add is listed twice"),
        ({"tools": [f"my:f{n}" for n in range(129)]}, "tools: .*at most 128"),
        ({"tools": "my:add"}, "tools: .*list"),
        ({"max_tool_calling_iterations": 0}, "max_tool_calling_iterations: "),
        ({"tool_timeout_s": 0}, "tool_timeout_s: "),
        ({"tool_call_parser": ""}, "tool_call_parser: "),
        ({"environment_factory": ""}, "environment_factory: "),
        ({"environment_factory": {}}, "environment_factory: must be"),
        ({"environment_factory": {"game": 3}}, "environment_factory: must be text"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_run_config(RUN | options)


def test_an_agent_program_plays_the_rollouts_and_needs_neither_tools_nor_reward_functions() -> None:
    config = parse_run_config(
        {key: value for key, value in RUN.items() if key != "reward_funcs"} | {"agent": "my.agent:run"}
    )
    assert config.is_agentic
    assert (config.agent, config.agent_timeout_s, config.reward_funcs) == ("my.agent:run", 300, [])


@pytest.mark.parametrize("other", [{"tools": ["my.tools:add"]}, {"environment_factory": "my.game:Game"}])
def test_an_agent_program_brings_its_own_tools(other: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"agent and {next(iter(other))} are set"):
        parse_run_config(RUN | {"agent": "my.agent:run"} | other)
