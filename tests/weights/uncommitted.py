"""A push that never comes to its commit."""

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import httpx

from services.trainer.push.communicator_epochs import CommunicatorEpochs
from services.trainer.push.packing import Parcel, Weights, announce
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.replicas import Fleet, Member, Replica
from services.trainer.push.transports import own_abilities
from shared.control import AbortRequest, ReplicaInfo
from shared.lineage import incarnation_of
from shared.weights.parameter_spec import total_bytes
from tests.weights.replica import HEADERS, RUN_ID
from tests.weights.served_receiver import ServedReceiver


@dataclass(frozen=True)
class Attempt:
    """A push to one replica, over gloo, in an epoch that is newer than the replica's."""

    epochs: CommunicatorEpochs
    members: dict[str, Member]
    deadline: float

    @property
    def communicator_epoch(self) -> int:
        return self.epochs.current

    async def join(self) -> None:
        await self.epochs.join(self.members, weight_dir=None, deadline=self.deadline)

    async def begin(self, parcel: Parcel) -> None:
        await self.epochs.begin(self.members, parcel, deadline=self.deadline)

    async def broadcast(self, parcel: Parcel) -> None:
        await self.epochs.broadcast(self.members, parcel, deadline=self.deadline)


@contextlib.asynccontextmanager
async def attempt_on(served: ServedReceiver) -> AsyncGenerator[Attempt]:
    """Return an attempt in an epoch that the replica has not joined."""
    info = served.receiver.info()
    async with httpx.AsyncClient(headers=HEADERS, trust_env=False) as client:
        members = {served.replica_id: Member(Replica(served.replica_id, served.url, client), info)}
        epochs = epochs_of(incarnation_of(info.epoch) + 1, members, buffer_bytes=32)
        yield Attempt(epochs, members, time.monotonic() + 600.0)
    epochs.close()


def epochs_of(incarnation: int, members: dict[str, Member], *, buffer_bytes: int) -> CommunicatorEpochs:
    """Return an open communicator that the members have not joined."""
    settings = PushSettings(
        run_id=RUN_ID,
        incarnation=incarnation,
        internal_key="",
        transport="gloo",
        push_timeout_s=60.0,
        buffer_bytes=buffer_bytes,
    )
    epochs = CommunicatorEpochs(settings, own_abilities())
    assert epochs.enter(Fleet(ready=members, refused={}, transport="gloo", why_transport="")) == members
    return epochs


async def begin(attempt: Attempt, weights: Weights) -> Parcel:
    """Make the replica join and wait for version 1."""
    announced = announce(weights())
    parcel = Parcel(1, announced, "full", weights, total_bytes(announced))
    await attempt.join()
    await attempt.begin(parcel)
    return parcel


async def abort(attempt: Attempt) -> ReplicaInfo:
    """Abort instead of committing, and return the replica's description of itself."""
    (member,) = attempt.members.values()
    body = AbortRequest(run_id=RUN_ID, epoch=attempt.communicator_epoch, reason="the trainer gave up")
    return await member.replica.abort(body, timeout_s=5.0)
