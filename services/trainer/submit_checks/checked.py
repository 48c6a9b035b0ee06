"""The result type of the checks of a submitted run, and a function that runs a blocking check in a thread."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.trainer.problems import Problem
from services.trainer.submit_checks.reward_check import RewardNeeds
from shared.beginning import Beginning
from shared.errors import UnavailableError, UserError
from shared.files.file_roots import why_unreadable
from shared.service.daemon_thread import in_thread


@dataclass(frozen=True)
class Checked:
    """The result of one check of a submitted run.

    Args:
        errors: Setting and sentence for each error.
        warnings: Sentences about possible surprises.
        problem: Why the check could not be made, if the run is not at fault; else None.
        derived: Quantities that follow from the settings, such as the number of steps.
        needs: Data set columns that reward functions need.
        beginning: The checkpoint, weights or adapter that the run begins from, if this check found it; else None.
    """

    errors: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[str] = field(default_factory=list[str])
    problem: Problem | UnavailableError | None = None
    derived: dict[str, Any] = field(default_factory=dict[str, Any])
    needs: list[RewardNeeds] = field(default_factory=list[RewardNeeds])
    beginning: Beginning | None = None


async def checked_in_thread(
    setting: str,
    check: Callable[[], Checked],
    *,
    timeout_s: float,
    too_slow: Checked,
    places: asyncio.Semaphore | None = None,
) -> Checked:
    """Run a check that blocks on disks and networks, in a thread with a deadline. Errors become part of the result.

    Args:
        setting: The setting that is checked.
        check: Makes the check.
        timeout_s: The longest time it may take.
        too_slow: The result if it takes longer.
        places: Limits how many such checks are made at a time; None for no limit.
    """
    try:
        return await in_thread(check, timeout_s=timeout_s, name=f"check {setting}", places=places)
    except TimeoutError:  # is an OSError
        return too_slow
    except (UserError, OSError) as error:
        return Checked(errors=mistakes(error, setting=setting))
    except UnavailableError as error:
        return Checked(problem=error)


def mistakes(error: UserError | OSError, *, setting: str) -> list[tuple[str, str]]:
    """Return (setting, message) for each mistake that an error reports. ``setting`` is used if the error names none."""
    if isinstance(error, UserError):
        return list(error.problems) or [(error.field or setting, str(error))]
    return [(setting, why_unreadable(error))]
