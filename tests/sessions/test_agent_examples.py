"""The shipped examples of agents: their run files, their rows, and rollouts with their tools in real processes."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.sessions.environment_rollout import play_in_environment
from services.sessions.session import Session
from services.sessions.tool_rollout import Limits, ToolRollout, play
from services.sessions.tools.joined_tools import JoinedTools
from services.sessions.tools.python_environments import PythonEnvironments
from services.sessions.tools.tool_tasks import ToolPool, ToolTasks
from services.sessions.tools.user_tools import UserTools
from services.trainer.data.dataset import open_dataset
from shared.run_options.run_config import RunConfig, parse_run_config
from shared.turns import ChatMessage, TurnRequest
from shared.user_code.places import Places
from tests.groups import prompt_group
from tests.rewarder.conftest import pool_and_scorer
from tests.rewarder.scoring_rig import outcomes_of
from tests.sessions.scripted import InProcessTools, ScriptedGenerators, assistant, call, turns_of, user
from tests.sessions.tools.conftest import LIMITS, CountedWorkers, tool_places

EXAMPLES = Path(__file__).parents[2] / "examples"
NO_LIMIT = Limits(max_iterations=None, max_completion_length=1000)


def example(name: str) -> RunConfig:
    settings = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    files = {name: str(EXAMPLES / file) for name, file in settings.items() if str(file).endswith(".jsonl")}
    return parse_run_config(settings | files)


def session(generators: ScriptedGenerators) -> Session:
    async def record(number: int, entry: object) -> None:
        assert entry is not None

    return Session("00000000-0", run_id="run-test", generators=generators, record=record)


def bisect(request: TurnRequest) -> ChatMessage:
    """Guess as a perfect player, from what the game has said."""
    low, high, number = 1, 100, 50
    for message in request.messages:
        if message["role"] == "tool":
            low, high = (number + 1, high) if message["content"] == "Too low." else (low, number - 1)
            if message["content"] == "Right.":
                return assistant(f"It is {number}.")
            number = (low + high) // 2
    return assistant("", call("guess", f'{{"number": {number}}}'))


async def game(config: RunConfig, policy: Any, columns: dict[str, Any]) -> ToolRollout:
    environments = await PythonEnvironments.load(
        str(config.environment_factory),
        tool_places(EXAMPLES),
        LIMITS,
        timeout_s=120.0,
        import_timeout_s=240.0,
        at_once=asyncio.Semaphore(1),
    )
    group = msgspec.structs.replace(prompt_group(), prompt=[user("Find it.")], prompt_ids=b"", columns=columns)
    return await play_in_environment(
        session(ScriptedGenerators(policy)), group, environments=environments, tools=InProcessTools(), limits=NO_LIMIT
    )


async def test_the_game_is_won_by_a_perfect_player_and_its_rewards_tell_players_apart() -> None:
    config = example("guessing-game-qwen3-0.6b.yaml")
    row = open_dataset(config).row_at(0)
    assert isinstance(row.prompt, list)
    assert [message["role"] for message in row.prompt] == ["system", "user"]
    columns = row.columns | {"secret": 62}
    won = await game(config, bisect, columns)
    gave_up = await game(config, turns_of(assistant("", call("guess", '{"number": 12}')), assistant("12")), columns)
    played = [rollout.environment for rollout in (won, gave_up)]
    assert [each.attributes["guesses"] for each in played if each is not None] == [[50, 75, 62], [12]]
    assert [each.reward for each in played if each is not None] == [pytest.approx(0.8), 0.0]
    assert won.completion[-1]["content"] == "It is 62."
    environments = [each for each in played if each is not None]
    call_of_both = RewardCall(
        [[user("Find it.")]] * 2, [won.completion, gave_up.completion], {}, environments=environments
    )
    async with pool_and_scorer(RewarderMetrics(), RewardTasks(Places((str(EXAMPLES),)))) as (_, scorer):
        ((near,), (far,)) = await outcomes_of(scorer, *config.reward_funcs, call=call_of_both)
    assert (near.value, far.value) == (1.0, 0.5)


async def test_a_guess_of_another_type_or_range_is_answered_and_does_not_count() -> None:
    config = example("guessing-game-qwen3-0.6b.yaml")
    guesses = (call("guess", f'{{"number": {number}}}') for number in ('"50"', "null", "0", "9" * 400))
    policy = turns_of(*(assistant("", guess) for guess in guesses), assistant("50"))
    rollout = await game(config, policy, open_dataset(config).row_at(0).columns)
    said = [message["content"] for message in rollout.completion if message["role"] == "tool"]
    assert said == ["{'error': 'A guess is a whole number from 1 to 100.'}"] * 4
    played = rollout.environment
    assert played is not None
    assert (played.attributes["guesses"], played.reward) == ([], 0.0)
    of_rollout = RewardCall([[user("Find it.")]], [rollout.completion], {}, environments=[played])
    async with pool_and_scorer(RewarderMetrics(), RewardTasks(Places((str(EXAMPLES),)))) as (_, scorer):
        ((near,),) = await outcomes_of(scorer, *config.reward_funcs, call=of_rollout)
    assert near.value == 0.0


async def test_the_calculator_answers_the_model(tmp_path: Path) -> None:
    config = example("gsm8k-calculator-qwen3-0.6b.yaml")
    policy = turns_of(
        assistant("", call("calculate", '{"expression": "(3 + 4) * 2.5"}')),
        assistant("", call("calculate", '{"expression": "open(\'x\')"}')),
        assistant("It is \\boxed{17.5}."),
    )
    async with ToolPool(
        ToolTasks(tool_places(EXAMPLES)),
        num_workers=1,
        limits=LIMITS,
        queue_timeout_s=120.0,
        import_timeout_s=120.0,
        metrics=CountedWorkers(),
    ) as pool:
        tools = await UserTools.load(config.tools, pool, lane="run-test", tool_timeout_s=120.0, check_timeout_s=240.0)
        rollout = await play(
            session(ScriptedGenerators(policy)), [user("?")], tools=JoinedTools({"tools": tools}), limits=NO_LIMIT
        )
    assert [message["content"] for message in rollout.completion] == [
        "",
        "17.5",
        "",
        "{'error': 'only numbers with +, -, *, / and parentheses can be calculated'}",
        "It is \\boxed{17.5}.",
    ]
