"""The demo's reward: 1 for the exact answer, 0 for anything else.

It has TRL's signature, so this file also works unchanged with TRL. A nearly right answer gets nothing: whether a
completion is right can be checked, but how close it is would be an opinion.
"""


def exact_answer(completions: list[str], answer: list[str], **_columns: object) -> list[float]:
    """Compare each completion, with special tokens removed, to the `answer` in its row."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]
