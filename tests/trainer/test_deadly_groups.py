"""Groups that kill a rank: some can be detected and are refused, the others are found by the second death.

Real rank processes on a real Redis; generator and rewarder are played by hand-offs.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.trainer.ranks.exit_status import ENDED
from shared.arrays import pack_ids
from shared.messages import ScoredGroup, VersionSpan, decode_scored_group
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from tests.groups import with_row
from tests.stream_view import entries
from tests.tiny_model import VOCAB_SIZE
from tests.trainer.deadly_rank import DEADLY_TOKEN
from tests.trainer.incarnations import create, newest_ledger, rank_process, small_config
from tests.trainer.played import RUN_ID, PlayedServices

pytestmark = pytest.mark.timeout(600)
DEADLY = "00000005"


def with_last_token(group: ScoredGroup, token: int) -> ScoredGroup:
    """Return the group with a different last token in its second completion."""
    first, second, *others = group.rollouts
    second = with_row(second, token_ids=second.rows[0].token_ids[:-4] + pack_ids([token]))
    return msgspec.structs.replace(group, rollouts=(first, second, *others))


def from_the_future(group: ScoredGroup) -> ScoredGroup:
    """Return the group with a policy version that the run never reaches."""
    first, *others = group.rollouts
    first = with_row(first, version_spans=(VersionSpan(7, 0, 2, 1),))
    return msgspec.structs.replace(group, rollouts=(first, *others))


@asynccontextmanager
async def playing(played: PlayedServices) -> AsyncGenerator[None]:
    services = asyncio.create_task(played.play(), name="played services")
    try:
        yield
    finally:
        services.cancel()


async def letters(redis: Redis) -> dict[str, str]:
    """Return the reason of each dead letter."""
    found = await entries(redis, RunKeys(RUN_ID).dead)
    return {fields["group_id"].decode(): fields["reason"].decode() for _, fields in found}


async def test_groups_that_the_model_cannot_train_on_are_buried_and_the_rank_lives(
    redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    await create(redis, small_config(tmp_path, tiny_model), tmp_path)
    played = PlayedServices(redis)
    played.spoil = {
        "00000001": lambda group: with_last_token(group, -7),
        "00000004": lambda group: with_last_token(group, VOCAB_SIZE),
        "00000006": from_the_future,
    }
    async with playing(played), rank_process(redis_url, RUN_ID, tmp_path) as process, asyncio.timeout(300):
        assert await process.wait() == ENDED

    ledger = newest_ledger(tmp_path / "run")
    assert ledger["dropped"] == {"dead_letter": [[1, 1], [4, 4], [6, 6]]}
    assert ledger["admitted"] == 15, "12 are trained"
    assert await letters(redis) == {
        "00000001": "group 00000001 has a negative token id",
        "00000004": f"rollout 00000004-1 has token id {VOCAB_SIZE}, outside the model's vocabulary of {VOCAB_SIZE} "
        "tokens",
        "00000006": "rollout 00000006-0 was sampled by policy version 7 of a run of 6 steps",
    }


@pytest.mark.parametrize(
    ("deadly", "groups_per_step", "status", "said"),
    [
        ("raise", 2, 1, "RuntimeError: CUDA error: device-side assert triggered"),
        ("kill", 1, -9, ""),
    ],
)
async def test_a_group_that_a_rank_dies_of_twice_is_buried_with_its_post_mortem(
    deadly: str,
    groups_per_step: int,
    status: int,
    said: str,
    redis: Redis,
    redis_url: str,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    config = small_config(tmp_path, tiny_model, groups_per_step=groups_per_step)
    await create(redis, config, tmp_path)
    played = PlayedServices(redis)
    played.tokens[DEADLY] = DEADLY_TOKEN
    statuses: list[int] = []
    async with playing(played), asyncio.timeout(350):
        while len(statuses) < 4 and ENDED not in statuses:
            async with rank_process(
                redis_url, RUN_ID, tmp_path, module="tests.trainer.deadly_rank", DEADLY=deadly
            ) as process:
                statuses.append(await process.wait())

    assert statuses == [status, status, ENDED], "it dies with the batch, then with the single group, and then not again"
    ledger = newest_ledger(tmp_path / "run")
    assert ledger["dropped"] == {"dead_letter": [[5, 5]]}
    assert ledger["admitted"] == 6 * groups_per_step + 1
    where = tmp_path / "run" / "post_mortem" / f"group_{DEADLY}"
    assert await letters(redis) == {
        DEADLY: "the training rank died 2 times while it computed on this group, the last time only on it: "
        f"{said or 'it was killed, or the machine ran out of memory'}; look at {where}/report.json"
    }
    report: dict[str, Any] = json.loads((where / "report.json").read_text())
    assert (report["group_id"], report["deaths"], report["last_words"]) == (DEADLY, 2, said)
    assert [rollout["rollout_id"] for rollout in report["rollouts"]] == [f"{DEADLY}-{branch}" for branch in range(4)]
    kept = decode_scored_group((where / "groups" / f"{DEADLY}.msgpack").read_bytes())
    assert all(DEADLY_TOKEN in rollout.rows[0].sampled_ids() for rollout in kept.rollouts)
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    assert record.status == "finished"


async def test_garbage_about_what_was_begun_holds_no_batch_up(
    redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    await create(redis, small_config(tmp_path, tiny_model), tmp_path)
    garbage: dict[Any, Any] = {
        "99999999": "1:0",
        "00000003": "rubbish",
        "00000004": "9" * 5000,
        b"\xff": b"\xff",
        "eval-": "0:0",
    }
    await redis.hset(RunKeys(RUN_ID).started, mapping=garbage)
    async with (
        playing(PlayedServices(redis)),
        rank_process(redis_url, RUN_ID, tmp_path) as process,
        asyncio.timeout(300),
    ):
        assert await process.wait() == ENDED
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}
