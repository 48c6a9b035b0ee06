"""The demo's reward: 1 for the exact answer, 0 for anything else.

TRL's signature, so that this file would train unchanged under TRL too. Nothing is given for being close: whether
a completion is right can be checked, how nearly right it is would be an opinion.
"""


def exact_answer(completions: list[str], answer: list[str], **_columns: object) -> list[float]:
    """Score each completion, special tokens removed, against its row's `answer`."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]
