"""What a run knows of a scored group besides what every message satisfies (shared/message_invariants.py). Pure.

Token ids that the model has no embedding for end the process that looks them up, on a GPU without a word.
"""

from shared.arrays import unpack_ids
from shared.errors import MessageError
from shared.messages import ScoredGroup


def require_trainable(group: ScoredGroup, *, vocab_size: int, total_steps: int) -> None:
    """Raise MessageError if the run can never train the group.

    Args:
        group: As it was decoded.
        vocab_size: Token ids of the model are below it.
        total_steps: Policy versions of the run are at most this.
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
