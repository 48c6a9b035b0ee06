"""The process of a reward model of which each forward pass waits for a file: the first for ``pass-1``, and so on.

Each says that it began with a file, too: ``began-1``.
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
