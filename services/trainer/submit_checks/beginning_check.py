"""Checks the checkpoint that a run is to begin from: it exists, is intact, and fits the run (beginning/)."""

from collections.abc import Awaitable, Callable

from services.trainer.beginning.fit import beginning_of
from services.trainer.beginning.source import FIELD, find_source, run_reference
from services.trainer.deadline_thread import in_thread
from services.trainer.problems import Problem
from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.checked import Checked
from shared.beginning import Beginning
from shared.errors import UserError
from shared.redis.run_record import RunRecord
from shared.run_options.run_config import RunConfig

FindRuns = Callable[[str], Awaitable[list[RunRecord]]]
"""Returns the runs that an id, a name, or the beginning of an id fits."""


async def check_beginning(
    config: RunConfig, *, find_runs: FindRuns | None, settings: TrainerSettings
) -> tuple[Beginning | None, Checked]:
    """Return the beginning of a run, None if it begins with its model or cannot begin, and the errors and notes."""
    said = config.resume_from_checkpoint
    if said is None:
        return None, Checked()
    reference = run_reference(said)
    runs = [] if reference is None or find_runs is None else await find_runs(reference)
    timeout_s = settings.dataset_check_timeout_s

    def find() -> tuple[Beginning, list[str]]:
        return beginning_of(config, find_source(said, runs=runs, roots=settings.places_of_data()))

    try:
        beginning, notes = await in_thread(find, timeout_s=timeout_s, name="check beginning")
    except UserError as error:
        return None, Checked(errors=list(error.problems) or [(error.field or FIELD, str(error))])
    except TimeoutError:
        detail = (
            f"Reading the checkpoint {said[:200]} took longer than {timeout_s:g} s. Submit again later, or raise "
            "HEADRACE_DATASET_CHECK_TIMEOUT_S."
        )
        return None, Checked(problem=Problem(503, "Checkpoint not checked", detail, headers={"Retry-After": "30"}))
    return beginning, Checked(warnings=notes)
