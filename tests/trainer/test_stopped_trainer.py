"""A trainer is stopped, taken for dead and replaced. When it wakes up, it changes nothing and ends."""

import asyncio
import hashlib
import json
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from services.trainer.ranks.exit_status import ENDED, FENCED
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from tests.eventually import eventually
from tests.trainer.incarnations import json_lines, newest_ledger, rank_process, small_config, trained_groups
from tests.trainer.scripted import ScriptedServices

RUN = "run-stopped"
WITHIN_S = 150
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("moment", ["between steps", "while it writes a checkpoint"])
async def test_a_trainer_that_wakes_up_after_its_successor_took_over_writes_nothing_and_ends(
    moment: str, redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = small_config(tmp_path, tiny_model, max_steps=8, save_steps=1, save_total_limit=20)
    keys, run_dir = RunKeys(RUN), tmp_path / RUN
    checkpoints = run_dir / "checkpoints"
    await RunStore(redis).create(RUN, config, run_dir=str(run_dir))
    services = ScriptedServices(redis, RUN, config, seed=3)
    services.publish_blocks(1 if moment == "between steps" else None)
    playing = asyncio.create_task(services.play(), name="played services")

    module = "services.trainer.rank" if moment == "between steps" else "tests.trainer.stopped_rank"

    def is_moment(pid: int) -> bool:
        if moment == "between steps":
            return (checkpoints / "step_00000002").is_dir()
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    try:
        async with rank_process(redis_url, RUN, tmp_path, module=module) as old, asyncio.timeout(2 * WITHIN_S):
            await eventually(lambda: is_moment(old.pid), within_s=WITHIN_S)
            if moment != "between steps":
                assert [*checkpoints.glob(".writing*step_00000003*")]
            old.send_signal(signal.SIGSTOP)
            services.publish_blocks(None)
            async with rank_process(redis_url, RUN, tmp_path) as new:
                assert await new.wait() == ENDED, (tmp_path / f"{RUN}.log").read_text()
            before = contents(checkpoints) | await everything(redis, keys), trained_groups(run_dir)
            old.send_signal(signal.SIGCONT)
            assert await old.wait() == FENCED, (tmp_path / f"{RUN}.log").read_text()
    finally:
        playing.cancel()
    after = contents(checkpoints) | await everything(redis, keys), trained_groups(run_dir)
    changed = [name for name in before[0].keys() | after[0].keys() if before[0].get(name) != after[0].get(name)]
    assert not changed, [(name, before[0].get(name), after[0].get(name)) for name in changed]
    assert before == after
    ledger = newest_ledger(run_dir)
    assert (ledger["admitted"], ledger["trained"], ledger["dropped"]) == (16, [[0, 15]], {})
    assert sorted(number for groups in trained_groups(run_dir).values() for number in groups) == list(range(16))
    assert [line["step"] for line in json_lines(run_dir / "metrics.jsonl")] == list(range(1, 9))
    incarnations = {
        json.loads((path / "trainer_state.json").read_text())["incarnation"] for path in checkpoints.glob("step_*[5-8]")
    }
    assert incarnations == {2}


def contents(directory: Path) -> dict[str, str]:
    """Return a digest of every file. Files of an unfinished checkpoint are left out, because no trainer reads them."""
    files = [path for path in directory.rglob("*") if path.is_file() and ".writing-" not in str(path)]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def content(redis: Any, name: bytes) -> Any:
    """Return the content of a key, without the server's own order. Of a stream, not when its entries were last read."""
    match await redis.type(name):
        case b"string":
            return await redis.get(name)
        case b"hash":
            return await redis.hgetall(name)
        case b"set":
            return await redis.smembers(name)
        case b"zset":
            return await redis.zrange(name, 0, -1, withscores=True)
        case kind:
            assert kind == b"stream", kind
    groups = [group["name"] for group in await redis.xinfo_groups(name)]
    return await redis.xrange(name), [await redis.xpending_range(name, group, "-", "+", 1000) for group in groups]


async def everything(redis: Redis, keys: RunKeys) -> dict[str, Any]:
    """Return Redis's data of the run, except leases, which expire by themselves, and telemetry."""
    found: dict[str, Any] = {}
    names: list[bytes] = await cast("Any", redis).keys(f"headrace:{{{keys.run_id}}}:*")
    for name in sorted(names):
        if b":leases:" not in name and not name.endswith(b":events"):
            found[name.decode()] = await content(redis, name)
    return found
