"""One rollout in an environment of its own: real processes, scripted turns, and recordings that go on elsewhere."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.sessions.environment_choice import EnvironmentChoice
from services.sessions.recording.recorded import RolloutEnd
from services.sessions.tools.python_environments import PythonEnvironments
from shared.messages import PlayedEnvironment
from shared.turns import ChatMessage, SampledTurn, TurnRefusedError, TurnRequest
from tests.sessions.environment_play import PROMPT, Play, group, said
from tests.sessions.scripted import answer, assistant, call, turns_of, user
from tests.sessions.tools.conftest import LIMITS, tool_places

TRL = '''
import random


class IncrementEnv:
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class IncrementTo:
    def reset(self, target, **kwargs) -> None:  # the row's `target` column arrives as a keyword argument
        self.counter = 0
        self.target = target

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:  # exposed as a tool (see the full docstring above)
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class MyClient:
    def __init__(self, base_url):
        self.base_url = base_url


ENV_URL = "https://my-env.hf.space"


class MyEnv:
    def __init__(self):
        self.client = MyClient(base_url=ENV_URL)  # captured from enclosing scope
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return "Initial observation for the model"

    def my_tool(self, arg1: str, arg2: int) -> str:
        """
        Description of what this tool does.

        Args:
            arg1: Description of arg1
            arg2: Description of arg2

        Returns:
            The result message.
        """
        self.reward = 1.0
        return "Tool result"
'''
"""The environments of TRL's documentation of agent training, as they are there. ``IncrementTo`` is its second
``IncrementEnv``, with the docstring to which it refers."""

OURS = '''
import itertools, os, random
from pathlib import Path

NUMBER = itertools.count()

class Game:
    """Has the sum of its numbers as its state, and writes down its calls."""

    def reset(self, prompt, start, **_):
        self.total, self.prompt = start, prompt
        self._log("reset")
        return f" Start at {start}."

    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: The number.
        """
        if number < 0:
            raise ValueError("only upwards")
        self.total += number
        self._log(f"add {number}")
        return f"{self.total}"

    def get_reward(self):
        return self.total / 10

    def _log(self, text):
        with (Path(__file__).parent / "log").open("a") as file:
            file.write(text + "\\n")

class Unsure(Game):
    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: The number.
        """
        return f"{os.getpid()}"

class BeginsAnyhow(Game):
    def reset(self, **_):
        self.total = 0
        return f"{os.getpid()}"

class Strict:
    def reset(self, prompt, start):
        pass

class FailsAtTheEnd(Game):
    def get_reward(self):
        raise RuntimeError("no board")
'''

FIRST = assistant("", call("add", '{"number": 2}'))
SECOND = assistant("", call("add", '{"number": -1}'), call("twice", '{"x": 4}', "call-1"), call("add", '{"number": 3}'))
POLICY = turns_of(FIRST, SECOND, assistant("done"))


async def environments_in(directory: Path, name: str) -> PythonEnvironments:
    return await PythonEnvironments.load(
        name,
        tool_places(directory),
        LIMITS,
        timeout_s=120.0,
        import_timeout_s=240.0,
        at_once=asyncio.Semaphore(2),
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "of_trl.py").write_text(TRL)
    return tmp_path


async def test_tools_and_methods_are_called_and_the_environment_rewards_the_rollout(directory: Path) -> None:
    playing = Play(await environments_in(directory, "ours:Game"), POLICY)
    rollout = await playing()
    assert said(rollout) == ["", "3", "", "{'error': 'only upwards'}", "8", "6", "done"]
    assert (rollout.num_calls, rollout.num_failed, rollout.lost) == (4, 1, "")
    attributes = {"total": 6, "prompt": PROMPT}
    assert rollout.environment == PlayedEnvironment("ours:Game", True, " Start at 1.", 0.6, attributes)
    first = playing.generators.requests[0]
    assert first.messages == [{"role": "system", "content": "Play."}, user("Begin. Start at 1.")]
    assert [tool["function"]["name"] for tool in first.tools] == ["twice", "add"]
    assert (directory / "log").read_text().split("\n")[:-1] == ["reset", "add 2", "add 3"]


async def test_the_text_of_reset_is_appended_to_a_prompt_of_text_too(directory: Path) -> None:
    playing = Play(await environments_in(directory, "ours:Game"), turns_of(assistant("done")))
    await playing(group("Begin."))
    assert playing.generators.requests[0].messages == [user("Begin. Start at 1.")]


@pytest.mark.parametrize("num_kept", range(7))
async def test_a_rollout_goes_on_in_another_environment_with_the_state_of_the_lost_one(
    directory: Path, num_kept: int
) -> None:
    environments = await environments_in(directory, "ours:Game")
    first = Play(environments, POLICY)
    whole = await first()
    assert len(first.entries) == 6
    assert isinstance(first.entries[-1], RolloutEnd)
    (directory / "log").unlink()

    def unlike_before(request: TurnRequest) -> SampledTurn:
        return answer(request, POLICY(request), token_ids=[21, 22])

    second = Play(environments, unlike_before, first.entries[:num_kept])
    assert await second() == whole
    assert second.entries[num_kept:] != first.entries[num_kept:] or num_kept >= 5
    assert len(second.generators.requests) == 3 - min((num_kept + 1) // 2, 3)
    assert len(second.tools.calls) == (0 if num_kept >= 4 else 1)
    # A rollout that had ended needs no environment.
    log = (directory / "log").read_text().split() if num_kept < 6 else []
    assert log == (["reset", "add", "2", "add", "3"] if num_kept < 6 else [])


@pytest.mark.parametrize(
    ("name", "num_kept", "says"),
    [
        ("Unsure", 3, "could not be rebuilt: add, called again with the recorded arguments, had another result"),
        ("BeginsAnyhow", 1, "could not be rebuilt: reset, called again with the same row, returned another text"),
    ],
)
async def test_a_rollout_is_lost_if_another_environment_does_not_say_what_was_recorded(
    directory: Path, name: str, num_kept: int, says: str
) -> None:
    environments = await environments_in(directory, f"ours:{name}")
    policy = turns_of(FIRST, assistant("done"))
    first = Play(environments, policy)
    await first()
    second = Play(environments, policy, first.entries[:num_kept])
    rollout = await second()
    assert rollout.lost.endswith(says)
    assert rollout.environment is not None
    assert rollout.environment.reward is None
    assert not second.generators.requests
    ended = Play(environments, policy, first.entries)
    assert (await ended()).lost == ""


async def test_a_reward_that_fails_loses_the_rollout(directory: Path) -> None:
    rollout = await Play(await environments_in(directory, "ours:FailsAtTheEnd"), POLICY)()
    assert rollout.lost == "ours:FailsAtTheEnd: get_reward ended with an exception: no board"
    assert said(rollout)[-1] == "done"
    assert rollout.environment == PlayedEnvironment("ours:FailsAtTheEnd", True, " Start at 1.")


async def test_a_first_turn_that_is_refused_loses_the_rollout_if_reset_has_added_to_the_prompt(directory: Path) -> None:
    def refuse(_: TurnRequest) -> ChatMessage:
        raise TurnRefusedError("too long", kind="context_length")

    rollout = await Play(await environments_in(directory, "ours:Game"), refuse)()
    assert rollout.lost == "its first turn, with the text that reset returned, was refused: too long"
    with pytest.raises(TurnRefusedError):
        await Play(await environments_in(directory, "of_trl:IncrementTo"), refuse)(group(target=1))


@pytest.mark.parametrize(
    ("name", "observation", "calls", "results", "reward", "attributes"),
    [
        ("IncrementEnv", True, [("increment", '{"step": 1}')] * 2, ["1", "2"], None, {"counter": 2}),
        ("IncrementTo", False, [("increment", '{"step": 4}')], ["4"], 1.0, {"counter": 4, "target": 4}),
        ("MyEnv", True, [("my_tool", '{"arg1": "a", "arg2": 1}')], ["Tool result"], None, {"reward": 1.0}),
    ],
)
async def test_the_environments_of_trl_s_documentation_work_as_they_are(
    directory: Path,
    name: str,
    observation: bool,
    calls: list[tuple[str, str]],
    results: list[str],
    reward: float | None,
    attributes: dict[str, Any],
) -> None:
    policy = turns_of(*(assistant("", call(*each)) for each in calls), assistant("done"))
    rollout = await Play(await environments_in(directory, f"of_trl:{name}"), policy)(group(target=4))
    assert rollout.lost == ""
    assert [message["content"] for message in rollout.completion if message["role"] == "tool"] == results
    played = rollout.environment
    assert played is not None
    assert (bool(played.observation), played.name) == (observation, f"of_trl:{name}")
    if name == "IncrementEnv":  # it draws its own target
        assert played.observation == f"Increment the counter by {played.attributes['target']}."
        assert played.reward == float(played.attributes["target"] == 2)
    else:
        assert played.reward == reward
    assert played.attributes | attributes == played.attributes


async def test_each_rollout_has_the_environment_and_the_tools_that_its_row_names(directory: Path) -> None:
    several = EnvironmentChoice(
        {
            "game": await environments_in(directory, "ours:Game"),
            "counter": await environments_in(directory, "of_trl:IncrementTo"),
        }
    )
    assert [schema["function"]["name"] for schema in several.schemas] == ["add", "increment"]
    for name, tool, arguments, reward in (
        ("game", "add", '{"number": 2}', 0.3),
        ("counter", "increment", '{"step": 4}', 1.0),
    ):
        playing = Play(several.all[0], turns_of(assistant("", call(tool, arguments)), assistant("done")))
        rollout = await several.play(
            playing.session, group(target=4, environment=name), tools=playing.tools, limits=playing.limits
        )
        assert (rollout.lost, rollout.num_failed) == ("", 0)
        assert rollout.environment is not None
        assert rollout.environment.reward == pytest.approx(reward)
        assert [schema["function"]["name"] for schema in playing.generators.requests[0].tools] == ["twice", tool]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"environment": "chess"}, "has environment 'chess', which is not among the environments of the run: game"),
        ({}, "names no environment in the column 'environment'; environment_factory has game"),
    ],
)
async def test_a_row_that_names_no_known_environment_loses_its_rollout(
    directory: Path, columns: dict[str, Any], says: str
) -> None:
    several = EnvironmentChoice({"game": await environments_in(directory, "ours:Game")})
    playing = Play(several.all[0], POLICY)
    rollout = await several.play(playing.session, group(**columns), tools=playing.tools, limits=playing.limits)
    assert rollout.lost == says
    assert rollout.environment == PlayedEnvironment("environment", True)
    assert not playing.generators.requests
    assert not (directory / "log").exists()


async def test_reset_gets_no_column_environment_where_it_made_the_choice(directory: Path) -> None:
    several = EnvironmentChoice({"strict": await environments_in(directory, "ours:Strict")})
    playing = Play(several.all[0], turns_of(assistant("done")))
    prompt = group(environment="strict")
    rollout = await several.play(playing.session, prompt, tools=playing.tools, limits=playing.limits)
    assert rollout.lost == ""
