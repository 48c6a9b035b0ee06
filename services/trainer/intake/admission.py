"""Admits prompt groups: turns rows of the data set into entries of the prompts stream.

    dataset row n --encode--> group n --headrace_admit_groups--> prompts
         |
         +-- without a prompt, or too long: number n is settled as dropped, with the reason

The number of a group is its position in the shuffled data set, so admission only has to remember a counter. Groups that
are admitted together enter the stream in one step, so that a generator begins them in one batch.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from services.trainer.groups.group_ids import group_id
from services.trainer.groups.ledger import Ledger
from shared.arrays import pack_ids
from shared.errors import MessageError, NoRoomError, UserError
from shared.messages import Prompt, PromptGroup, Stamp, encode
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, call
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_MIN_UNUSABLE_IN_A_ROW = 1000
"""A smaller data set is passed over more than once before it counts as unusable."""
_MAX_GROUPS, _MAX_BYTES = 256, 1 << 20
BAD_ROW, PROMPT_TOO_LONG = "bad_row", "prompt_too_long"


class UnusableRowError(UserError):
    """A row of the data set from which no prompt can be made. Its drop is counted under ``reason``."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class PromptRow(Protocol):
    """A row of the data set: a prompt and its columns, or the problem with it."""

    @property
    def prompt(self) -> Prompt:
        """The prompt, as text or messages."""
        ...

    @property
    def columns(self) -> dict[str, Any]:
        """All columns except the prompt's."""
        ...

    @property
    def problem(self) -> str | None:
        """Why the row cannot be used, or None."""
        ...


class PromptRows(Protocol):
    """Maps each admission number to a row of the data set, always to the same one."""

    def row_at(self, admission_number: int) -> PromptRow:
        """Return the row with this admission number."""
        ...


class Encoder(Protocol):
    """Turns a prompt into token ids."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Return token ids. Raises UserError for a prompt that cannot be encoded."""
        ...


class Admission:
    """Adds the rows of a run's data set to its prompts stream, each as one prompt group.

    Args:
        redis: Client of the Redis server that has the run's streams.
        keys: The run's keys.
        config: The run's settings.
        rows: The data set.
        encoder: Turns prompts into token ids.
        num_rows: Rows of one pass over the data, or a bound for a stream. As many unusable rows in a row end the run.
        ledger: Counts the admitted groups, and records unusable rows as dropped.
        incarnation: This trainer's incarnation.
        replica_id: This trainer's name in the time stamps of groups.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        config: RunConfig,
        rows: PromptRows,
        num_rows: int = 0,
        encoder: Encoder,
        ledger: Ledger,
        incarnation: int,
        replica_id: str = "trainer",
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._config = config
        self._rows = rows
        self._encoder = encoder
        self._ledger = ledger
        self._incarnation = incarnation
        self._replica_id = replica_id
        self._max_unusable_in_a_row = max(_MIN_UNUSABLE_IN_A_ROW, num_rows)
        self.lacks_room = False
        """Whether Redis had no room for the groups that were sent last. They wait to be admitted again."""
        self._again: deque[int] = deque()
        self._unusable_in_a_row = 0
        self._why = ""

    @property
    def num_unadmitted(self) -> int:
        """Number of groups that wait to be admitted again."""
        return len(self._again)

    def admit_again(self, numbers: Iterable[int]) -> None:
        """Queue lost groups for `admit`, before all new ones. The bound on groups in flight applies to them too."""
        self._again.extend(number for number in numbers if number not in self._again)

    def leave_out(self, numbers: Collection[int]) -> None:
        """Remove the groups with these numbers, and settled groups, from the queue of `admit_again`.

        They arrived after all: a generator was sampling them when they were withdrawn.
        """
        if self._again:
            self._again = deque(it for it in self._again if it not in numbers and not self._ledger.is_settled(it))

    async def admit(self, count: int) -> list[int]:
        """Admit the next ``count`` usable groups, and return their numbers.

        Unusable rows in between are dropped with their reason. Fewer groups are admitted if 1,000 rows in a row are
        unusable, or if Redis has no room. In the second case, later calls send one group until Redis accepts it.

        Raises:
            UserError: ``num_rows`` rows in a row were unusable, and at least 1,000.
        """
        admitted: list[int] = []
        while len(admitted) < count:
            is_again = bool(self._again)
            num_next = 1 if self.lacks_room else count - len(admitted)
            groups = await self._next_groups(num_next, is_again=is_again)
            if not groups and not is_again:
                break
            labelled = {group_id(number): payload for number, payload in groups.items()}
            try:
                await send_off(self._redis, self._keys, self._incarnation, labelled, is_again=is_again)
            except NoRoomError as error:
                if not self.lacks_room:
                    log.warning("%s", error)
                self.lacks_room = True
                self.admit_again(groups)
                break
            self.lacks_room = False
            self._again = deque(number for number in self._again if number not in groups)
            admitted += groups
        return admitted

    async def _next_groups(self, count: int, *, is_again: bool) -> dict[int, bytes]:
        """Return up to ``count`` encoded groups by number, and drop the unusable rows in between."""
        groups: dict[int, bytes] = {}
        unusable_before = self._unusable_in_a_row
        for number in list(self._again) if is_again else self._new_numbers():
            payload = self._payload(number, await self._row(number))
            if payload is not None:
                groups[number] = payload
            elif is_again:
                self._again = deque(it for it in self._again if it != number)
            if len(groups) == count or is_full(groups.values()):
                break
            if self._unusable_in_a_row >= self._max_unusable_in_a_row:
                if groups:
                    break
                raise UserError(
                    f"the last {self._unusable_in_a_row} rows of the data set could not be used; "
                    f"the last one: {self._why}",
                    field="dataset_name",
                )
            if self._unusable_in_a_row - unusable_before >= _MIN_UNUSABLE_IN_A_ROW:
                break  # the loop looks at requests to stop in between
            await asyncio.sleep(0)  # encoding a long prompt takes a while
        return groups

    def _new_numbers(self) -> Iterator[int]:
        while True:
            number = self._ledger.admitted
            self._ledger.admitted = number + 1  # first: its dead letter may be read before Redis's answer
            yield number

    async def _row(self, number: int) -> PromptRow:
        if self._config.dataset_streaming:  # may read from the disk or the network
            return await asyncio.to_thread(self._rows.row_at, number)
        return self._rows.row_at(number)

    def _payload(self, number: int, row: PromptRow) -> bytes | None:
        try:
            payload = prompt_payload(
                row,
                encoder=self._encoder,
                run_id=self._keys.run_id,
                label=group_id(number),
                num_generations=self._config.num_generations,
                config=self._config,
                replica_id=self._replica_id,
            )
        except UnusableRowError as error:
            self._drop(number, error.reason, str(error))
            return None
        self._unusable_in_a_row = 0
        return payload

    def _drop(self, number: int, reason: str, why: str) -> None:
        name = group_id(number)
        if self._unusable_in_a_row < _MIN_UNUSABLE_IN_A_ROW:  # a stream may have very many
            log.warning("dropped group %s (%s): %s", name, reason, why, extra={"group_id": name})
        self._ledger.record_dropped(number, reason)
        self._unusable_in_a_row += 1
        self._why = why


def is_full(payloads: Collection[bytes]) -> bool:
    """Return whether these payloads fill one Redis call: 256 groups, or 1 MiB. A larger call would block Redis."""
    return len(payloads) >= _MAX_GROUPS or sum(map(len, payloads)) >= _MAX_BYTES


async def send_off(
    redis: Redis, keys: RunKeys, incarnation: int, groups: Mapping[str, bytes], *, is_again: bool = False
) -> None:
    """Add groups to the prompts stream in one atomic step.

    Args:
        redis: Client of the Redis server that has the run's streams.
        keys: The run's keys.
        incarnation: This trainer's incarnation.
        groups: Group id -> payload.
        is_again: Whether the groups were admitted before and then lost.

    Raises:
        FencedError: A newer incarnation owns the run.
        StateLostError: The run is gone.
        UnavailableError: Redis does not answer.
        NoRoomError: Redis has no room for the groups. Only the trainer can make room, so it must not wait here.
    """
    if not groups:
        return
    streams = (keys.prompts, keys.completions, keys.scored) if is_again else (keys.prompts,)
    await call(
        redis,
        "headrace_readmit_groups" if is_again else "headrace_admit_groups",
        keys=(keys.epoch, keys.prompts, *map(keys.seen, streams)),
        args=(incarnation, *(part for group in groups.items() for part in group)),
        waits_for_room=False,
    )


def prompt_payload(
    row: PromptRow,
    *,
    encoder: Encoder,
    run_id: str,
    label: str,
    num_generations: int,
    config: RunConfig,
    replica_id: str,
) -> bytes:
    """Return the encoded entry of the prompts stream that requests completions for a row.

    In an agent run the entry has no token ids: sessions render the prompt, with the tools.

    Raises:
        UnusableRowError: The row does not give a prompt, or its prompt is too long.
    """
    if row.problem is not None:
        raise UnusableRowError(BAD_ROW, row.problem)
    try:
        prompt_ids = encoder.encode(row.prompt)
    except UserError as error:
        raise UnusableRowError(BAD_ROW, str(error)) from error
    longest = config.max_prompt_length
    if longest is not None and len(prompt_ids) > longest:
        raise UnusableRowError(PROMPT_TOO_LONG, f"{len(prompt_ids)} tokens, max_prompt_length={longest}")
    group = PromptGroup(
        run_id=run_id,
        group_id=label,
        prompt=row.prompt,
        prompt_ids=b"" if config.is_agentic else pack_ids(prompt_ids),
        columns=row.columns,
        num_generations=num_generations,
        stamps=(Stamp("admitted", time.time(), replica_id),),
    )
    try:
        return encode(group)
    except MessageError as error:
        raise UnusableRowError(BAD_ROW, str(error)) from error
