"""Runs one seed: strikes, heals, and waits until training continues.

    strike --> heal --> (max_staleness + 2) more steps --> no orphans? --> the next strike
                  +--> none for STAND_S: the run has stalled. Its files are kept for analysis; a new stack is started

Groups that were in progress before the strike are not enough for so many steps. So these steps show that every service
works again.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos import injectors, schedule, victims, workload
from benchmarks.chaos.injectors import Site, Wound
from benchmarks.chaos.life import Life
from benchmarks.chaos.power_loss import AofSizes
from benchmarks.chaos.record import FaultRecord, TrialRecord
from benchmarks.chaos.schedule import Fault, Strike
from benchmarks.chaos.stack import kill
from headrace.local.state_dir import ProcessMark

STAND_S = {workload.SIMULATED: 120.0, workload.VLLM: 300.0}
"""Seconds without a step, after the last fault has healed, until a run counts as stalled. vLLM takes longer to start.
"""
_STEPS_AFTER = workload.MAX_STALENESS + 2
_VICTIM_PATIENCE_S = 15.0
_ORPHAN_PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Plan:
    """Length and setup of a trial.

    Attributes:
        seconds: Strikes end after this time.
        num_faults: Strikes end after this number of faults.
        stand_s: See STAND_S.
        has_tool: Whether the runs have a tool.
        directory: Directory for the state, on a disk with enough room.
        results: Directory for the files of stalled runs.
    """

    seed: int
    engine: str
    seconds: float
    num_faults: int
    max_steps: int
    has_tool: bool
    cells: Sequence[tuple[str, str]]
    own_disk: bool
    directory: Path
    results: Path
    stand_s: float


class _StandstillError(Exception):
    """No step was made in time."""


class Trial:
    """Runs one seed.

    Args:
        plan: Length and setup of the trial.
        record: Filled with the results during the trial.
        say: Prints a line.
    """

    def __init__(self, plan: Plan, record: TrialRecord, *, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._record = record
        self._say = say
        self._reported: set[ProcessMark] = set()

    def run(self) -> None:
        """Strike until the time or the number of faults is used up. Stops everything that was started."""
        began_at = time.monotonic()
        strikes = schedule.schedule(self._plan.seed, self._plan.cells)
        number = 0
        try:
            while not self._is_over(began_at):
                number += 1
                self._live(number, strikes, began_at)
        finally:
            self._record.seconds = time.monotonic() - began_at

    def _is_over(self, began_at: float) -> bool:
        return time.monotonic() - began_at > self._plan.seconds or len(self._record.faults) >= self._plan.num_faults

    def _live(self, number: int, strikes: Iterator[Strike], began_at: float) -> None:
        plan = self._plan
        life = Life(
            plan.directory / f"life-{number}",
            engine=plan.engine, max_steps=plan.max_steps, has_tool=plan.has_tool, own_disk=plan.own_disk, say=self._say,
        )  # fmt: skip
        stack = life.stack
        with AofSizes(stack.state.redis) as aof_sizes, life.turn_watch:
            site = Site(stack, life.disk, aof_sizes, lambda: life.run)
            try:
                self._wait_for_steps(life, since_s=time.time())
                for strike in strikes:
                    self._strike(strike, life, site)
                    if self._is_over(began_at):
                        break
                self._end_run(life)
                stack.end()
                self._look_for_orphans(None)
            except _StandstillError:
                evidence = plan.results / f"seed-{plan.seed}-stood-{len(self._record.stood) + 1}"
                waits_for = life.give_up(evidence)
                self._record.stood.append(f"{evidence.name}: {waits_for}")
                self._say(f"THE RUN HAS STALLED; it waits for: {waits_for}. Its files are in {evidence}")
            finally:
                stack.end()
                self._end_what_is_left()
                self._record.runs += life.verdicts
                life.disk.close()

    def _end_run(self, life: Life) -> None:
        if not life.end_run(patience_s=self._plan.stand_s):
            raise _StandstillError

    def _strike(self, strike: Strike, life: Life, site: Site) -> None:
        self._look_for(life, strike.pause_s)
        self._record.loads.append(round(os.getloadavg()[0], 1))
        open_wounds: list[tuple[float, Wound]] = []
        records: list[FaultRecord] = []
        for place, fault in enumerate(strike.faults):
            if place:
                self._look_for(life, strike.apart_s)
            wound = self._inject(fault, life, site)
            if wound is None:
                self._say(f"{strike.number}: no victim for: {fault}")
                continue
            is_pair = len(strike.faults) > 1
            records.append(FaultRecord(fault.victim, fault.kind, fault.held_s, wound.at_s, wound.note, is_pair))
            self._record.faults.append(records[-1])
            open_wounds.append((wound.at_s + fault.held_s, wound))
            self._say(f"{strike.number}: {fault} ({wound.note})" if wound.note else f"{strike.number}: {fault}")
        if not records:
            return
        while open_wounds:
            life.look()
            open_wounds = [item for item in open_wounds if time.time() < item[0] or not item[1].heal()]
            time.sleep(_LOOK_EVERY_S)
        try:
            self._wait_for_steps(life, since_s=time.time())
        except _StandstillError:
            for record in records:
                record.stood = True
            raise
        finally:
            for record in records:
                record.recovery_s = recovery_s(record.at_s, life.stepped_at)
        self._say(f"{strike.number}: trains again after {', '.join(f'{record.recovery_s} s' for record in records)}")
        self._look_for_orphans(life)

    def _inject(self, fault: Fault, life: Life, site: Site) -> Wound | None:
        """Inject the fault as soon as its victim exists."""
        deadline = time.monotonic() + _VICTIM_PATIENCE_S
        while time.monotonic() < deadline:
            wound = injectors.inject(fault, site)
            if wound is not None:
                return wound
            self._look_for(life, _LOOK_EVERY_S)
        return None

    def _look_for(self, life: Life, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            life.look()
            if time.monotonic() >= until:
                return
            time.sleep(min(_LOOK_EVERY_S, max(0.0, until - time.monotonic())))

    def _wait_for_steps(self, life: Life, *, since_s: float) -> None:
        """Wait for so many steps that every service must have contributed to them."""
        seen, deadline = 0, time.monotonic() + self._plan.stand_s
        while seen < _STEPS_AFTER:
            life.look()
            now = sum(at_s > since_s for at_s in reversed(life.stepped_at[-100:]))
            if now > seen:
                seen, deadline = now, time.monotonic() + self._plan.stand_s
            if time.monotonic() > deadline:
                raise _StandstillError
            time.sleep(_LOOK_EVERY_S)

    def _look_for_orphans(self, life: Life | None) -> None:
        """Wait for orphans of dead processes to end, and report any that do not."""
        deadline = time.monotonic() + _ORPHAN_PATIENCE_S
        left: list[ProcessMark] = []
        while time.monotonic() < deadline:
            if life is not None:
                life.look()
            found = victims.orphans(os.getpid(), None if life is None else life.stack.launcher)
            left = [process for process in found if process not in self._reported]
            if not left:
                return
            time.sleep(_LOOK_EVERY_S)
        for process in left:
            self._reported.add(process)
            self._record.orphans.append(victims.describe(process))
            self._say(f"LEFT BEHIND: {victims.describe(process)}")

    def _end_what_is_left(self) -> None:
        kill(victims.orphans(os.getpid(), None))


def recovery_s(at_s: float, stepped_at: Sequence[float]) -> float | None:
    """Return the seconds from a fault to the step after the longest pause since; None if no step followed.

    Args:
        at_s: When the fault struck, in Unix seconds.
        stepped_at: When steps were made, in order.
    """
    since = [at_s, *(made_at_s for made_at_s in stepped_at if made_at_s > at_s)]
    if len(since) == 1:
        return None
    _, ended_at_s = max(itertools.pairwise(since), key=lambda pause: pause[1] - pause[0])
    return round(ended_at_s - at_s, 2)
