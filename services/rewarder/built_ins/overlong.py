"""Punishes completions that are close to the length limit (DAPO, arXiv 2503.14476, equation 13)."""

from services.rewarder.reward_call import CallError

SOFT_PUNISH_SHARE = 5
"""The default punishes within the last fifth of the tokens, as DAPO does: the last 4,096 of 20,480."""


def soft_overlong_punishment_reward(
    completion_ids: list[list[int]],
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
    **_columns: object,
) -> list[float]:
    """Score each completion: 0 for a short completion, falling to -1 at ``max_completion_length`` tokens.

    The fall is linear over the last ``soft_punish_cache`` tokens, by default a fifth of ``max_completion_length``.
    """
    if max_completion_length is None:
        raise CallError("needs 'max_completion_length', which only a run sets by itself: send it in the request")
    cache = max(1, max_completion_length // SOFT_PUNISH_SHARE) if soft_punish_cache is None else soft_punish_cache
    if cache > max_completion_length:
        raise CallError(
            f"soft_punish_cache={cache} is longer than max_completion_length={max_completion_length}; make it shorter"
        )
    free = max_completion_length - cache
    return [
        0.0 if len(ids) <= free else -1.0 if len(ids) > max_completion_length else (free - len(ids)) / cache
        for ids in completion_ids
    ]
