"""Reads gold answers from the column ``solution``, or from ``answer`` where ``solution`` is null or missing."""

from services.rewarder.reward_call import CallError, Verdict

GSM8K_MARK = "####"
"""The mark before the answer in GSM8K: ``24 + 24 = 48 #### 48``."""
MISSING = Verdict("not_applicable", None, "the row has no gold answer")


def gold_answers(solution: list[object] | None, answer: list[object] | None) -> list[object]:
    """Return one gold answer per completion, None where the row does not have one.

    In a mixture of data sets with different column names, the columns that a row does not have are null.

    Raises:
        CallError: Both columns are missing.
    """
    if solution is None and answer is None:
        raise CallError("needs the gold answers in a column 'solution' or 'answer', but there is neither column")
    if solution is None or answer is None:
        return (solution if solution is not None else answer) or []
    return [left if left is not None else right for left, right in zip(solution, answer, strict=True)]
