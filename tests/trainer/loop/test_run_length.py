"""A run whose number of steps is changed while it trains."""

import asyncio
from pathlib import Path

import pytest

from services.trainer.intake import external_changes
from services.trainer.intake.intake import Intake
from shared.pause import Wishes
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.trainer.incarnations import create, small_config, train, trained_groups
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    return small_config(tmp_path, tiny_model)


@pytest.mark.parametrize(
    ("version", "max_steps", "may_end_at"),
    [
        (3, 8, {8}),
        (0, 3, {3}),
        (3, 1, {4, 5}),  # the fourth step may have been made before the change is read; then one more is made
    ],
)
async def test_a_run_whose_max_steps_changes_while_it_trains_ends_there_or_after_one_more_step(
    redis: Redis,
    config: RunConfig,
    tmp_path: Path,
    version: int,
    max_steps: int,
    may_end_at: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external_changes, "_EVERY_S", 0.0)
    await create(redis, config, tmp_path)
    sender, store = FakeSender(redis), RunStore(redis)

    async def change(pushed: int) -> None:
        record = await store.get(RUN_ID)
        if pushed == version and record is not None and record.config["max_steps"] == 6:
            await store.change_config(record, config.model_copy(update={"max_steps": max_steps}))

    sender.may_push = change
    ending, _ = await train(redis, played=PlayedServices(redis), sender=sender)
    assert ending == "finished"
    ends_at = sender.versions[-1]
    assert ends_at in may_end_at
    assert list(trained_groups(tmp_path / "run")) == list(range(1, ends_at + 1))
    record = await store.get(RUN_ID)
    assert record is not None
    assert record.progress.max_steps == ends_at


async def test_a_change_that_is_accepted_during_the_last_step_is_followed(
    redis: Redis, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run API refuses changes once the progress has the last step."""
    monkeypatch.setattr(external_changes, "_EVERY_S", 60.0)
    await create(redis, config, tmp_path)
    sender, store = FakeSender(redis), RunStore(redis)
    shown: list[tuple[int, int]] = []
    read_wishes = RunStore.wishes

    async def change(pushed: int) -> None:
        record = await store.get(RUN_ID)
        if pushed == 3 and record is not None:
            await store.change_config(record, config.model_copy(update={"max_steps": 8}))

    async def wishes(self: RunStore, run_id: str) -> Wishes:
        record = await self.get(run_id)
        assert record is not None
        shown.append((record.progress.step, record.progress.max_steps))
        return await read_wishes(self, run_id)

    sender.may_push = change
    monkeypatch.setattr(RunStore, "wishes", wishes)
    ending, _ = await train(redis, played=PlayedServices(redis), sender=sender)
    assert (ending, sender.versions[-1]) == ("finished", 8)
    assert shown[1:] == [(6, 6), (8, 8)], "the last step is shown before users' requests are read once more"


async def test_a_change_that_is_accepted_while_a_rank_starts_again_after_the_last_step_is_followed(
    redis: Redis, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank is asked to end while it pushes the weights of the last step."""
    monkeypatch.setattr("services.trainer.loop.outflow._LAST_PUSH_S", 0.1)
    await create(redis, config, tmp_path)
    sender, store, terminate = FakeSender(redis), RunStore(redis), asyncio.Event()

    async def hang(pushed: int) -> None:
        if pushed == 6:
            terminate.set()
            await asyncio.Event().wait()

    sender.may_push = hang
    ending, loop = await train(redis, played=PlayedServices(redis), sender=sender, terminate=terminate)
    assert (ending, loop.core.policy_version) == ("terminated", 6)
    recover = Intake.recover

    async def change_then_recover(self: Intake) -> None:
        record = await store.get(RUN_ID)
        assert record is not None
        await store.change_config(record, config.model_copy(update={"max_steps": 8}))
        await recover(self)

    monkeypatch.setattr(Intake, "recover", change_then_recover)
    ending, loop = await train(redis, played=PlayedServices(redis), sender=FakeSender(redis))
    assert (ending, loop.core.policy_version) == ("finished", 8)
