"""A training rank that is killed, as the kernel kills a process, at the moment that ``KILLED`` names.

``judged STEP``: once the evaluation of that step is in the log. ``exporting``: before the final model is written.
"""

import os
import signal
import sys
from typing import Any

from services.trainer import rank
from services.trainer.export import final_model
from services.trainer.loop.reporting import Reporting


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run the rank."""
    moment, _, step = os.environ["KILLED"].partition(" ")
    log_evaluation = Reporting.evaluation

    async def evaluation(self: Reporting, result: Any) -> None:
        await log_evaluation(self, result)
        if moment == "judged" and result.step == int(step):
            die()

    async def leave_model(*_: Any, **__: Any) -> None:
        die()

    reporting: Any = Reporting
    reporting.evaluation = evaluation
    if moment == "exporting":
        exporter: Any = final_model
        exporter.leave_model = leave_model
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
