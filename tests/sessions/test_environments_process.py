"""Environments in the sessions service as a process: real environments' processes, signals, kill -9, refusals."""

from pathlib import Path
from typing import Any

import pytest

from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from shared.turns import TurnRequest
from tests.eventually import eventually
from tests.rewarder.conftest import is_running
from tests.sessions.fake_generators import HangsOnce, Reply, generator
from tests.sessions.replica import begin_run, completed, service, why_refused
from tests.sessions.scripted import answer, assistant, call

ENVIRONMENTS = '''
import os, pathlib, random, signal, time

HERE = pathlib.Path(__file__).parent

class Game:
    """Draws a number, which the model cannot see, and counts the guesses."""

    def __init__(self):
        self.guesses, self.pid = 0, os.getpid()
        (HERE / "pids").open("a").write(f"{self.pid} ")

    def reset(self, prompt, answer, **columns):
        self.number, self.answer = random.randint(0, 10**9), answer
        return f" Guess what follows {self.number}."

    def guess(self, number: int) -> str:
        """
        Guess.

        Args:
            number: The number.
        """
        self.guesses += 1
        return f"{self.guesses}: {number - self.number}"

    def wait(self) -> str:
        """Wait for the file go."""
        (HERE / "waiting").open("a").write("x")
        while not (HERE / "go").exists():
            time.sleep(0.02)
        return f"waited after {self.guesses}"

    def die(self) -> None:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        """Never end."""
        while True:
            pass

    def get_reward(self):
        return self.guesses / 10

class WithoutReset:
    def act(self) -> str:
        """Act."""

class FailsToBegin:
    def __init__(self):
        raise ConnectionError("no server at localhost:8000")

class WithoutDocstring(Game):
    def look(self, x: int) -> int:
        return x

class WithoutReward:
    def reset(self, **_):
        pass

def guess(number: int) -> str:
    """
    Guess as a tool.

    Args:
        number: The number.
    """
'''


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_envs.py").write_text(ENVIRONMENTS)
    return tmp_path


def number_in(request: TurnRequest) -> int:
    """Return the number that the environment has drawn for this rollout."""
    return int(str(request.messages[0]["content"]).rpartition(" ")[2].rstrip("."))


def guess(request: TurnRequest) -> Any:
    return call("guess", f'{{"number": {number_in(request) + 1}}}')


@pytest.mark.slow
async def test_after_kill_9_another_replica_rebuilds_the_environments_and_samples_no_recorded_turn_again(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    keys = await begin_run(redis, run_config, asks="Begin.", environment_factory="my_envs:Game", tool_timeout_s=240.0)

    def reply(request: TurnRequest, num_before: int) -> Reply:
        calls = [[guess(request), guess(request)], [call("wait", "{}")], []][num_before]
        return answer(request, assistant("" if calls else "done", *calls), token_ids=[10 * num_before + 1, 2])

    policy = HangsOnce(reply)

    def has_begun() -> bool:
        return policy.hangs.is_set() and (directory / "waiting").exists()

    async with generator(redis, keys, policy) as fake:
        with service(redis_url, directory, HEADRACE_REPLICA_ID="a") as first:
            # One rollout is in a call of its environment, the other one in a turn.
            await eventually(lambda: has_begun() or not first.is_alive())
            assert first.is_alive(), first.log()
        lost = [int(pid) for pid in (directory / "pids").read_text().split()]
        await eventually(lambda: not any(map(is_running, lost)))
        (directory / "go").touch()
        with service(redis_url, directory, HEADRACE_REPLICA_ID="b") as second:
            group = await completed(redis, keys, process=second)
            assert second.end() == 0, second.log()
    numbers: set[int] = set()
    for rollout in group.rollouts:
        assert rollout.lost == ""
        assert [message["content"] for message in rollout.completion if isinstance(message, dict)] == [
            "", "1: 1", "2: 1", "", "waited after 2", "done",
        ]  # fmt: skip
        assert rollout.rows[0].sampled_ids().tolist() == [1, 2, 11, 2, 21, 2]
        played = rollout.environment
        assert played is not None
        assert (played.name, played.reward) == ("my_envs:Game", 0.2)
        assert played.attributes["guesses"] == 2
        assert played.attributes["answer"] == "42"
        assert played.attributes["pid"] not in lost
        numbers.add(played.attributes["number"])
    assert len(numbers) == 2
    asked = [request.request_id.rpartition("-")[0] for request in fake.requests]
    assert sorted(asked) == ["00000000-0"] * 3 + ["00000000-1"] * 4
    assert await redis.keys("*:sessions:*") == []
    made = [int(pid) for pid in (directory / "pids").read_text().split()]
    await eventually(lambda: not any(map(is_running, made)))


SEVERAL = {"game": "my_envs:Game", "silent": "my_envs:WithoutReward"}


async def test_a_row_names_its_environment_and_gets_only_its_tools(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    def policy(request: TurnRequest) -> Reply:
        return answer(request, assistant("done"))

    with service(redis_url, directory) as process:
        for named, known in (("game", {"guess", "wait", "die", "hang"}), ("silent", set[str]())):
            columns: dict[str, object] = {"environment": named, "answer": "42"}
            keys = await begin_run(
                redis,
                run_config,
                run_id=f"run-{named}",
                asks="Begin.",
                columns=columns,
                environment_factory=SEVERAL,
            )
            async with generator(redis, keys, policy) as fake:
                group = await completed(redis, keys, process=process)
            for rollout in group.rollouts:
                assert (rollout.lost, rollout.environment and rollout.environment.name) == ("", SEVERAL[named])
            assert {tool["function"]["name"] for request in fake.requests for tool in request.tools} == known
        assert process.end() == 0, process.log()


@pytest.mark.slow
async def test_an_environment_that_ends_its_process_and_one_that_hangs_lose_their_rollouts_and_nothing_else(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    keys = await begin_run(redis, run_config, asks="Begin.", environment_factory="my_envs:Game", tool_timeout_s=2.0)

    def policy(request: TurnRequest) -> Reply:
        name = "die" if request.request_id.startswith("00000000-0-") else "hang"
        return answer(request, assistant("", call(name, "{}")))

    async with generator(redis, keys, policy) as fake:
        with service(redis_url, directory) as process:
            group = await completed(redis, keys, process=process)
            assert process.end() == 0
    killed, hung = group.rollouts
    assert killed.lost.startswith("my_envs:Game: die: its process died: "), killed.lost
    assert hung.lost == "my_envs:Game: hang took longer than 2 s and was killed"
    for rollout in group.rollouts:
        assert rollout.environment is not None
        assert rollout.environment.reward is None
        assert len(rollout.rows) == 1
    assert len(fake.requests) == 2


UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("WithoutReset", {}, "makes a WithoutReset without a method reset(**row); add one"),
    ("FailsToBegin", {}, "my_envs:FailsToBegin() ended with ConnectionError: no server at localhost:8000"),
    ("WithoutDocstring", {}, "my_envs:WithoutDocstring.look cannot be a tool"),
    ("Gane", {}, "my_envs has no class or function Gane. Did you mean Game?"),
    (
        "WithoutReward",
        {"reward_funcs": []},
        "my_envs:WithoutReward has no method get_reward, and the run has no reward_funcs: add one or the other",
    ),
    (
        "Game",
        {"environment_factory": SEVERAL, "reward_funcs": []},
        "my_envs:WithoutReward has no method get_reward, and the run has no reward_funcs: add one or the other",
    ),
    (
        "Game",
        {"tools": ["my_envs:guess"]},
        "tools and my_envs:Game have a tool guess, and the model could not tell them apart",
    ),
]


async def test_runs_whose_environments_cannot_be_used_are_refused_and_say_why(
    redis: Redis, redis_url: str, run_config: RunConfig, directory: Path
) -> None:
    runs: list[RunKeys] = []
    for number, (name, options, _) in enumerate(UNUSABLE):
        settings: dict[str, Any] = {"environment_factory": f"my_envs:{name}"} | options
        runs.append(await begin_run(redis, run_config, run_id=f"run-{number}", asks="Begin.", **settings))
    with service(redis_url, directory) as process:
        for keys, (_, _, says) in zip(runs, UNUSABLE, strict=True):
            assert says in await why_refused(redis, keys, process=process)
        assert process.end() == 0
