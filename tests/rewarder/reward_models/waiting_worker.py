"""A reward model's process in which each forward pass waits for a file: ``pass-1`` for the first one, and so on.

Each pass also writes a file when it begins: ``began-1``, and so on.
"""

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.rewarder.reward_models import model_worker
from services.rewarder.reward_models.classifier import Classifier, Encoding

_numbers = itertools.count(1)
_forward = Classifier._forward  # pyright: ignore[reportPrivateUsage]


def _wait_and_forward(self: Classifier, encodings: Sequence[Encoding]) -> list[float]:
    directory, number = Path(os.environ["PASSES_WAIT_IN"]), next(_numbers)
    (directory / f"began-{number}").touch()
    while not (directory / f"pass-{number}").exists():
        time.sleep(0.005)
    return _forward(self, encodings)


if __name__ == "__main__":
    Classifier._forward = _wait_and_forward  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    sys.exit(model_worker.main())
