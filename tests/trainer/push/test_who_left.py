"""Which replicas are still in an epoch: some say that they have left, one is stopped, others are only slow."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

pytest.importorskip("torch")

from services.trainer.push import blame
from services.trainer.push.blame import until_one_is_silent, who_left
from services.trainer.push.replicas import Member, Replica
from shared.control import CommitReply, CommitRequest, ReplicaInfo
from shared.errors import PushError, UnavailableError
from tests.trainer.push.test_blame import INFO

pytestmark = pytest.mark.unit

Says = Callable[[], Awaitable[ReplicaInfo]]
LEAVE_S = 0.1
COMMIT = CommitRequest(run_id="run", epoch=INFO.epoch, policy_version=1, timeout_s=LEAVE_S)


class Asked(Replica):
    """Gives a set answer about itself, and fails a commit with "out of memory"."""

    def __init__(self, name: str, client: httpx.AsyncClient, says: Says) -> None:
        super().__init__(name, "http://nowhere", client)
        self._says = says

    async def info(self, *, timeout_s: float) -> ReplicaInfo:
        return await self._says()

    async def commit(self, body: CommitRequest, *, timeout_s: float) -> CommitReply:
        raise PushError("it ran out of memory")


async def takes_part() -> ReplicaInfo:
    return INFO


async def has_left() -> ReplicaInfo:
    return INFO.model_copy(update={"epoch": 0})


async def is_gone() -> ReplicaInfo:
    raise UnavailableError("it cannot be reached")


async def is_silent() -> ReplicaInfo:
    await asyncio.Event().wait()
    return INFO


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "LEAVE_S", LEAVE_S)


async def asked(**says: Says) -> dict[str, str]:
    async with httpx.AsyncClient() as client:
        members = {name: Member(Asked(name, client, answer), INFO) for name, answer in says.items()}
        return await who_left(members, COMMIT, patient_until=time.monotonic() + 100)


@pytest.mark.parametrize(
    ("says", "blamed"),
    [
        ({"one": takes_part, "two": takes_part}, {}),
        ({"one": takes_part, "two": has_left}, {"two": "it ran out of memory"}),
        ({"one": takes_part, "two": is_gone}, {"two": "it cannot be reached"}),
        ({"one": is_silent, "two": has_left}, {"two": "it ran out of memory"}),
        ({"one": is_silent, "two": is_silent, "three": is_gone}, {"three": "it cannot be reached"}),
        ({"one": takes_part, "two": is_silent}, {"two": "generator two at http://nowhere does not answer"}),
    ],
)
async def test_a_replica_that_left_is_blamed_and_otherwise_a_silent_replica(
    says: dict[str, Says], blamed: dict[str, str]
) -> None:
    assert await asked(**says) == blamed


async def test_several_that_stay_silent_are_all_to_blame() -> None:
    assert set(await asked(one=is_silent, two=is_silent, three=takes_part)) == {"one", "two"}


async def test_one_that_is_only_slow_is_not_blamed_along_with_the_one_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    are_waited_for_longer = asyncio.Event()

    async def wait_longer(tasks: dict[str, asyncio.Task[str | None]], *, patient_until: float) -> None:
        are_waited_for_longer.set()
        monkeypatch.setattr(blame, "LEAVE_S", 600.0)
        await until_one_is_silent(tasks, patient_until=patient_until)

    async def is_slow() -> ReplicaInfo:
        await are_waited_for_longer.wait()
        return INFO

    monkeypatch.setattr(blame, "until_one_is_silent", wait_longer)
    assert set(await asked(stopped=is_silent, slow=is_slow, quick=takes_part)) == {"stopped"}


async def test_no_replica_is_waited_for_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {name: asyncio.create_task(is_silent(), name=name) for name in ("one", "two")}
    monkeypatch.setattr(blame, "LEAVE_S", 600.0)
    await until_one_is_silent(tasks, patient_until=time.monotonic())
    assert not any(task.done() for task in tasks.values())
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
