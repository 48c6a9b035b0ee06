"""Environments of OpenEnv servers, stand-ins and real ones: their tools, sessions, rewards, places and deaths."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection

from services.sessions.tools import openenv_server as openenv_server_module
from services.sessions.tools.openenv_listing import OpenEnvListing
from services.sessions.tools.openenv_server import OpenEnvEnvironment, OpenEnvServer
from services.sessions.tools.openenv_session import OpenEnvSession, RefusedMessageError
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from tests.eventually import eventually
from tests.sessions.tools.openenv_servers import SERVERS, STAND_IN, loaded, openenv_server, scripted_server


@pytest.fixture(scope="module", params=SERVERS)
def program(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


@pytest.fixture(scope="module")
def game_url(program: list[str]) -> Generator[str]:
    with openenv_server(program, "game") as (url, _):
        yield url


@pytest.fixture(scope="module")
def counter_url(program: list[str]) -> Generator[str]:
    with openenv_server(program, "counter") as (url, _):
        yield url


@pytest.fixture
async def game(game_url: str) -> OpenEnvServer:
    return await loaded(game_url)


@pytest.fixture
async def counter(counter_url: str) -> OpenEnvServer:
    return await loaded(counter_url)


async def reset(environment: OpenEnvEnvironment, group_id: str = "0", **row: Any) -> str:
    return await environment.reset(row, rollout_id=f"{group_id}-0", group_id=group_id)


async def secret_of(environment: OpenEnvEnvironment) -> int:
    return int((await environment.state()).attributes["secret"])


async def test_an_environment_without_mcp_tools_has_one_tool_that_takes_its_action(game: OpenEnvServer) -> None:
    (schema,) = game.schemas
    number = {"description": "The guess.", "title": "Number", "type": "integer"}
    parameters = {
        "type": "object", "properties": {"number": number}, "required": ["number"], "additionalProperties": False,
    }  # fmt: skip
    assert schema == {
        "type": "function",
        "function": {"name": "step", "description": "Guess the number.", "parameters": parameters},
    }
    assert (game.name, game.has_reward) == ("Game", True)


async def test_the_mcp_tools_of_an_environment_are_its_tools(counter: OpenEnvServer) -> None:
    (schema,) = counter.schemas
    assert (schema["function"]["name"], schema["function"]["description"]) == ("add", "Add a number.")
    assert schema["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert schema["function"]["parameters"]["required"] == ["number"]
    assert counter.name == "Counter"


async def test_a_session_keeps_its_state_from_its_reset_to_its_reward(game: OpenEnvServer) -> None:
    async with game.started() as one, game.started() as other:
        assert (
            await reset(one, secret=7, level="easy") == '\n\n{"hint": "Guess a number from 0 to 9.", "guesses_left": 3}'
        )
        await reset(other, secret=5)
        assert await one.reward() == 0.0
        assert await one.call("step", {"number": 5}) == '{"hint": "higher", "guesses_left": 2}'
        assert await one.reward() == 0.5
        assert not one.is_over
        assert await one.call("step", {"number": 7}) == '{"hint": "right", "guesses_left": 1}'
        assert one.is_over
        assert (await one.reward(), await other.reward()) == (1.0, 0.0)
        with pytest.raises(ToolError, match="The episode is over"):
            await one.call("step", {"number": 7})
        state = await one.state()
    assert state.attributes == {
        "episode_id": "0-0",
        "step_count": 2,
        "secret": 7,
        "reward": 1.0,
        "rewards": [0.5, 1.0],
        "done": True,
        "observation": {"hint": "right", "guesses_left": 1},
    }


async def test_an_action_that_fails_is_answered_and_the_session_goes_on(game: OpenEnvServer) -> None:
    async with game.started() as environment:
        await reset(environment, secret=7)
        with pytest.raises(ToolError, match="Invalid message; number: Input should be a valid integer"):
            await environment.call("step", {"number": "x"})
        with pytest.raises(ToolError, match="it cannot be sent"):
            await environment.call("step", {"number": "\ud800"})
        with pytest.raises(ToolError, match="13 is unlucky"):
            await environment.call("step", {"number": 13})
        assert await environment.call("step", {"number": 7}) == '{"hint": "right", "guesses_left": 2}'


async def test_mcp_tools_are_called_in_the_session_with_its_rewards(counter: OpenEnvServer) -> None:
    async with counter.started() as environment:
        assert await reset(environment, start=1) == ""
        assert environment.has("add")
        assert not environment.has("step")
        assert await environment.call("add", {"number": 2}) == "3"
        with pytest.raises(ToolError, match="only upwards"):
            await environment.call("add", {"number": -2})
        assert (await environment.reward(), environment.is_over) == (0.3, False)
        results = await asyncio.gather(
            environment.call("add", {"number": 4}), environment.call("add", {"number": 5}),
            environment.call("add", {"number": 6}), return_exceptions=True,
        )  # fmt: skip
        assert list(map(str, results)) == ["7", "12", "The episode is over."], "one after the other"
        assert (await environment.reward(), environment.is_over) == (1.2, True)


async def test_the_rollouts_of_a_group_have_one_task(game: OpenEnvServer) -> None:
    secrets = list[int]()
    for group_id in ("0", "0", "1"):
        async with game.started() as environment:
            await reset(environment, group_id)
            secrets.append(await secret_of(environment))
    assert secrets[0] == secrets[1] != secrets[2]
    async with game.started() as environment:
        await reset(environment, seed=4)
        assert await secret_of(environment) == 4


async def test_a_rollout_waits_for_a_free_session_of_the_server(program: list[str]) -> None:
    with openenv_server(program, "game", max_sessions=1) as (url, _):
        server = await loaded(url)
        async with asyncio.TaskGroup() as rollouts:

            async def play(secret: int) -> None:
                async with server.started() as environment:
                    await reset(environment, secret=secret)
                    await environment.call("step", {"number": 5})
                    assert await secret_of(environment) == secret

            for secret in range(4):
                rollouts.create_task(play(secret), name=f"rollout {secret}")
        impatient = await loaded(url, wait_s=0.0)
        async with server.started():
            with pytest.raises(ToolLostError, match=r"no session could be opened for 0 s: .*at capacity"):
                async with impatient.started():
                    pytest.fail("the server has one session")


async def test_a_rollout_waits_for_the_sessions_of_others_however_long_they_are_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Any = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(openenv_server_module, "time", clock)
    with openenv_server(STAND_IN, "game", max_sessions=1) as (url, _):
        server = await loaded(url, wait_s=60.0)

        async def play() -> str:
            async with server.started() as environment:
                return await reset(environment)

        async with server.started():
            waiting = [asyncio.create_task(play()) for _ in range(2)]
            for _ in range(10):
                await asyncio.sleep(0.1)
                clock.now_s += 100.0
            assert not any(rollout.done() for rollout in waiting)
        assert all(await asyncio.gather(*waiting))


async def test_a_step_that_does_not_end_loses_the_session(program: list[str]) -> None:
    with openenv_server(program, "game") as (url, _):
        server = await loaded(url, timeout_s=5.0)
        async with server.started() as environment:
            await reset(environment)
            with pytest.raises(ToolLostError, match="step was not answered within 5 s"):
                await environment.call("step", {"number": 99})
            with pytest.raises(ToolLostError, match="step: the connection ended"):
                await environment.call("step", {"number": 1})


async def test_a_server_that_dies_takes_its_sessions_along_and_rollouts_wait_for_it(program: list[str]) -> None:
    with openenv_server(program, "game") as (url, process):
        server = await loaded(url, wait_s=0.0)
        async with server.started() as environment:
            await reset(environment)
            process.kill()
            process.wait()
            with pytest.raises(ToolLostError, match="step: the connection ended"):
                await environment.call("step", {"number": 1})
        with pytest.raises(ToolLostError, match="no session could be opened for 0 s: it cannot be reached"):
            async with server.started():
                pytest.fail("the server is dead")


SESSION: list[tuple[dict[str, Any], dict[str, Any] | str]] = [
    ({"type": "state"}, {"episode_id": None, "step_count": 0, "secret": 0}),
    (
        {"type": "reset", "data": {"secret": 7, "seed": 3, "episode_id": "g-0", "prompt": "p", "level": 1}},
        {"observation": {"hint": "Guess a number from 0 to 9.", "guesses_left": 3}, "reward": None, "done": False},
    ),
    (
        {"type": "step", "data": {"number": 5}},
        {"observation": {"hint": "higher", "guesses_left": 2}, "reward": 0.5, "done": False},
    ),
    (
        {"type": "step", "data": {"number": "x"}},
        "Invalid message; number: Input should be a valid integer, unable to parse string as an integer",
    ),
    ({"type": "step", "data": {"number": 13}}, "13 is unlucky"),
    (
        {"type": "step", "data": {"number": 7}},
        {"observation": {"hint": "right", "guesses_left": 1}, "reward": 1.0, "done": True},
    ),
    ({"type": "state"}, {"episode_id": "g-0", "step_count": 2, "secret": 7}),
]
"""Recorded with openenv-core 0.3.0 and openenv 0.10.0, without the metadata that only the latter sends."""


async def test_the_stand_in_says_what_real_servers_say(game_url: str) -> None:
    session = await OpenEnvSession.open(game_url, timeout_s=60.0)
    for message, recorded in SESSION:
        try:
            answer: Any = await session.ask(message)
            answer.get("observation", {}).pop("metadata", None)
        except RefusedMessageError as error:
            answer = str(error)
        assert answer == recorded
    with pytest.raises(ToolLostError, match="UNKNOWN_TYPE: Unknown message type: nothing"):
        await session.ask({"type": "nothing"})
    await session.close()


@asynccontextmanager
async def environment_that_says(*, has_mcp_tools: bool = True, **answer: Any) -> AsyncGenerator[OpenEnvEnvironment]:
    """Begin a rollout in an environment with a tool ``look``, by default of MCP, whose next answer has this data."""
    begun: list[Any] = [{"type": "state", "data": {}}, {"type": "observation", "data": {"observation": {}}}]
    frames = map(json.dumps, [*begun, {"type": "observation", "data": answer}])
    tool = {"type": "function", "function": {"name": "look"}}
    async with scripted_server(*frames, at_end=ServerConnection.wait_closed) as url:
        listing = OpenEnvListing("Board", [tool], has_mcp_tools=has_mcp_tools)
        server = OpenEnvServer(url, listing, timeout_s=60.0, at_once=asyncio.Semaphore(1), wait_s=60.0)
        async with server.started() as environment:
            await reset(environment)
            yield environment


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"tool_name": "look", "result": "é"}, "é"),
        ({"tool_name": "look", "result": {"row": [1, "é"]}}, '{"row": [1, "é"]}'),
        ({"tool_name": "look"}, "null"),
        ({"board": [1, None]}, '{"board": [1, null]}'),
        ({}, ""),
        (
            {
                "tool_name": "look",
                "result": {"content": [{"type": "text", "text": ""}, {"type": "image", "data": "x"}]},
            },
            "\n[image, not shown]",
        ),
    ],
)
async def test_the_model_reads_text_and_otherwise_json(observation: dict[str, Any], text: str) -> None:
    async with environment_that_says(observation=observation, reward=True) as environment:
        assert await environment.call("look", {}) == text
        assert await environment.reward() == 1.0


async def test_an_observation_of_an_environment_s_own_is_json_whatever_its_fields_are() -> None:
    observation = {"tool_name": "shell", "stdout": "a.txt", "error": ""}
    async with environment_that_says(has_mcp_tools=False, observation=observation) as environment:
        assert json.loads(await environment.call("look", {})) == observation


@pytest.mark.parametrize(
    "observation",
    [
        {"tool_name": "look", "error": {"error_type": "timeout", "message": "too late"}},
        {"tool_name": "look", "result": {"content": [{"type": "text", "text": "too late"}], "is_error": True}},
    ],
)
async def test_an_mcp_tool_that_fails_is_answered_with_its_error(observation: dict[str, Any]) -> None:
    async with environment_that_says(observation=observation, reward=0.5, done=True) as environment:
        with pytest.raises(ToolError, match=r"^too late$"):
            await environment.call("look", {})
        assert (await environment.reward(), environment.is_over) == (0.5, True)


@pytest.mark.parametrize(
    "answer",
    [
        {"reward": 1.0},
        {"observation": [1]},
        {"observation": {}, "reward": "high"},
        {"observation": {}, "done": 1},
        {"observation": {"tool_name": "look", "error": "no"}},
    ],
)
async def test_an_answer_that_is_no_observation_loses_the_session(answer: dict[str, Any]) -> None:
    async with environment_that_says(**answer) as environment:
        with pytest.raises(ToolLostError, match="step: not an observation: ValidationError"):
            await environment.call("look", {})


async def test_a_rollout_that_is_cancelled_gives_its_session_back() -> None:
    with openenv_server(STAND_IN, "game", max_sessions=1) as (url, _):
        server, is_begun = await loaded(url), asyncio.Event()

        async def play() -> None:
            async with server.started() as environment:
                await reset(environment)
                is_begun.set()
                await asyncio.Event().wait()

        rollout = asyncio.create_task(play())
        await is_begun.wait()
        rollout.cancel()
        await eventually(rollout.done)
        async with server.started() as environment:
            assert await reset(environment)
