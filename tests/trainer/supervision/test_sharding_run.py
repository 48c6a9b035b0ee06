"""A whole run on two training ranks: supervisor, torchrun, checkpoints, weight push; and kill -9 of each rank."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr

from headrace.local.process_table import descendants, wait_until_gone
from headrace.local.state_dir import ProcessMark
from services.trainer.settings import TrainerSettings
from services.trainer.supervision.run_supervisor import RunSupervisor
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.trainer.incarnations import newest_ledger, small_config
from tests.trainer.played import RUN_ID, PlayedServices
from tests.trainer.tensor_files import load_file
from tests.weights.replica import KEY
from tests.weights.served_receiver import ServedReceiver, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WITHIN_S = 150.0


class TwoRanks:
    """A run of two ranks under its supervisor, with a generator that receives weights."""

    def __init__(self, redis: Redis, supervisor: RunSupervisor, replica: ServedReceiver) -> None:
        self.store = RunStore(redis)
        self.supervisor = supervisor
        self.replica = replica

    async def record(self) -> RunRecord:
        """Return the run's record."""
        found = await self.store.get(RUN_ID)
        assert found is not None
        return found

    async def reaches(self, step: int) -> None:
        """Wait for an optimizer step."""

        async def is_there() -> bool:
            found = await self.record()
            assert found.status in ("queued", "running"), found.reason
            return found.progress.step >= step

        await eventually(is_there, within_s=WITHIN_S)

    async def restarts(self, num_restarts: int) -> None:
        """Wait until the supervisor has restarted the ranks this often."""
        await eventually(lambda: self.supervisor.keeper.num_restarts == num_restarts, within_s=WITHIN_S)

    async def ends(self) -> RunRecord:
        """Wait for the end of the run."""

        async def has_ended() -> bool:
            return (await self.record()).status not in ("queued", "running")

        await eventually(has_ended, within_s=WITHIN_S)
        return await self.record()

    def processes(self) -> list[ProcessMark]:
        """Return the launcher and its descendants."""
        return [mark for mark in descendants(os.getpid()) if b"services.trainer.rank" in _cmdline(mark.pid)]

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL."""
        (pid,) = [mark.pid for mark in self.processes() if f"\0RANK={rank}\0" in _environment(mark.pid)]
        os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def two_ranks(redis: Redis, redis_url: str, config: RunConfig, tmp_path: Path) -> AsyncGenerator[TwoRanks]:
    """Start the run with everything around it, and end all of it at the end."""
    settings = TrainerSettings(
        redis_url=SecretStr(redis_url),
        internal_key=SecretStr(KEY),
        runs_dir=tmp_path,
        supervise_every_s=0.2,
        first_backoff_s=0.1,
        collective_timeout_s=60.0,
        rank_stop_grace_s=120.0,  # for the last checkpoint: a rank that is killed before leaves none
        rank_env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    # The generator of this test receives weights, but computes nothing with them.
    config = config.model_copy(update={"push_probe_tolerance": None})
    await RunStore(redis).create(RUN_ID, config, run_dir=str(tmp_path / "run"))
    stopping = asyncio.Event()
    supervisor = RunSupervisor(RunStore(redis), settings=settings, stopping=stopping)
    async with serve("generator-0") as replica:
        await replica.register(redis, RunKeys(RUN_ID))
        services = asyncio.create_task(PlayedServices(redis).play(), name="played services")
        supervising = asyncio.create_task(supervisor.supervise(), name="supervisor")
        run = TwoRanks(redis, supervisor, replica)
        try:
            yield run
        finally:
            started = run.processes()
            stopping.set()
            await supervising
            services.cancel()
            left = wait_until_gone(started, timeout_s=10)
            with contextlib.suppress(FileNotFoundError):  # shown if the test fails
                print((tmp_path / "run" / "rank.log").read_text()[-6000:])  # noqa: T201
            assert left == []


@pytest.mark.parametrize("victims", [(1,), pytest.param((1, 0), marks=pytest.mark.long)], ids=str)
async def test_a_run_on_two_ranks_survives_the_end_of_each_and_leaves_no_process(
    victims: tuple[int, ...], redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = small_config(tmp_path, tiny_model, max_steps=100_000, save_steps=4, nproc_per_node=2)
    async with two_ranks(redis, redis_url, config, tmp_path) as run:
        await run.reaches(5)
        for num_restarts, victim in enumerate(victims, start=1):
            run.kill(victim)
            await run.restarts(num_restarts)
            await run.reaches((await run.record()).progress.step + 5)
        assert run.supervisor.keeper.rank is not None
        os.kill(run.supervisor.keeper.rank.pid, signal.SIGTERM)
        await run.restarts(len(victims) + 1)
        terminated_at = (await run.record()).progress.step
        await run.reaches(terminated_at + 1)
        await run.store.ask_to(RUN_ID, "stop")
        run.supervisor.wake()
        ended = await run.ends()
    assert (ended.status, ended.reason) == ("stopped", "")
    said = (tmp_path / "run" / "rank.log").read_text()
    for victim in victims:
        assert f"training rank {victim} was killed by signal 9" in said
    assert f"at step {terminated_at}" in said, "all ranks took part in a checkpoint when they were asked to end"
    ledger = newest_ledger(tmp_path / "run")
    num_trained = sum(last - first + 1 for first, last in ledger["trained"])
    num_dropped = sum(last - first + 1 for runs in ledger["dropped"].values() for first, last in runs)
    assert num_trained == ended.progress.step * config.groups_per_step
    assert num_trained + num_dropped == ledger["admitted"]
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    received = run.replica.engine.weights
    assert set(received) == set(exported)
    assert [name for name in received if not torch.equal(received[name], exported[name])] == []


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return b""


def _environment(pid: int) -> str:
    with contextlib.suppress(OSError):
        return "\0" + Path(f"/proc/{pid}/environ").read_text()
    return ""
