"""Builds and parses the ids of prompt groups. An evaluation group never has the id of a training group.

    00000042                        training group 42: the same dataset position always has the same id
    eval-0003-00000010-00000007     prompt 7 of the evaluation begun at step 10 by the trainer's incarnation 3

An evaluation that a crash interrupted is repeated under new ids, so groups left over from it are ignored.
"""

_EVALUATION = "eval-"
_MAX_DIGITS = 18


def group_id(number: int) -> str:
    """Return the id of the training group with this admission number."""
    return f"{number:08d}"


def training_number(label: str) -> int | None:
    """Return the admission number in a training group's id; None if the label is not exactly such an id."""
    if not (label.isdecimal() and label.isascii() and len(label) <= _MAX_DIGITS):
        return None
    number = int(label)
    return number if label == group_id(number) else None


def evaluation_id(*, incarnation: int, step: int, index: int) -> str:
    """Return the id of the prompt group for one prompt of one evaluation."""
    return f"{_EVALUATION}{incarnation:04d}-{step:08d}-{index:08d}"


def is_evaluation(label: str) -> bool:
    """Return whether an id begins like the ids of evaluation groups."""
    return label.startswith(_EVALUATION)
