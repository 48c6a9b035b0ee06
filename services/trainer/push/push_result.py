"""What became of one push."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from services.trainer.push.fleet import Requirements
from shared.control import CommitReply, Transport


@dataclass(frozen=True)
class PushResult:
    """What became of one push.

    Attributes:
        epoch: Communicator epoch it ended in.
        transport: What it went over.
        why_transport: A sentence on why that.
        members: Replicas that hold ``policy_version``: they confirmed it, or did before.
        failed: Replica to the reason why it does not hold ``policy_version``.
        total_s: All of it, repeated attempt included.
        standstill_s: How long decoding stood still, at the worst of the members; so are the next three.
        receive_s: From begin to the last byte.
        load_s: Of the standstill: putting the weights into the engine.
        probe_s: From decoding resumed to the probe compared.
        num_bytes: That travelled, once for all members together; for disk, that were written.
        is_confirmed: The last attempt had members, and all of them hold the version. Replicas that took no part in it
            do not count: refused, left out after the first, or gone from the run before they had loaded it.
        probe_max_diff: Largest difference of a logprob of the probe, in nats; None without a probe.
        num_probes_failed: Replicas that the probe has taken out.
    """

    policy_version: int
    epoch: int
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
        epoch: int,
        requirements: Requirements,
        total_s: float,
        num_bytes: int,
    ) -> Self:
        """Return what the replies of the last attempt, and the failures of all, come to.

        Args:
            replies: Of the members, but of those that were not asked.
            failed: Replica to the reason, of all attempts.
            holding: Members that held the version before.
            left_out: Of those that failed, the ones that were no members of the last attempt, or left the run in it.
            policy_version: See above; so are the others.
            epoch: See above.
            requirements: Of the last attempt.
            total_s: See above.
            num_bytes: See above.
        """
        all_replies = replies.values()
        members = tuple(replica_id for replica_id in (*holding, *replies) if replica_id not in failed)
        differences = [reply.probe_max_diff for reply in all_replies if reply.probe_max_diff is not None]
        return cls(
            policy_version=policy_version,
            epoch=epoch,
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
