"""Remembers across crashes which groups the training rank was computing on: a group may have killed it.

    batch in hand --the rank dies: first death--> each of its groups is tried by itself, before it is trained again
    one in hand   --the rank dies: second death--> buried when it is read again, with its post-mortem
                  --it lives--> the group is innocent, and its deaths are forgotten

    run_dir/in_hand.json    written before a batch, and emptied after its last step

A trial is a forward and a backward pass on the group's rows, without an optimizer step. The file survives the process.
It is not synced to disk, because a power failure is not caused by a group.

Two limits remain. If a rank dies in a group's batch, and is then killed from outside during the group's trial, the
group becomes a dead letter although it is innocent; it can be replayed. Groups that kill a rank only in combination are
not found: the run ends when it has crashed too often.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.trainer.groups.group_ids import training_number
from services.trainer.loop.post_mortem import write_whole
from services.trainer.policy.ranks import RankLostError
from services.trainer.telemetry.completions_table import conversation_text
from shared.errors import HeadraceError, MessageError
from shared.message_invariants import Count
from shared.messages import ScoredGroup

log = logging.getLogger(__name__)

FILE = "in_hand.json"
_DEATHS = 2
_MAX_CHARS = 2000


class _Record(msgspec.Struct):
    """The contents of ``in_hand.json``: the groups that a rank computes on, and the groups that ranks died on."""

    groups: list[Count] = []
    """Groups in hand now."""
    deaths: dict[Count, Count] = {}
    """Group to the number of deaths with it in hand; groups that survived a trial since are removed."""
    condemned: list[Count] = []
    """The groups in ``deaths`` to bury when they are read."""
    last_words: str = ""
    """The error of the last death; empty if the process was killed."""


class GroupsInHand:
    """Records on disk which groups a rank is computing on, and finds the groups that earlier ranks died on.

    Args:
        run_dir: The run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file = run_dir / FILE
        self._record = self._read()
        died_with = self._record.groups
        for number in died_with:
            self._record.deaths[number] = self._record.deaths.get(number, 0) + 1
        if len(died_with) == 1 and self._record.deaths[died_with[0]] >= _DEATHS:
            self._record.condemned = sorted({*self._record.condemned, *died_with})
        self._last_words, self._died_at_s = self._record.last_words, self._modified_at_s()
        if died_with:
            log.warning("the previous rank died while it computed on groups %s", died_with)
            self._write([])

    @property
    def suspects(self) -> Collection[int]:
        """Groups to try one by one before they are trained, because a rank died while it computed on them."""
        return self._record.deaths.keys() - set(self._record.condemned)

    @contextlib.asynccontextmanager
    async def holding(self, numbers: Sequence[int]) -> AsyncGenerator[None]:
        """Within the block, record that these groups are in hand, in case the process dies."""
        await self._note(numbers)
        try:
            yield
        except Exception as error:
            if isinstance(error, HeadraceError) and not isinstance(error, RankLostError):
                await self._note([])  # raised on purpose, so this is not a death
            else:
                await self._note(numbers, last_words=f"{type(error).__name__}: {error}"[:_MAX_CHARS])
            raise
        except asyncio.CancelledError:
            await self._note([])
            raise
        await self._note([])

    async def acquit(self, number: int) -> None:
        """Forget the deaths of a group: the rank survived computing on it by itself."""
        self._record.deaths.pop(number, None)
        await self._note([])

    async def _note(self, numbers: Sequence[int], *, last_words: str = "") -> None:
        self._record.last_words = last_words
        await asyncio.to_thread(self._write, list(numbers))

    def refuse_condemned(self, group: ScoredGroup) -> None:
        """Raise MessageError if ranks died twice on a group, the last time on no other. Write the group's post-mortem.

        The caller buries the group. A replayed group is not refused again.
        """
        number = training_number(group.prompt.group_id)
        if number is None or number not in self._record.condemned:
            return
        how = self._last_words or "it was killed, or the machine ran out of memory"
        where = self._run_dir / "post_mortem" / f"group_{group.prompt.group_id}"
        report = {
            "group_id": group.prompt.group_id,
            "deaths": self._record.deaths[number],
            "last_died_at_s": self._died_at_s,
            "last_words": self._last_words,
            "rollouts": [_described(group, index) for index in range(len(group.rollouts))],
        }
        kept = f"; look at {where}/report.json"
        try:
            write_whole(where, report, [group])
        except OSError as error:
            kept = f"; the post-mortem could not be written: {error}"
        self._record.condemned.remove(number)
        self._record.deaths.pop(number)
        self._write(self._record.groups)
        raise MessageError(
            f"the training rank died {report['deaths']} times while it computed on this group, the last time only "
            f"on it: {how}{kept}"
        )

    def _read(self) -> _Record:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Record)
        except FileNotFoundError:
            return _Record()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("%s cannot be read, so it is unknown how the previous rank died: %s", self._file, error)
            return _Record()

    def _modified_at_s(self) -> float:
        try:
            return self._file.stat().st_mtime
        except OSError:
            return time.time()

    def _write(self, groups: list[int]) -> None:
        self._record.groups = groups
        aside = self._file.with_suffix(".tmp")
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(msgspec.json.encode(self._record))
            aside.rename(self._file)
        except OSError as error:
            log.warning("the groups that the rank computes on could not be written to %s: %s", self._file, error)


def _described(group: ScoredGroup, index: int) -> Mapping[str, Any]:
    rollout = group.rollouts[index]
    return {
        "rollout_id": rollout.rollout_id,
        "num_tokens": sum(len(row.loss_mask) for row in rollout.rows),
        "num_sampled": rollout.num_sampled,
        "policy_versions": [list(msgspec.structs.astuple(span)) for span in rollout.version_spans()],
        "rewards": {reward.name: reward.value for reward in rollout.rewards},
        "completion": conversation_text(rollout.completion),
    }
