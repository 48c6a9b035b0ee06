"""The result of one push."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from services.trainer.push.membership import Requirements
from shared.control import CommitReply, Transport


@dataclass(frozen=True)
class PushResult:
    """The result of one push.

    Attributes:
        communicator_epoch: Epoch of the last attempt's communicator.
        transport: Transport of the last attempt.
        why_transport: A sentence on why this transport was chosen.
        members: Replicas that hold ``policy_version``: they confirmed it in this push, or held it before.
        failed: Replica to the reason why it does not hold ``policy_version``.
        total_s: Duration of the whole push, including a second attempt.
        standstill_s: How long decoding stood still, in seconds. This and the next three are maxima over the members.
        receive_s: Time from begin to the last byte.
        load_s: The part of the standstill that loads the weights into the engine.
        probe_s: Time from decoding resumed to the probe compared.
        num_bytes: Bytes sent, counted once for all members together; for disk, bytes written.
        is_confirmed: The last attempt had members, and all of them hold the version. Replicas outside it do not count:
            they were refused, left out after the first attempt, or left the run before they had loaded the version.
        probe_max_diff: Largest difference of a logprob of the probe, in nats; None without a probe.
        num_probes_failed: Number of replicas that failed the probe.
    """

    policy_version: int
    communicator_epoch: int
    transport: Transport
    why_transport: str
    members: tuple[str, ...]
    failed: dict[str, str]
    total_s: float
    standstill_s: float
    receive_s: float
    load_s: float
    probe_s: float
    num_bytes: int
    is_confirmed: bool
    probe_max_diff: float | None
    num_probes_failed: int

    @classmethod
    def of(
        cls,
        replies: Mapping[str, CommitReply],
        failed: Mapping[str, str],
        *,
        holding: Collection[str],
        left_out: Collection[str] = (),
        policy_version: int,
        communicator_epoch: int,
        requirements: Requirements,
        total_s: float,
        num_bytes: int,
    ) -> Self:
        """Build the result from the replies of the last attempt and the failures of all attempts.

        Args:
            replies: Replies of the members that were asked to commit.
            failed: Replica to the reason, over all attempts.
            holding: Members that held the version before.
            left_out: Failed replicas that were not members of the last attempt, or left the run during it.
            policy_version: The version that was pushed.
            communicator_epoch: See the class.
            requirements: Requirements of the last attempt.
            total_s: See the class.
            num_bytes: See the class.
        """
        all_replies = replies.values()
        members = tuple(replica_id for replica_id in (*holding, *replies) if replica_id not in failed)
        differences = [reply.probe_max_diff for reply in all_replies if reply.probe_max_diff is not None]
        return cls(
            policy_version=policy_version,
            communicator_epoch=communicator_epoch,
            transport=requirements.transport,
            why_transport=requirements.why_transport,
            members=members,
            failed=dict(failed),
            total_s=total_s,
            standstill_s=max((reply.standstill_s for reply in all_replies), default=0.0),
            receive_s=max((reply.receive_s for reply in all_replies), default=0.0),
            load_s=max((reply.load_s for reply in all_replies), default=0.0),
            probe_s=max((reply.probe_s for reply in all_replies), default=0.0),
            num_bytes=num_bytes,
            is_confirmed=bool(members) and set(failed) <= set(left_out),
            probe_max_diff=max(differences, default=None),
            num_probes_failed=sum(not reply.is_verified for reply in all_replies),
        )
