"""Checks of a scored group that depend on the run; shared/message_invariants.py has the general ones. Pure.

Looking up a token id outside the model's vocabulary ends the process, on a GPU without an error message.
"""

from shared.arrays import unpack_ids
from shared.errors import MessageError
from shared.messages import ScoredGroup


def require_trainable(group: ScoredGroup, *, vocab_size: int, total_steps: int) -> None:
    """Raise MessageError if the run can never train the group.

    Args:
        group: The decoded group.
        vocab_size: Size of the model's vocabulary; token ids must be smaller.
        total_steps: Number of optimizer steps of the run; policy versions must not exceed it.
    """
    for rollout in group.rollouts:
        largest = int(unpack_ids(rollout.token_ids).max())
        if largest >= vocab_size:
            raise MessageError(
                f"rollout {rollout.rollout_id} has token id {largest}, outside the model's vocabulary of {vocab_size} "
                "tokens"
            )
        newest = max(span.policy_version for span in rollout.version_spans)
        if newest > total_steps:
            raise MessageError(
                f"rollout {rollout.rollout_id} was sampled by policy version {newest} of a run of {total_steps} steps"
            )
