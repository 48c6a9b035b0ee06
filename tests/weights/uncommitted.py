"""A push that ends right before its commit."""

import time

import httpx

from services.trainer.push.communicator import open_communicator, own_versions
from services.trainer.push.fleet import Requirements
from services.trainer.push.packing import Weights, announce
from services.trainer.push.push_attempt import PushAttempt
from services.trainer.push.replicas import Member, Replica
from shared.control import AbortRequest, ReplicaInfo
from tests.weights.replica import HEADERS, RUN_ID
from tests.weights.served_receiver import ServedReceiver


async def push_and_abort(served: ServedReceiver, weights: Weights) -> ReplicaInfo:
    """Bring all weights of version 1 to a replica, then abort instead of committing; return what it says afterwards."""
    communicator = open_communicator("gloo", address="127.0.0.1")
    async with httpx.AsyncClient(headers=HEADERS, trust_env=False) as client:
        replica = Replica(served.replica_id, served.url, client)
        attempt = PushAttempt(
            requirements=Requirements(RUN_ID, "gloo", *own_versions()),
            epoch=1,
            communicator=communicator,
            members={served.replica_id: Member(replica, served.receiver.info())},
            buffer_bytes=32,
            deadline=time.monotonic() + 5.0,
        )
        announced = announce(weights())
        await attempt.join(address="127.0.0.1")
        await attempt.begin(announced, policy_version=1)
        await attempt.broadcast(weights, announced, policy_version=1)
        info = await replica.abort(AbortRequest(run_id=RUN_ID, epoch=1, reason="the trainer gave up"), timeout_s=5.0)
    communicator.close()
    return info
