"""Pauses a run when a user asks for it or when its rewards fail, and resumes it.

    running --a user asks for it--> paused by user --a user asks to resume--> running
    running --too many failures--> paused by rewards --a user asks to resume, or a test group is scored--> running

    paused by     admits                    begins batches           begins evaluations    sends prompts of a begun one
    user          nothing                   no                       no                    no
    rewards       one group now and then    complete ones            no                    yes

Requests take precedence over automatic changes. If a user asks to pause a run that its rewards have paused, it becomes
paused by the user, and a test group does not end the pause. Groups that are under way are still sampled and scored, and
wait on the scored stream. The pause is stored in the run's record (shared/pause.py), where a restarted
trainer finds it.
"""

import dataclasses
import logging
import time

import msgspec

from services.trainer.intake.reward_failures import RewardFailures
from services.trainer.telemetry.run_log import RunLog
from shared.pause import Pause, PausedBy, Wishes
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore

log = logging.getLogger(__name__)


class RunPause:
    """Pauses and resumes one run, and stores the pause in Redis.

    Args:
        store: Stores the pause.
        run_log: Reports changes to watchers.
        record: The run's record, as this trainer found it.
        failures: Recent failures of the reward functions.
    """

    def __init__(self, store: RunStore, *, run_log: RunLog, record: RunRecord, failures: RewardFailures) -> None:
        self._store = store
        self._log = run_log
        self._run_id = record.run_id
        self._failures = failures
        self._pause = record.pause
        self._paused_s = record.progress.paused_s

    @property
    def by(self) -> PausedBy | None:
        """Who or what paused the run; None if it is not paused."""
        return None if self._pause is None else self._pause.by

    def total_s(self) -> float:
        """Return how long the run has been paused so far, over all of its trainers, in seconds."""
        return self._paused_s if self._pause is None else self._pause.total_s(time.time())

    async def begin_or_end(self, wishes: Wishes) -> None:
        """Pause or resume the run, as requested or as its rewards require.

        Raises:
            FencedError: A newer incarnation owns the run.
        """
        if self._pause is not None and (why := self._why_over(self._pause, wishes)):
            await self._go_on(self._pause, why)
        if wishes.desired == "pause" and self.by != "user":
            await self._begin(Pause("user", "a user asked for it", time.time(), num_resumes=wishes.num_resumes))
        elif self._pause is None and (verdict := self._failures.verdict()) is not None:
            found = dataclasses.asdict(verdict)
            await self._begin(Pause("rewards", since_s=time.time(), num_resumes=wishes.num_resumes, **found))

    async def end(self, why: str) -> None:
        """End the pause, if there is one.

        Raises:
            FencedError: A newer incarnation owns the run.
        """
        if self._pause is not None:
            await self._go_on(self._pause, why)

    async def write_again(self) -> None:
        """Write the pause, or that the run is not paused, in case Redis has lost it.

        Raises:
            FencedError: A newer incarnation owns the run.
        """
        await self._store.write_pause(self._run_id, self._pause)

    def waiting_for(self, batch_waits_for: str, *, test_group_every_s: float) -> str:
        """Return what the run waits for, to follow "waiting for" in its status; in a pause, also how the pause ends."""
        if self._pause is None:
            return batch_waits_for
        if self._pause.by == "user":
            return "a user to resume it"
        name = self._pause.reward_func
        said = self._failures.last_failure() or self._pause.last_failure
        last_failure = f" (last failure: {said})" if said and said not in batch_waits_for else ""
        return (
            f"{f'reward function {name} to work again' if name else 'a group to be scored'}; one group every "
            f"{test_group_every_s:.0f} s tests it{last_failure}. {how_to_mend(name)} Or resume or stop the run. "
            f"Meanwhile {batch_waits_for}"
        )

    def _why_over(self, pause: Pause, wishes: Wishes) -> str:
        """Return why a pause is over; empty if it is not over."""
        if wishes.desired == "run" if pause.by == "user" else wishes.num_resumes > pause.num_resumes:
            return "a user resumed it"
        if pause.by == "rewards" and self._failures.has_recovered:
            return "a test group was scored successfully"
        return ""

    async def _begin(self, pause: Pause) -> None:
        # If this replaces another pause, the paused time continues from there.
        self._pause = msgspec.structs.replace(pause, paused_before_s=self.total_s())
        await self._store.write_pause(self._run_id, self._pause)
        log.warning("the run is paused: %s", pause.reason)
        said = {"reward_func": pause.reward_func, "failed_ratio": pause.failed_ratio} if pause.reward_func else {}
        await self._log.event("status", {"status": "paused", "by": pause.by, "reason": pause.reason, **said})

    async def _go_on(self, pause: Pause, why: str) -> None:
        self._paused_s, self._pause = self.total_s(), None
        self._failures.begin_anew()
        await self._store.write_pause(self._run_id, None)
        log.info("the run goes on after %.0f s: %s", time.time() - pause.since_s, why)
        await self._log.event("status", {"status": "running", "reason": why})


def how_to_mend(reward_func: str) -> str:
    """Return advice for a failing reward function, by the form of its name; an empty name gives general advice."""
    if ":" in reward_func:
        return "Fix it: a saved edit that can be imported is loaded automatically."
    if "/" in reward_func:
        return "It is a reward model: see the rewarder's log for details."
    if reward_func:
        return (
            "Fix it: repair an endpoint where it runs, or register it again; for a built-in function, submit a new run "
            "with the columns and reward_kwargs that it needs."
        )
    return "The dead letters and the logs of the rewarder and of the sessions service say what failed."
