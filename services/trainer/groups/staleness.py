"""Decides how many groups may be in flight, and for which unfinished groups a batch must wait.

Staleness is counted in optimizer steps. Let S = max_staleness and P = groups_per_step, and let a batch be k P groups
that are trained in n steps (schedule.py). Weights are pushed, and groups are settled, at the end of a batch.

    versions   v          v+1   ...   v+n-1   |  v+n                a batch begun at v trains its last step at v+n-1
    group      sampled from s on ......................  may be trained up to version s + S

So a group whose oldest token was sampled by version s must be in a batch begun at version s + S - (n-1) or earlier.
This version is its deadline. Batches begin at v, v+n, v+2n, ...; hence a group with deadline D can still enter the next
batch and b(D) = floor((D-v) / n) batches after it. A batch settles k P groups, so a schedule that meets every deadline
exists if and only if, for each b >= 0,

    (unsettled groups that can wait for at most b more batches)  <=  k P (b + 1)                           (*)

Admission keeps at most W k P groups unsettled, where W = floor((S+1) / n). S >= n-1 makes W at least 1. A group that
begins now can wait for floor((S-n+1) / n) = W-1 more batches, so it cannot break (*). A batch of the k P groups with
the earliest deadlines preserves (*) for v+n. If early groups are not finished, a batch of other groups may break (*);
then the batch waits for the early groups. Hence no trained group is staler than S in any step of its batch, in whatever
order groups are completed. It would not be enough to wait only when an unfinished group would pass its own deadline: 2
k P groups with one deadline cannot be trained in one batch.

No group is admitted while a push is under way (training_loop.py). A group begins at the version whose push ended last
or at a newer one, so the window counts as above although the next batch is computed beside the push.

Where ``max_steps`` cuts the last batch short, admission counts the groups that the remaining steps will use, instead of
W batches. At most those groups are unsettled when the last batches begin, so (*) holds for them too. With n = k = 1,
all of this becomes: at most (S+1) P groups in flight.
"""

from collections.abc import Mapping

from services.trainer.groups.schedule import BatchShape


def window(*, num_steps_left: int, max_staleness: int, shape: BatchShape) -> int:
    """Return how many groups may be unsettled at a time: the groups of W batches, or of the rest of the run.

    Admission may keep fewer (admission_depth.py), but not fewer than the next batch.

    Args:
        num_steps_left: Remaining optimizer steps. Groups that no step will use are not sampled.
        max_staleness: Bound on staleness, in optimizer steps.
        shape: Shape of the batches.
    """
    batches_ahead = (max_staleness + 1) // shape.steps
    return shape.groups(num_steps=min(batches_ahead * shape.steps, num_steps_left))


def staleness(*, policy_version: int, oldest_policy_version: int) -> int:
    """Return the staleness of a group in optimizer steps.

    A trainer that resumed from a checkpoint receives groups sampled by versions that it lost. They are trained, and
    their staleness is computed from the version numbers. The lost steps are repeated with the same groups in the same
    order. If the results are bit-identical, as on one machine, a version number stands for the same weights as before.
    Otherwise, the groups' logprobs still belong to the weights that sampled them, which is all that the importance
    correction needs. Dropping these groups would also waste the generators' work. Versions newer than the trainer's
    count as fresh.
    """
    return max(0, policy_version - oldest_policy_version)


def is_too_stale(*, oldest_policy_version: int, policy_version: int, max_staleness: int, shape: BatchShape) -> bool:
    """Return whether a group would exceed the bound in the last step of a batch that begins at ``policy_version``."""
    return staleness(policy_version=policy_version, oldest_policy_version=oldest_policy_version) > max_staleness - (
        shape.steps - 1
    )


def stragglers(
    *,
    left_out: Mapping[int, int],
    unfinished: Mapping[int, int],
    policy_version: int,
    max_staleness: int,
    shape: BatchShape,
) -> list[int]:
    """Return the numbers of the unfinished groups to wait for, ascending; empty if the batch may be trained.

    Args:
        left_out: Scored groups that are not in the batch: number -> version of the oldest token.
        unfinished: Groups being sampled or scored: number -> version at which sampling began.
        policy_version: The version the batch begins at.
        max_staleness: Bound on staleness, in optimizer steps.
        shape: Shape of the batches.
    """

    def batches_after_this(version: int) -> int:
        return (version + max_staleness - (shape.steps - 1) - policy_version) // shape.steps

    groups_per_batch = shape.groups(num_steps=shape.steps)
    waits = sorted(batches_after_this(version) for version in (*left_out.values(), *unfinished.values()))
    late = [wait for num_before, wait in enumerate(waits, start=1) if num_before > groups_per_batch * wait]
    if not late:
        return []
    return sorted(number for number, version in unfinished.items() if batches_after_this(version) <= late[-1])
