"""Decides how many groups may be in flight, and for which unfinished groups a step must wait.

Let S = max_staleness, P = groups_per_step, v the policy version trained on now. A group whose oldest token was sampled
by version s must be trained at a version up to s + S: that is its deadline. A step settles P groups, so a schedule that
meets every deadline exists exactly if, for each D >= v,

    (unsettled groups with deadline <= D)  <=  P (D - v + 1)                                              (*)

Admission keeps at most (S + 1) P groups unsettled, so a group that begins now, with deadline v + S, cannot break (*). A
step on the P groups with the earliest deadlines keeps (*) for v + 1. A step on other groups, because the early ones are
not finished, may break it: then the step waits for them. Hence no trained group is staler than S, whatever the order
of completion. Waiting only when an unfinished group would pass its own deadline is not enough: 2P groups with one
deadline cannot be trained in one step.
"""

from collections.abc import Mapping


def num_admissible(
    *,
    num_in_flight: int,
    num_steps_left: int,
    max_staleness: int,
    groups_per_step: int,
) -> int:
    """Return how many more groups may be admitted now.

    Args:
        num_in_flight: Groups admitted and neither trained nor dropped.
        num_steps_left: Optimizer steps still to be made; nothing is sampled that no step will use.
        max_staleness: In optimizer steps.
        groups_per_step: Groups an optimizer step.
    """
    window = min(max_staleness + 1, num_steps_left) * groups_per_step
    return max(0, window - num_in_flight)


def staleness(*, policy_version: int, oldest_policy_version: int) -> int:
    """Return the staleness of a group in optimizer steps.

    A trainer that resumed from a checkpoint may meet groups sampled by versions it lost; they count as fresh, and the
    importance correction, which has their true logprobs, deals with the difference.
    """
    return max(0, policy_version - oldest_policy_version)


def stragglers(
    *,
    left_out: Mapping[int, int],
    unfinished: Mapping[int, int],
    policy_version: int,
    max_staleness: int,
    groups_per_step: int,
) -> list[int]:
    """Return the unfinished groups that must be waited for, or none if the step may be made.

    Args:
        left_out: Scored groups that are not in the step: number -> version of the oldest token.
        unfinished: Groups being sampled or scored: number -> version at which sampling began.
        policy_version: The version trained on now; the step makes the next one.
        max_staleness: In optimizer steps.
        groups_per_step: Groups an optimizer step.
    """
    deadlines = sorted(version + max_staleness for version in (*left_out.values(), *unfinished.values()))
    late = [
        deadline
        for num_before, deadline in enumerate(deadlines, start=1)
        if num_before > groups_per_step * (deadline - policy_version)
    ]
    if not late:
        return []
    return sorted(number for number, version in unfinished.items() if version + max_staleness <= late[-1])
