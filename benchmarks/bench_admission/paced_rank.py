"""A training rank with optimizer steps of at least ``BENCH_STEP_S`` seconds, which wait like those of a larger model.

So the speed of the trainer is known, and hardly depends on other work of the machine.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from services.trainer import rank
from services.trainer.loop.batch_trainer import BatchTrainer, PlannedStep, TrainedStep


def environment(step_s: float) -> dict[str, str]:
    """Return the variables with which a trainer service starts this rank instead of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_admission.paced_rank"]
    repository = Path(__file__).resolve().parents[2]
    return {"HEADRACE_RANK_COMMAND": json.dumps(command), "BENCH_STEP_S": str(step_s), "PYTHONPATH": str(repository)}


def main() -> int:
    """Run the rank."""
    step, step_s = BatchTrainer.step, float(os.environ["BENCH_STEP_S"])

    async def paced_step(self: BatchTrainer, planned: PlannedStep) -> TrainedStep | None:
        began_at = time.monotonic()
        trained = await step(self, planned)
        await asyncio.sleep(max(0.0, began_at + step_s - time.monotonic()))
        return trained

    BatchTrainer.step = paced_step  # type: ignore[method-assign]
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
