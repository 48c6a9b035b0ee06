"""Records the turns of one session, and finds the recorded turn that a request continues. Pure.

    request     system user | assistant tool | assistant tool            recorded turn 1 matches up to its last message
    recorded    ---- turn 0 ----^                                        its ids stand for the first 5 messages, and the
                ---- turn 1 --------------------------^                  rest is rendered and appended

Turns form trees: a turn continues an earlier one, or begins with no recorded token. A request continues the longest
recorded conversation with the same tools that is the beginning of its messages. Sampled messages may come back in
another form (message_match.py). A client's own messages must come back unchanged, because a template may read any part
of them. rows.py makes token sequences for training (rows) from the trees.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.sessions.recording.message_match import ComparableMessage, comparable
from services.sessions.recording.recorded import Entry, RecordedTurn, RolloutEnd, ToolResults, digest
from services.sessions.recording.rows import ids_through, make_rows
from shared.arrays import ID_DTYPE
from shared.messages import Row
from shared.turns import ChatMessage, SampledTurn


@dataclass(frozen=True)
class Continuation:
    """The recorded turn that a request continues, and the token ids that stand for its recorded messages.

    Attributes:
        turn: Number of the recorded turn; None if the request does not begin with a recorded conversation.
        recorded_ids: Packed ids that stand for the first ``num_recorded_messages`` messages.
        num_recorded_messages: Number of these messages.
        is_rewritten: Whether the request begins like a recorded conversation, and then has another assistant message
            in the place of a sampled one.
    """

    turn: int | None = None
    recorded_ids: bytes = b""
    num_recorded_messages: int = 0
    is_rewritten: bool = False


@dataclass(frozen=True)
class _Conversation:
    """The messages that a recorded turn adds to the turn it continues: digests of the client's, and the sampled one."""

    continues: int | None
    tools: bytes
    asked: list[bytes]
    sampled: ComparableMessage
    num_messages: int
    """Number of messages of the whole conversation, the sampled one included."""


class Recording:
    """The recorded turns of one session, with the results of their tool calls and the rollout's end.

    Args:
        entries: Earlier entries of the session, in order.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._turns: list[RecordedTurn] = []
        self._conversations: list[_Conversation] = []
        self._came_back: list[bytes] = []
        self._tips: set[int] = set()
        self._by_request: dict[bytes, SampledTurn] = {}
        self._tool_results: dict[int, ToolResults] = {}
        self.end: RolloutEnd | None = None
        """The recorded end of the rollout, if it has one."""
        self.num_entries = 0
        for entry in entries:
            self.add(entry)

    @property
    def num_turns(self) -> int:
        """Number of recorded turns."""
        return len(self._turns)

    @property
    def prompt(self) -> list[ChatMessage] | None:
        """The messages of the first recorded turn; None if there is none."""
        return self._turns[0].messages if self._turns else None

    @property
    def num_forks(self) -> int:
        """Number of rows (token sequences) after the first. A request that extends no row begins a new one."""
        return max(0, len(self._tips) - 1)

    @property
    def num_drifted_tokens(self) -> int:
        """Number of tokens that were rendered again because a client had rewritten a sampled message."""
        return sum(len(turn.turn.appended_ids) // 4 for turn in self._turns if turn.is_rewritten)

    def rows(self) -> tuple[Row, ...]:
        """Return the token sequences for training (rows). Each sampled token has loss mask 1 in exactly one of them."""
        return make_rows(self._turns)

    @property
    def num_rows(self) -> int:
        """Number of token sequences (rows) that ``rows`` returns."""
        return len(self._tips)

    @property
    def num_calls(self) -> int:
        """Number of tool calls in the sampled messages."""
        return sum(len(turn.turn.message.get("tool_calls") or ()) for turn in self._turns)

    def num_prompt_tokens(self, turn: int) -> int:
        """Return the number of tokens before the first sampled one in the conversation of a turn."""
        return len(self._path(turn)[0].turn.appended_ids) // ID_DTYPE.itemsize

    def number_of(self, turn: SampledTurn) -> int:
        """Return the number of a recorded turn, from 0."""
        return next(number for number, recorded in enumerate(self._turns) if recorded.turn is turn)

    def num_tokens_before(self, turn: int) -> int:
        """Return the number of tokens that a recorded turn was conditioned on."""
        num_bytes = len(ids_through(self._turns, turn)) - len(self._turns[turn].turn.token_ids)
        return num_bytes // ID_DTYPE.itemsize

    def conversation(self, turn: int | None) -> list[ChatMessage]:
        """Return all messages of a conversation, up to and including the message that was sampled in ``turn``."""
        return [message for recorded in self._path(turn) for message in (*recorded.messages, recorded.turn.message)]

    def completion(self) -> list[ChatMessage]:
        """Return the last turn's conversation from its first assistant message on; empty without turns."""
        messages = self.conversation(len(self._turns) - 1 if self._turns else None)
        return [*itertools.dropwhile(lambda message: message["role"] != "assistant", messages)]

    def repeated(self, request: bytes) -> SampledTurn | None:
        """Return the turn that was recorded for this request, by the digest of its body; None for a new request."""
        return self._by_request.get(request)

    def tool_results(self, turn: int) -> ToolResults | None:
        """Return the recorded results of a turn's tool calls; None without any."""
        return self._tool_results.get(turn)

    def continuation(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> Continuation:
        """Find the longest recorded conversation with which a request begins. Without any, the ``turn`` is None."""
        given, shown = [digest(message) for message in messages], digest(list(tools))
        matching: set[int | None] = {None}
        is_rewritten_after: set[int | None] = set()
        for number, recorded in enumerate(self._conversations):
            at = self._num_messages(recorded.continues)
            asked = at + len(recorded.asked)
            if recorded.continues not in matching or recorded.tools != shown:
                continue
            if given[at:asked] != recorded.asked or asked == len(given):
                continue
            if self._comes_back(number, messages[asked], given[asked]):
                matching.add(number)
            elif messages[asked]["role"] == "assistant":
                is_rewritten_after.add(recorded.continues)
        best = max(matching, key=self._preference)
        return Continuation(
            turn=best,
            recorded_ids=ids_through(self._turns, best),
            num_recorded_messages=self._num_messages(best),
            is_rewritten=best in is_rewritten_after,
        )

    def turn_after(
        self,
        continuation: Continuation,
        *,
        request: bytes,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]],
        turn: SampledTurn,
    ) -> RecordedTurn:
        """Build the entry for a turn that a generator sampled for a request. Nothing is added to the recording yet."""
        begins_row = continuation.turn not in self._tips
        return RecordedTurn(
            request=request,
            continues=continuation.turn,
            messages=list(messages[continuation.num_recorded_messages :]),
            tools=digest(list(tools)),
            is_rewritten=continuation.is_rewritten,
            num_repeated_tokens=len(continuation.recorded_ids) // ID_DTYPE.itemsize if begins_row else 0,
            turn=turn,
        )

    def add(self, entry: Entry) -> None:
        """Add an entry after the earlier ones: a turn, the results of tool calls, or the rollout's end."""
        self.num_entries += 1
        if isinstance(entry, ToolResults):
            self._tool_results[entry.turn] = entry
            return
        if isinstance(entry, RolloutEnd):
            self.end = entry
            return
        asked = [digest(message) for message in entry.messages]
        self._conversations.append(
            _Conversation(
                continues=entry.continues,
                tools=entry.tools,
                asked=asked,
                sampled=comparable(entry.turn.message),
                num_messages=self._num_messages(entry.continues) + len(asked) + 1,
            )
        )
        self._came_back.append(digest(entry.turn.message))
        if entry.continues is not None:
            self._tips.discard(entry.continues)
        self._tips.add(len(self._turns))
        self._turns.append(entry)
        self._by_request[entry.request] = entry.turn

    def _comes_back(self, turn: int, message: ChatMessage, mark: bytes) -> bool:
        """Whether a client's message is the sampled message of a turn, perhaps in another form.

        If so, remembers its digest, ``mark``, because later requests contain the same form.
        """
        if self._came_back[turn] != mark and self._conversations[turn].sampled.comes_back_as(comparable(message)):
            self._came_back[turn] = mark
        return self._came_back[turn] == mark

    def _path(self, turn: int | None) -> list[RecordedTurn]:
        """Return the recorded turns of a conversation, from its first one to ``turn``."""
        path: list[RecordedTurn] = []
        while turn is not None:
            path.append(self._turns[turn])
            turn = path[-1].continues
        return path[::-1]

    def _num_messages(self, turn: int | None) -> int:
        return 0 if turn is None else self._conversations[turn].num_messages

    def _preference(self, turn: int | None) -> tuple[int, bool, int]:
        """Return a sort key that ranks the longest conversation highest, then a row's last turn, then the newest."""
        return self._num_messages(turn), turn in self._tips, -1 if turn is None else turn
