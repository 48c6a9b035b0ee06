"""A push that never comes to its commit."""

import contextlib
import time
from collections.abc import AsyncGenerator

import httpx

from services.trainer.push.communicator_epochs import open_communicator, own_abilities
from services.trainer.push.membership import Requirements
from services.trainer.push.packing import Parcel, Weights, announce
from services.trainer.push.push_attempt import PushAttempt
from services.trainer.push.replicas import Member, Replica
from shared.control import AbortRequest, ReplicaInfo
from tests.weights.replica import HEADERS, RUN_ID
from tests.weights.served_receiver import ServedReceiver


@contextlib.asynccontextmanager
async def attempt_on(served: ServedReceiver) -> AsyncGenerator[PushAttempt]:
    """Return an attempt in the epoch after the replica's, which the replica has not joined."""
    own, info = own_abilities(), served.receiver.info()
    communicator = open_communicator("gloo", address="127.0.0.1", buffer_bytes=32)
    async with httpx.AsyncClient(headers=HEADERS, trust_env=False) as client:
        yield PushAttempt(
            requirements=Requirements(RUN_ID, "gloo", own.torch_version, own.nccl_version),
            communicator_epoch=info.epoch + 1,
            communicator=communicator,
            members={served.replica_id: Member(Replica(served.replica_id, served.url, client), info)},
            buffer_bytes=32,
            deadline=time.monotonic() + 600.0,
        )
    communicator.close()


async def begin(attempt: PushAttempt, weights: Weights) -> Parcel:
    """Make the replica join and wait for version 1."""
    announced = announce(weights())
    parcel = Parcel(1, announced, "full", weights, announced.num_bytes)
    await attempt.join(address="127.0.0.1", weight_dir=None)
    await attempt.begin(parcel)
    return parcel


async def abort(attempt: PushAttempt) -> ReplicaInfo:
    """Abort instead of committing, and return the replica's description of itself."""
    (member,) = attempt.members.values()
    body = AbortRequest(run_id=RUN_ID, epoch=attempt.communicator_epoch, reason="the trainer gave up")
    return await member.replica.abort(body, timeout_s=5.0)
