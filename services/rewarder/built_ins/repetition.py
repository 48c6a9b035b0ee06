"""Punishes repeated n-grams ("Demystifying Long Chain-of-Thought Reasoning", arXiv 2502.03373, appendix C.2).

    reward = (1 - distinct n-grams / n-grams) * max_penalty

The n-grams are of token ids, as in TRL, or of lower-case words, as in open-r1.
"""

from collections.abc import Hashable, Sequence

from services.rewarder.reward_call import CallError, text_of
from shared.messages import Completion


def repetition_penalty_reward(
    completions: list[Completion],
    completion_ids: list[list[int]] | None = None,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    unit: str = "tokens",
    **_columns: object,
) -> list[float]:
    """Score each completion: 0 without repetition, down to ``max_penalty`` by its share of repeated n-grams.

    A completion that is shorter than an n-gram gets 0.
    """
    sequences: Sequence[Sequence[Hashable]]
    if unit == "words":
        sequences = [text_of(completion).lower().split() for completion in completions]
    elif completion_ids is None:
        raise CallError(
            "needs 'completion_ids', which only a run sets by itself: send it in the request, one list of token ids "
            "for each completion, or count words with reward_kwargs: unit: words"
        )
    else:
        sequences = completion_ids
    return [_share_repeated(sequence, ngram_size) * max_penalty or 0.0 for sequence in sequences]


def _share_repeated(sequence: Sequence[Hashable], size: int) -> float:
    num_ngrams = len(sequence) - size + 1
    if num_ngrams < 1:
        return 0.0
    distinct = {tuple(sequence[start : start + size]) for start in range(num_ngrams)}
    return 1.0 - len(distinct) / num_ngrams
