"""Makes token sequences for training (rows) from recorded turns. Pure.

    turns       0 <-- 1 <-- 2        row 0   prompt  a0  tool  a1  tool  a2
                ^---- 3              row 1   prompt  a0  user  a3
                                     masks   000000  11  0000  11  0000  11
                                             000000  00  0000  11

A turn that continues the last turn of a row is appended to that row. A turn that continues an earlier one begins a new
row, and so does a turn that continues none. A new row begins with all ids up to the continued turn, as its prompt. A
sampled id is trained only in the first row that has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.sessions.recording.recorded import RecordedTurn
from shared.arrays import ID_DTYPE
from shared.messages import Row, Turn, VersionSpan


@dataclass
class _Growing:
    """A row under construction, to which turns are appended."""

    prompt_ids: bytes
    ids: list[bytes] = field(default_factory=list[bytes])
    mask: list[bytes] = field(default_factory=list[bytes])
    logprobs: list[bytes] = field(default_factory=list[bytes])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    turns: list[Turn] = field(default_factory=list[Turn])
    num_tokens: int = 0
    num_sampled: int = 0

    def __post_init__(self) -> None:
        self._put(self.prompt_ids, sampled=False)

    def append(self, recorded: RecordedTurn) -> None:
        """Append a turn: the tokens that were rendered before it with mask 0, and the sampled tokens with mask 1."""
        turn = recorded.turn
        start, rendered = self.num_tokens, self.num_tokens + _length(turn.appended_ids)
        if self.turns and recorded.messages and rendered > start:  # what precedes the first turn is the row's prompt
            role = str(recorded.messages[-1].get("role"))
            self.turns.append(Turn(role, start, rendered, None, self.turns[-1].ended_at_s, turn.started_at_s))
        self._put(turn.appended_ids, sampled=False)
        self._put(turn.token_ids, sampled=True)
        self.turns.append(
            Turn("assistant", rendered, self.num_tokens, turn.finish_reason, turn.started_at_s, turn.ended_at_s)
        )
        self.logprobs.append(turn.logprobs)
        self.spans += [
            VersionSpan(
                span.policy_version, self.num_sampled + span.start, self.num_sampled + span.end, span.incarnation
            )
            for span in turn.version_spans
        ]
        self.num_sampled += _length(turn.token_ids)

    def finished(self) -> Row:
        """Return the finished row, with its parts joined into packed arrays."""
        return Row(
            token_ids=b"".join(self.ids),
            loss_mask=b"".join(self.mask),
            logprobs=b"".join(self.logprobs),
            version_spans=tuple(self.spans),
            turns=tuple(self.turns),
        )

    def _put(self, ids: bytes, *, sampled: bool) -> None:
        self.ids.append(ids)
        self.mask.append((b"\1" if sampled else b"\0") * _length(ids))
        self.num_tokens += _length(ids)


def make_rows(turns: Sequence[RecordedTurn]) -> tuple[Row, ...]:
    """Return the token sequences for training (rows) of a session's turns, in the order in which they began."""
    rows: list[_Growing] = []
    row_of_tip: dict[int, _Growing] = {}
    for number, turn in enumerate(turns):
        row = None if turn.continues is None else row_of_tip.pop(turn.continues, None)
        if row is None:
            row = _Growing(ids_through(turns, turn.continues))
            rows.append(row)
        row.append(turn)
        row_of_tip[number] = row
    return tuple(row.finished() for row in rows)


def ids_through(turns: Sequence[RecordedTurn], last: int | None) -> bytes:
    """Return the packed ids from the beginning of a conversation to the end of turn ``last``; empty for None."""
    ids: list[bytes] = []
    while last is not None:
        ids += [turns[last].turn.token_ids, turns[last].turn.appended_ids]
        last = turns[last].continues
    return b"".join(reversed(ids))


def _length(ids: bytes) -> int:
    return len(ids) // ID_DTYPE.itemsize
