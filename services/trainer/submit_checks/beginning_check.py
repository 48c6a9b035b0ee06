"""Checks that the checkpoint, weights or adapter from which a run is to begin are intact and fit (beginning/)."""

from collections.abc import Awaitable, Callable

from services.trainer.beginning.fit import beginning_of
from services.trainer.beginning.source import FIELD, find_source, run_reference
from services.trainer.problems import Problem
from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.checked import Checked, checked_in_thread
from shared.redis.run_record import RunRecord
from shared.run_options.run_config import RunConfig

FindRuns = Callable[[str], Awaitable[list[RunRecord]]]
"""Returns the runs that an id, a name, or the beginning of an id fits."""


async def check_beginning(config: RunConfig, *, find_runs: FindRuns | None, settings: TrainerSettings) -> Checked:
    """Find and check the files that ``resume_from_checkpoint`` names; return an empty result if it is not set."""
    said = config.resume_from_checkpoint
    if said is None:
        return Checked()
    reference = run_reference(said)
    runs = [] if reference is None or find_runs is None else await find_runs(reference)
    timeout_s = settings.dataset_check_timeout_s

    def find() -> Checked:
        source = find_source(said, runs=runs, roots=settings.places_of_data())
        beginning, notes = beginning_of(config, source)
        return Checked(warnings=notes, beginning=beginning)

    detail = (
        f"Reading the checkpoint {said[:200]} took longer than {timeout_s:g} s. Submit again later, or raise "
        "HEADRACE_DATASET_CHECK_TIMEOUT_S."
    )
    too_slow = Checked(problem=Problem(503, "Checkpoint not checked", detail, headers={"Retry-After": "30"}))
    return await checked_in_thread(FIELD, find, timeout_s=timeout_s, too_slow=too_slow)
