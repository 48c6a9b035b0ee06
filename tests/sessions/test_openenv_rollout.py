"""One rollout in a session of an OpenEnv server: its end, its reward, and recordings that go on in another session."""

from collections.abc import Generator
from typing import Any

import pytest

from services.sessions.recording.recorded import RolloutEnd
from services.sessions.tools.openenv_server import OpenEnvServer
from shared.messages import PlayedEnvironment
from shared.turns import SampledTurn, TurnRequest
from tests.sessions.environment_play import PROMPT, Play, group, said
from tests.sessions.scripted import InProcessTools, answer, assistant, call, turns_of, user
from tests.sessions.tools.openenv_servers import SERVERS, STAND_IN, loaded, openenv_server

BEGINS = '\n\n{"hint": "Guess a number from 0 to 9.", "guesses_left": 3}'


def guess(*numbers: object) -> Any:
    """Return a turn that guesses all numbers at once."""
    return assistant("", *(call("step", f'{{"number": {each}}}', f"call-{i}") for i, each in enumerate(numbers)))


POLICY = turns_of(guess(5), guess('"x"'), guess(7), assistant("never said"))


@pytest.fixture(scope="module", params=SERVERS)
def game_url(request: pytest.FixtureRequest) -> Generator[str]:
    with openenv_server(list(request.param), "game") as (url, _):
        yield url


@pytest.fixture
async def game(game_url: str) -> OpenEnvServer:
    return await loaded(game_url)


async def test_a_rollout_ends_with_the_step_that_is_done_and_has_its_reward(game: OpenEnvServer) -> None:
    playing = Play(game, POLICY)
    rollout = await playing(group(secret=7))
    assert rollout.lost == ""
    wrong = "Invalid message; number: Input should be a valid integer, unable to parse string as an integer"
    assert said(rollout) == [
        "",
        '{"hint": "higher", "guesses_left": 2}',
        "",
        f"{{'error': '{wrong}'}}",
        "",
        '{"hint": "right", "guesses_left": 1}',
    ]
    assert (rollout.num_calls, rollout.num_failed, len(playing.generators.requests)) == (3, 1, 3)
    assert playing.generators.requests[0].messages == [PROMPT[0], user(f"Begin.{BEGINS}")]
    played = rollout.environment
    assert played is not None
    assert (played.name, played.has_reward, played.observation, played.reward) == ("Game", True, BEGINS, 1.0)
    assert played.attributes["step_count"] == 2


async def test_a_policy_may_end_a_rollout_before_it_is_done(game: OpenEnvServer) -> None:
    rollout = await Play(game, turns_of(guess(5), assistant("I give up.")))(group(secret=7))
    assert said(rollout)[-1] == "I give up."
    assert (rollout.lost, rollout.environment and rollout.environment.reward) == ("", 0.5)
    idle = await Play(game, turns_of(assistant("No.")))(group(secret=7))
    assert (idle.lost, idle.environment and idle.environment.reward) == ("", 0.0)


async def test_calls_of_a_turn_after_the_one_that_is_done_are_answered_with_an_error(game: OpenEnvServer) -> None:
    rollout = await Play(game, turns_of(guess(7, 6)))(group(secret=7))
    assert said(rollout)[-1] == "{'error': 'The episode is over.'}"
    assert (rollout.num_failed, rollout.environment and rollout.environment.reward) == (1, 1.0)


@pytest.mark.parametrize("num_kept", range(8))
async def test_a_rollout_goes_on_in_another_session_with_the_state_of_the_lost_one(
    game: OpenEnvServer, num_kept: int
) -> None:
    first = Play(game, POLICY)
    whole = await first(group(secret=7))
    assert len(first.entries) == 7
    assert isinstance(first.entries[-1], RolloutEnd)

    def unlike_before(request: TurnRequest) -> SampledTurn:
        return answer(request, POLICY(request), token_ids=[21, 22])

    second = Play(game, unlike_before, first.entries[:num_kept])
    assert await second(group(secret=7)) == whole
    assert len(second.generators.requests) == 3 - min((num_kept + 1) // 2, 3)


async def test_a_rollout_is_lost_if_another_session_does_not_say_what_was_recorded(game: OpenEnvServer) -> None:
    first = Play(game, POLICY)
    await first(group(secret=7))
    rollout = await Play(game, POLICY, first.entries[:2])(group(secret=3))
    assert rollout.lost.endswith(
        "could not be rebuilt: step, called again with the recorded arguments, had another result"
    )


async def test_a_rollout_is_lost_with_its_server() -> None:
    with openenv_server(STAND_IN, "game") as (url, process):
        playing = Play(await loaded(url), turns_of(guess(5), assistant("", call("kill", "{}")), guess(7)))
        playing.tools = InProcessTools(kill=process.kill)
        rollout = await playing(group(secret=7))
    assert f"{url}: step: the connection ended" in rollout.lost
    assert rollout.environment == PlayedEnvironment("Game", True, BEGINS)
