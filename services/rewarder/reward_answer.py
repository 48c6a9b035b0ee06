"""The answer to a call of a reward function, and the description of a function, for every kind of reward function."""

from typing import Literal

import msgspec

from services.rewarder.reward_call import Verdict
from shared.user_code.module_sources import Sources
from shared.user_code.worker_frames import TaskAnswer

Kind = Literal["built-in", "sync", "async", "endpoint", "reward-model"]


class Answer(TaskAnswer, frozen=True, tag=True):
    """The answer to one call: one verdict (an outcome, and a value if scored) per completion.

    ``trace`` is the stack trace for the log if the function raised, and ``origin`` the type and place of the exception.
    ``version`` is the version of the function, endpoint or model.
    """

    verdicts: list[Verdict]
    trace: str = ""
    version: str = ""
    origin: str = ""


class Inspected(msgspec.Struct, frozen=True, tag=True):
    """The description of a reward function. The dataset needs one column from each inner list of ``required_columns``.

    ``sources`` is the version of a Python function's module, with the content of its files.
    """

    kind: Kind
    summary: str = ""
    required_columns: list[list[str]] = []
    sources: Sources | None = None
    version: str = ""
