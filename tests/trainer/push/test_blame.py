"""After a failed step, the replicas that caused it are left out. Replicas that only noticed it are not."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

import torch

from services.trainer.push import blame
from services.trainer.push.blame import AttemptError, until_one_is_silent
from services.trainer.push.communicator_epochs import CommunicatorEpochs
from services.trainer.push.membership import Abilities
from services.trainer.push.packing import Parcel, announce
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.replicas import Fleet, Member, Replica
from shared.control import BeginRequest, ReplicaInfo
from shared.errors import PushError, UnavailableError
from shared.weights.parameter_spec import total_bytes

pytestmark = pytest.mark.unit

Answer = Callable[[], Awaitable[ReplicaInfo]]

INFO = ReplicaInfo(
    replica_id="generator-1",
    run_id="run",
    model="tiny",
    transports=["gloo"],
    torch_version="2.13.0",
    nccl_version=None,
    num_workers=1,
    dtype="float32",
    epoch=1,
    policy_version=0,
    is_held=False,
)


class ScriptedReplica(Replica):
    """Gives a set answer to begin."""

    def __init__(self, name: str, client: httpx.AsyncClient, answer: Answer) -> None:
        super().__init__(name, "http://nowhere", client)
        self._answer = answer

    async def begin(self, body: BeginRequest, *, timeout_s: float) -> ReplicaInfo:
        return await self._answer()


async def well() -> ReplicaInfo:
    return INFO


async def silent() -> ReplicaInfo:
    await asyncio.Event().wait()
    return INFO


async def dies() -> ReplicaInfo:
    raise UnavailableError("it cannot be reached")


async def says_no() -> ReplicaInfo:
    raise PushError("out of memory")


async def lets_go_at_last() -> ReplicaInfo:
    await asyncio.sleep(0.05)
    raise PushError("the connection broke")


@pytest.mark.parametrize(
    ("answers", "blamed"),
    [
        ({"victim": dies, "innocent": silent}, {"victim"}),
        ({"victim": dies, "innocent": lets_go_at_last}, {"victim"}),
        ({"victim": silent, "innocent": says_no}, {"victim"}),
        ({"victim": says_no, "innocent": lets_go_at_last}, {"victim"}),
        ({"victim": says_no, "innocent": well}, {"victim"}),
        ({"victim": dies, "another": dies, "innocent": silent}, {"victim", "another"}),
    ],
)
async def test_only_the_replicas_that_caused_a_failure_are_blamed(
    answers: dict[str, Answer], blamed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "LEAVE_S", 0.2)
    assert await blamed_by_begin(answers) == blamed


async def test_a_slow_replica_is_not_blamed_along_with_a_silent_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    are_waited_for_longer = asyncio.Event()

    async def wait_longer(tasks: dict[str, asyncio.Task[Any]], *, patient_until: float) -> None:
        are_waited_for_longer.set()
        monkeypatch.setattr(blame, "LEAVE_S", 600.0)
        await until_one_is_silent(tasks, patient_until=patient_until)

    async def slow() -> ReplicaInfo:
        await are_waited_for_longer.wait()
        return INFO

    monkeypatch.setattr(blame, "LEAVE_S", 0.2)
    monkeypatch.setattr(blame, "until_one_is_silent", wait_longer)
    answers = {"victim": silent, "slow": slow, "innocent": says_no}
    assert await blamed_by_begin(answers, within_s=100.0) == {"victim"}


async def blamed_by_begin(answers: Mapping[str, Answer], *, within_s: float = 30.0) -> set[str]:
    named = [("norm", torch.zeros(3))]
    announced = announce(named)
    async with httpx.AsyncClient() as client:
        members = {name: Member(ScriptedReplica(name, client, answer), INFO) for name, answer in answers.items()}
        settings = PushSettings(run_id="run", incarnation=1, internal_key="", transport="disk", push_timeout_s=60.0)
        epochs = CommunicatorEpochs(settings, Abilities("2.13.0", None))
        epochs.enter(Fleet(ready=members, refused={}, transport="disk", why_transport=""))
        parcel = Parcel(1, announced, "full", lambda: named, total_bytes(announced))
        with pytest.raises(AttemptError) as raised:
            await epochs.begin(members, parcel, deadline=time.monotonic() + within_s)
    return set(raised.value.blamed)
