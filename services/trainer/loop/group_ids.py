"""Names prompt groups: those of training by admission number, those of evaluations so that none passes for another.

    00000042                        the 42nd training group: the same dataset position always has the same id
    eval-0003-00000010-00000007     prompt 7 of the evaluation begun at step 10 by the trainer's incarnation 3

An evaluation that a crash cut off is repeated under new ids, so what is left of the old one is nobody's.
"""

_EVALUATION = "eval-"
_MAX_DIGITS = 18


def group_id(number: int) -> str:
    """Return the id of the ``number``-th admitted training group."""
    return f"{number:08d}"


def training_number(label: str) -> int | None:
    """Return the admission number of a training group's id, or None if it is no such id, in just this form."""
    if not (label.isdecimal() and label.isascii() and len(label) <= _MAX_DIGITS):
        return None
    number = int(label)
    return number if label == group_id(number) else None


def evaluation_id(*, epoch: int, step: int, index: int) -> str:
    """Return the id of one prompt of one evaluation."""
    return f"{_EVALUATION}{epoch:04d}-{step:08d}-{index:08d}"


def is_evaluation(label: str) -> bool:
    """Whether this is the id of an evaluation group, of whatever evaluation."""
    return label.startswith(_EVALUATION)
