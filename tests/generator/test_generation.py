"""The generation loop on a real vLLM engine and a real Redis."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.generator.engine.engine import Engine
from services.generator.generation_loop import GenerationLoop
from services.generator.metrics import GeneratorMetrics
from shared.arrays import pack_ids, unpack_ids
from shared.lineage import LineageVersion
from shared.messages import CompletedGroup, PromptGroup, decode_completed_group, encode
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.stream_view import entries
from tests.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]

KEYS = RunKeys("run-test")


class OpenGate:
    """A weight gate that a test opens and closes."""

    def __init__(self, policy_version: int = 0) -> None:
        self.held_version = LineageVersion(1, policy_version)
        self._opened = asyncio.Event()
        self._opened.set()

    async def wait_open(self, required: LineageVersion) -> None:
        while not self.held_version.satisfies(required):
            self._opened.clear()
            await self._opened.wait()

    def receive(self, policy_version: int) -> None:
        self.held_version = LineageVersion(1, policy_version)
        self._opened.set()


def a_prompt(group_id: str = "00000000", *, prompt_ids: list[int] | None = None, n: int = 4) -> PromptGroup:
    ids = [5, 6, 7] if prompt_ids is None else prompt_ids
    return PromptGroup(
        run_id="run-test", group_id=group_id, prompt="abc", prompt_ids=pack_ids(ids), columns={}, num_generations=n
    )


def a_config(model: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": str(model), "dataset_name": "/x.jsonl", "reward_funcs": ["accuracy_reward"], "num_generations": 4,
         "max_completion_length": 24} | changes
    )  # fmt: skip


@contextlib.asynccontextmanager
async def generating(
    redis: Redis,
    engine: Engine,
    config: RunConfig,
    *,
    gate: OpenGate | None = None,
    metrics: GeneratorMetrics | None = None,
) -> AsyncGenerator[GenerationLoop]:
    await RunStore(redis).create("run-test", config, run_dir="/nowhere")
    loop = GenerationLoop(
        redis, keys=KEYS, config=config, engine=engine, gate=gate or OpenGate(), replica_id="generator-0",
        metrics=metrics or GeneratorMetrics(),
    )  # fmt: skip
    task = asyncio.create_task(loop.run(), name="loop under test")
    try:
        yield loop
    finally:
        assert not task.done(), "the loop ended by itself"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def admit(redis: Redis, *groups: PromptGroup) -> None:
    for group in groups:
        await redis.xadd(KEYS.prompts, {"group_id": group.group_id, "payload": encode(group)})


async def first_entries(redis: Redis, stream: str, *, count: int, within_s: float = 60.0) -> list[dict[str, bytes]]:
    """Return the fields of ``count`` entries as soon as there are that many."""

    async def are_there() -> bool:
        return int(await redis.xlen(stream)) >= count

    await eventually(are_there, within_s=within_s)
    return [fields for _, fields in await entries(redis, stream)]


async def completed(redis: Redis, count: int) -> list[CompletedGroup]:
    found = await first_entries(redis, KEYS.completions, count=count)
    return [decode_completed_group(fields["payload"]) for fields in found]


async def test_a_group_comes_out_whole_with_the_logprobs_transformers_computes(
    engine: Engine, session_redis: Redis, tiny_model: Path
) -> None:
    temperature = 0.7
    config = a_config(tiny_model, temperature=temperature)
    async with generating(session_redis, engine, config):
        await admit(session_redis, a_prompt())
        (group,) = await completed(session_redis, 1)

    assert [rollout.rollout_id for rollout in group.rollouts] == [f"00000000-{branch}" for branch in range(4)]
    assert [stamp.event for stamp in group.stamps] == ["claimed", "generated"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for rollout in group.rollouts:
        (row,) = rollout.rows
        ids = unpack_ids(row.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor(ids.astype(np.int64))[None]).logits[0] / temperature
        expected = torch.log_softmax(logits, dim=-1)[range(2, len(ids) - 1), ids[3:].astype(np.int64)]
        assert np.abs(row.generator_logprobs() - expected.numpy()).max() < 1e-4
        assert [(span.policy_version, span.start, span.end) for span in rollout.version_spans()] == [
            (0, 0, len(ids) - 3)
        ]
        assert rollout.is_truncated() == (ids[-1] != EOS_TOKEN_ID)
        assert "<eos>" not in rollout.completion
    assert await session_redis.xlen(KEYS.prompts) == 0
    assert await session_redis.hget(KEYS.started, "00000000") == b"1:0"


async def test_prompts_the_model_cannot_take_are_buried_with_the_reason_and_the_rest_goes_on(
    engine: Engine, session_redis: Redis, tiny_model: Path
) -> None:
    async with generating(session_redis, engine, a_config(tiny_model)):
        await admit(
            session_redis,
            a_prompt("00000000", prompt_ids=[VOCAB_SIZE]),
            a_prompt("00000001", prompt_ids=[5] * 128),
            a_prompt("00000002", prompt_ids=[-1]),
            a_prompt("00000003"),
        )
        (group,) = await completed(session_redis, 1)
        dead = await first_entries(session_redis, KEYS.dead, count=3)
    assert group.prompt.group_id == "00000003"
    reasons = {fields["group_id"].decode(): fields["reason"].decode() for fields in dead}
    assert "out of vocabulary" in reasons["00000000"]
    assert "longer than the maximum model length of 128" in reasons["00000001"]
    assert "negative prompt id" in reasons["00000002"]


async def test_weights_relabelled_in_a_pause_give_spans_that_tile_the_completion(
    engine: Engine, session_redis: Redis, tiny_model: Path
) -> None:
    config, steps_before = a_config(tiny_model, max_completion_length=100, num_generations=8), engine.num_steps
    async with generating(session_redis, engine, config):
        await admit(session_redis, *(a_prompt(f"{n:08d}", n=8) for n in range(16)))
        await eventually(lambda: engine.num_steps > steps_before)  # there are tokens of the old version
        # As in a push. What the engine core holds of the old version must be sent before.
        await engine.client.pause_generation(mode="keep", clear_cache=False)
        await engine.client.update_weight_version("1")
        await engine.client.resume_generation()
        groups = await completed(session_redis, 16)
    await engine.client.update_weight_version("0")
    spans = [
        [span.policy_version for span in rollout.version_spans()] for group in groups for rollout in group.rollouts
    ]
    assert [0, 1] in spans, "no completion crossed the change of weights"
    assert all(versions in ([0], [1], [0, 1]) for versions in spans)


async def test_no_prompt_is_read_until_the_required_version_is_held(
    engine: Engine, session_redis: Redis, tiny_model: Path
) -> None:
    gate = OpenGate(policy_version=3)
    await session_redis.set(KEYS.required_version, "1:5")
    async with generating(session_redis, engine, a_config(tiny_model), gate=gate) as loop:
        await admit(session_redis, a_prompt())
        await eventually(lambda: loop.required_version == (1, 5))
        pending = await session_redis.xpending(KEYS.prompts, "generators")
        assert pending["pending"] == 0
        gate.receive(5)
        (group,) = await completed(session_redis, 1)
    assert group.prompt.group_id == "00000000"
    assert await session_redis.hget(KEYS.started, "00000000") == b"1:5"


async def test_no_more_groups_are_claimed_than_may_be_in_flight(
    engine: Engine, session_redis: Redis, tiny_model: Path
) -> None:
    config = a_config(tiny_model, max_inflight_groups=2)
    most = 0
    async with generating(session_redis, engine, config):
        await admit(session_redis, *(a_prompt(f"{n:08d}") for n in range(12)))
        async with asyncio.timeout(120):
            while int(await session_redis.xlen(KEYS.completions)) < 12:
                most = max(most, (await session_redis.xpending(KEYS.prompts, "generators"))["pending"])
    assert most == 2


async def test_a_cancelled_loop_aborts_its_requests_and_a_new_one_finishes_the_groups(
    engine: Engine, session_redis: Redis, tiny_model: Path
) -> None:
    config = a_config(tiny_model, max_completion_length=100)
    await engine.client.pause_generation(mode="keep", clear_cache=True)
    async with generating(session_redis, engine, config):
        await admit(session_redis, a_prompt("00000000"), a_prompt("00000001"))
        await eventually(lambda: engine.client.get_num_unfinished_requests() == 8)
    assert engine.client.get_num_unfinished_requests() == 0
    assert (await session_redis.xpending(KEYS.prompts, "generators"))["pending"] == 2
    await engine.client.resume_generation()
    async with generating(session_redis, engine, config):
        groups = await completed(session_redis, 2)
    assert sorted(group.prompt.group_id for group in groups) == ["00000000", "00000001"]


async def test_a_group_of_another_run_on_the_stream_is_buried(
    engine: Engine, session_redis: Redis, tiny_model: Path
) -> None:
    stray = PromptGroup(
        run_id="run-other", group_id="00000000", prompt="a", prompt_ids=pack_ids([5]), columns={}, num_generations=4
    )
    async with generating(session_redis, engine, a_config(tiny_model)):
        await admit(session_redis, stray)
        (letter,) = await first_entries(session_redis, KEYS.dead, count=1)
    assert b"run-other" in letter["reason"]
