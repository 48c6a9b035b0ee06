"""From the prompts stream to the completions stream, with a real Redis and scripted turns."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import msgspec
import pytest

from services.sessions.group_player import GroupPlayer
from services.sessions.recording.recorded import RecordedTurn, digest
from services.sessions.session_loop import SessionLoop
from services.sessions.session_metrics import SessionMetrics
from services.sessions.tool_rollout import Limits, Tools
from services.sessions.tools.tool_errors import ToolLostError
from shared.errors import StateLostError
from shared.messages import CompletedGroup, PromptGroup, VersionSpan, decode_completed_group, encode
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.turns import SampledTurn, TurnRefusedError, TurnRequest
from tests.eventually import eventually
from tests.groups import prompt_group
from tests.sessions.scripted import InProcessTools, ScriptedGenerators, answer, assistant, call, turns_of, user
from tests.stream_view import entries

CALL = assistant("", call("add", '{"a": 2, "b": 2}'))
FOUR = turns_of(CALL, assistant("4"))


def agent_group(group_id: str = "00000000", *, num_generations: int = 2) -> PromptGroup:
    group = prompt_group(group_id, num_generations=num_generations)
    return msgspec.structs.replace(group, prompt=[user("2+2?")], prompt_ids=b"")


async def add(redis: Redis, keys: RunKeys, *groups: PromptGroup) -> None:
    await redis.set(keys.required_version, "1:3")
    for group in groups:
        await redis.xadd(keys.prompts, {"group_id": group.group_id, "payload": encode(group)})


async def completed(redis: Redis, keys: RunKeys, *, count: int = 1) -> list[CompletedGroup]:
    async def are_there() -> bool:
        return int(await redis.xlen(keys.completions)) >= count

    await eventually(are_there)
    return [decode_completed_group(fields["payload"]) for _, fields in await entries(redis, keys.completions)]


def add_numbers(a: int, b: int) -> int:
    return a + b


@contextlib.asynccontextmanager
async def playing(
    redis: Redis,
    keys: RunKeys,
    generators: ScriptedGenerators,
    *,
    tools: Tools | None = None,
    replica_id: str = "sessions-0",
    max_inflight_groups: int = 8,
) -> AsyncGenerator[asyncio.Task[None]]:
    """Play groups while the body runs; then end as after SIGTERM."""
    metrics = SessionMetrics()
    player = GroupPlayer(
        generators=generators,
        tools=tools or InProcessTools(add=add_numbers),
        limits=Limits(max_iterations=None, max_completion_length=100),
        metrics=metrics,
        by=replica_id,
    )
    loop = SessionLoop(
        redis,
        keys=keys,
        player=player,
        replica_id=replica_id,
        max_inflight_groups=max_inflight_groups,
        metrics=metrics,
    )
    task = asyncio.create_task(loop.run(), name=f"loop of {replica_id}")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_group_is_played_and_handed_off_whole(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, agent_group())
    generators = ScriptedGenerators(FOUR)
    async with playing(redis, run_keys, generators):
        (group,) = await completed(redis, run_keys)
    assert group.prompt == agent_group()
    assert [stamp.event for stamp in group.stamps] == ["claimed", "generated"]
    assert len(generators.requests) == 4
    assert set(generators.routing_keys) == {"00000000"}
    for branch, rollout in enumerate(group.rollouts):
        assert (rollout.rollout_id, rollout.branch) == (f"00000000-{branch}", branch)
        assert isinstance(rollout.completion, list)
        assert [message["role"] for message in rollout.completion] == ["assistant", "tool", "assistant"]
        assert (rollout.tool_calls, rollout.tool_failures, rollout.lost) == (1, 0, "")
        assert [turn.role for turn in rollout.rows[0].turns] == ["assistant", "tool", "assistant"]
    assert await redis.xlen(run_keys.prompts) == 0
    assert await redis.keys("*sessions*") == []
    assert await redis.hgetall(run_keys.started) == {b"00000000": b"1:3"}


async def test_a_text_prompt_is_asked_as_a_user(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, msgspec.structs.replace(agent_group(num_generations=1), prompt="2+2?"))
    generators = ScriptedGenerators(turns_of(assistant("4")))
    async with playing(redis, run_keys, generators):
        await completed(redis, run_keys)
    assert generators.requests[0].messages == [user("2+2?")]


async def test_nothing_is_claimed_before_the_run_has_weights(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, agent_group())
    await redis.delete(run_keys.required_version)
    async with playing(redis, run_keys, ScriptedGenerators(FOUR)):
        await asyncio.sleep(0.7)
        assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 0
        await redis.set(run_keys.required_version, "1:3")
        await completed(redis, run_keys)


async def test_a_group_counts_as_begun_from_its_claim(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, agent_group())
    may_sample = asyncio.Event()

    class Waiting(ScriptedGenerators):
        async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
            await may_sample.wait()
            return answer(request, assistant("4"), spans=(VersionSpan(4, 0, 2, 1),))

    async def started() -> object:
        return await redis.hgetall(run_keys.started)

    async with playing(redis, run_keys, Waiting(FOUR)):

        async def is_noted() -> bool:
            return await started() == {b"00000000": b"1:3"}

        await eventually(is_noted)
        may_sample.set()
        await completed(redis, run_keys)
        assert await started() == {b"00000000": b"1:4"}


async def test_at_most_the_groups_that_may_be_in_flight_are_claimed(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, *(agent_group(f"{number:08d}") for number in range(5)))
    release = asyncio.Semaphore(0)
    num_inside = 0

    class Waiting(ScriptedGenerators):
        async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
            nonlocal num_inside
            num_inside += 1
            await release.acquire()
            return await super().sample(request, routing_key=routing_key)

    async with playing(redis, run_keys, Waiting(turns_of(assistant("4"))), max_inflight_groups=2):
        await eventually(lambda: num_inside == 4)
        await asyncio.sleep(0.6)
        assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 2
        for _ in range(10):
            release.release()
        groups = await completed(redis, run_keys, count=5)
    assert len({group.prompt.group_id for group in groups}) == 5


async def test_after_sigterm_another_replica_goes_on_at_once_from_the_recorded_turns(
    redis: Redis, run_keys: RunKeys
) -> None:
    await add(redis, run_keys, agent_group())

    async def hang(a: int, b: int) -> int:
        await asyncio.sleep(600)
        return a + b

    first, hanging = ScriptedGenerators(FOUR), InProcessTools(add=hang)
    async with playing(redis, run_keys, first, tools=hanging, replica_id="a"):
        await eventually(lambda: len(hanging.calls) == 2)
    assert await alive(redis, leases=run_keys.leases(GENERATORS)) == set()
    second = ScriptedGenerators(lambda request: answer(request, FOUR(request), token_ids=[21, 22]))
    async with playing(redis, run_keys, second, replica_id="b"):
        (group,) = await completed(redis, run_keys)
    assert len(second.requests) == 2  # one for each rollout: the first turns were recorded
    for rollout in group.rollouts:
        assert rollout.rows[0].sampled_ids().tolist() == [11, 12, 21, 22]


async def test_a_replica_that_was_taken_for_dead_drops_its_group(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, agent_group(num_generations=1))
    may_answer = asyncio.Event()

    async def slow(a: int, b: int) -> int:
        await may_answer.wait()
        return 5

    paused = InProcessTools(add=slow)
    first, second = ScriptedGenerators(FOUR), ScriptedGenerators(FOUR)
    async with playing(redis, run_keys, first, tools=paused, replica_id="a") as loop:
        await eventually(lambda: paused.calls)
        await redis.zrem(run_keys.leases(GENERATORS), "a")
        async with playing(redis, run_keys, second, replica_id="b"):
            (group,) = await completed(redis, run_keys)
        may_answer.set()
        await add(redis, run_keys, agent_group("00000001", num_generations=1))
        _, other = await completed(redis, run_keys, count=2)
        assert not loop.done()
    assert (len(second.requests), other.prompt.group_id) == (1, "00000001")
    assert isinstance(group.rollouts[0].completion, list)
    assert group.rollouts[0].completion[1]["content"] == "4"
    assert await redis.keys("*sessions*") == []


async def test_a_rollout_whose_tool_hangs_is_lost_and_the_others_are_whole(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, agent_group())
    results: list[Callable[[], int]] = [lambda: 4]

    def once(a: int, b: int) -> int:
        if not results:
            raise ToolLostError("add did not end within 30 s")
        return results.pop()()

    async with playing(redis, run_keys, ScriptedGenerators(FOUR), tools=InProcessTools(add=once)):
        (group,) = await completed(redis, run_keys)
    lost, whole = sorted(group.rollouts, key=lambda rollout: not rollout.lost)
    assert (lost.lost, whole.lost) == ("add did not end within 30 s", "")
    assert lost.rows[0].num_sampled == 2


@pytest.mark.parametrize("kind", ["context_length", "chat_template"])
async def test_a_prompt_that_the_model_cannot_take_is_buried(redis: Redis, run_keys: RunKeys, kind: str) -> None:
    await add(redis, run_keys, agent_group())

    def refuse(_: TurnRequest) -> SampledTurn:
        raise TurnRefusedError("no room", kind="context_length" if kind == "context_length" else "chat_template")

    async with playing(redis, run_keys, ScriptedGenerators(refuse)):

        async def is_buried() -> bool:
            return bool(await redis.xlen(run_keys.dead))

        await eventually(is_buried)
    ((_, letter),) = await entries(redis, run_keys.dead)
    assert b"cannot be played: no room" in letter["reason"]


async def test_a_group_that_comes_back_to_a_replica_while_it_plays_it_is_played_to_its_end(
    redis: Redis, run_keys: RunKeys
) -> None:
    """Another replica takes the group over, records a turn and dies. Then this one records its own turn, too late."""
    await add(redis, run_keys, agent_group(num_generations=1))
    may_answer = asyncio.Event()

    class Slow(ScriptedGenerators):
        async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
            turn = await super().sample(request, routing_key=routing_key)
            await may_answer.wait()
            return turn

    slow = Slow(FOUR)
    async with playing(redis, run_keys, slow, replica_id="a"):
        await eventually(lambda: slow.requests)
        ((entry_id, _),) = await entries(redis, run_keys.prompts)
        await redis.xclaim(run_keys.prompts, GENERATORS, "b", 0, [entry_id])
        (of_a,) = slow.requests
        request = digest([of_a.messages, of_a.tools, of_a.max_tokens, of_a.max_row_tokens, 0, None])
        turn_of_b = answer(of_a, CALL, token_ids=[21, 22])
        turn = RecordedTurn(request, None, of_a.messages, digest(of_a.tools), False, 0, turn_of_b)
        await redis.hset(run_keys.sessions("00000000"), "0/0", msgspec.msgpack.encode(turn))

        async def is_back() -> bool:
            (pending,) = await redis.xpending_range(run_keys.prompts, GENERATORS, "-", "+", 1)
            return pending["consumer"] == b"a"

        await eventually(is_back)
        may_answer.set()
        (group,) = await completed(redis, run_keys)
    assert group.rollouts[0].rows[0].sampled_ids().tolist() == [21, 22, 11, 12]


async def test_only_the_rollout_whose_later_turn_is_refused_is_lost(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, agent_group())

    def policy(request: TurnRequest) -> SampledTurn:
        if len(request.messages) > 1 and request.request_id.endswith("-1"):
            raise TurnRefusedError("only one call at a time", kind="chat_template")
        return answer(request, FOUR(request))

    async with playing(redis, run_keys, ScriptedGenerators(policy)):
        (group,) = await completed(redis, run_keys)
    assert [rollout.lost for rollout in group.rollouts] == ["", "its turn 2 was refused: only one call at a time"]
    assert await redis.xlen(run_keys.dead) == 0


async def test_a_malformed_entry_is_buried_and_the_next_is_played(redis: Redis, run_keys: RunKeys) -> None:
    await redis.xadd(run_keys.prompts, {"group_id": "00000007", "payload": b"\xff"})
    await redis.xadd(run_keys.prompts, {"group_id": "00000008", "payload": encode(agent_group("00000009"))})
    await add(redis, run_keys, agent_group())
    async with playing(redis, run_keys, ScriptedGenerators(FOUR)):
        await completed(redis, run_keys)

        async def are_buried() -> bool:
            return await redis.xlen(run_keys.dead) == 2

        await eventually(are_buried)


async def test_the_loop_ends_when_its_run_is_gone(redis: Redis, run_keys: RunKeys) -> None:
    await add(redis, run_keys, agent_group())
    async with playing(redis, run_keys, ScriptedGenerators(FOUR)) as loop:
        await completed(redis, run_keys)
        await RunStore(redis).delete(run_keys.run_id)
        await redis.set(run_keys.required_version, "1:3")
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as failed:
                await loop
        assert failed.group_contains(StateLostError)
        await redis.delete(run_keys.required_version)
