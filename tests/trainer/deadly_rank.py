"""A training rank that ends when a certain token is in a pass.

``DEADLY`` says how: ``kill`` as the kernel kills a process that uses too much memory, ``raise`` as an unexpected
exception in a library does.
"""

import os
import signal
import sys
from typing import Any

from services.trainer import rank
from services.trainer.policy import rank_passes
from services.trainer.policy.row_pass import row_pass

DEADLY_TOKEN = 60


def main() -> int:
    """Run the rank."""

    def deadly_pass(module: Any, rows: Any, row_indices: tuple[int, ...], **options: Any) -> Any:
        if any(DEADLY_TOKEN in rows[index].token_ids for index in row_indices):
            if os.environ["DEADLY"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("CUDA error: device-side assert triggered")
        return row_pass(module, rows, row_indices, **options)

    passes: Any = rank_passes
    passes.row_pass = deadly_pass
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
