"""A session for an HTTP client: limits requests, refuses them after the end, and measures the client's silence.

asking: counted against the limit --> body is read --> turn: sampled or recorded --> answered
end  --> further turns are refused --free--> turns under way end, and only the counts are kept

A turn is one assistant message of the policy. The client is an agent program that plays a rollout, or any program that
has opened a session for evaluation.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

from services.sessions.recording.recording import Recording
from services.sessions.session import Session
from shared.errors import HeadraceError
from shared.service.cancellation import is_being_cancelled
from shared.turns import ChatMessage, SampledTurn, TurnRefusedError

_SHORTEST_LOOK_S = 0.1
"""Time between two looks at a client's silence, which stands still while a request is under way."""
_NUM_STARTS = 2
"""Most processes of one program in a session: it is started again if its first one dies, and reads its turns again."""


class SessionOverError(HeadraceError):
    """The session has ended, its deadline has passed, or it cannot go on."""


class TooManyTurnsError(HeadraceError):
    """As many turns of evaluation sessions are under way as the limit allows. The client may ask again later."""


class TurnLimit:
    """Limits the turns of evaluation sessions that are under way. Rollouts of training have no such limit.

    Args:
        most: Most turns at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """Count one turn as under way while the block runs.

        Raises:
            TooManyTurnsError: Too many turns are under way.
        """
        if self._num >= self._most:
            raise TooManyTurnsError(
                f"{self._num} turns of sessions are under way, which is the limit; ask again in a moment"
            )
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1


class OpenSession:
    """A session that a client reaches with a URL and a key: the rollout of an agent program, or one for evaluation.

    Args:
        session_id: The id in the session's URL.
        session: Samples and records the turns.
        run_id: The run whose policy is sampled.
        base_url: The URL for clients of OpenAI's and Anthropic's protocols.
        api_key: The key for this URL.
        max_completion_length: Most tokens of the conversation after its prompt.
        expires_at_s: When the session ends at the latest, in Unix seconds; None for a training rollout.
        limit: Limits the turns under way in all evaluation sessions together; None for a training rollout.
    """

    def __init__(
        self,
        session_id: str,
        session: Session,
        *,
        run_id: str,
        base_url: str,
        api_key: str,
        max_completion_length: int,
        expires_at_s: float | None = None,
        limit: TurnLimit | None = None,
    ) -> None:
        self.session_id = session_id
        self.session = session
        self.run_id = run_id
        self.base_url = base_url
        self.api_key = api_key
        self.expires_at_s = expires_at_s
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the session is over; its exception is the reason why it cannot go on."""
        self.reward: float | None = None
        self.is_full = False
        """Whether the last turn was refused because its conversation was too long."""
        self.refused = ""
        """Why the last request for a turn was refused; empty if it was not."""
        self._max_completion_length = max_completion_length
        self._limit = limit
        self._counts_at_end: tuple[int, int] | None = None
        self._num_answers = Counter[int]()
        """How often each turn was answered, by its number."""
        self._num_asking = 0
        self._silent_s = 0.0
        """Seconds without a request under way since the client last had a new turn, until ``_silent_from``."""
        self._silent_from: float | None = None
        """When the last request under way ended, in monotonic seconds; None while there is one, or before any."""

    @contextlib.contextmanager
    def asking(self) -> Generator[None]:
        """Count a request for a turn against the limit while the block runs. Read the body inside the block.

        Raises:
            TooManyTurnsError: Too many turns are under way.
        """
        with contextlib.nullcontext() if self._limit is None else self._limit.one():
            yield

    async def turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, max_tokens: int, seed: int | None
    ) -> SampledTurn:
        """Return the policy's next message in a conversation, sampled or recorded, and note that the client is active.

        Raises:
            SessionOverError: The session is over, ended before the turn was whole, or cannot go on.
            TooManyTurnsError: Too many turns are under way.
            TurnRefusedError: The messages are malformed, or no generator can continue the conversation.
        """
        self.require_open()
        self._silent_s, self._silent_from = self._silence_s(), None
        self._num_asking += 1
        try:
            turn = await self.session.turn(
                messages, tools, max_tokens=max_tokens, max_completion_tokens=self._max_completion_length, seed=seed
            )
        except TurnRefusedError as error:
            self.is_full, self.refused = error.kind == "context_length", str(error)
            raise
        except TooManyTurnsError:
            raise
        except HeadraceError as error:
            self.end(error)
            raise SessionOverError(f"session {self.session_id} cannot go on: {error}") from error
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            raise SessionOverError(f"session {self.session_id} ended before the turn was whole") from None
        else:
            self.is_full, self.refused = False, ""
            self._num_answers[number := self.session.recording.number_of(turn)] += 1
            if self._num_answers[number] <= _NUM_STARTS:
                self._silent_s = 0.0
            return turn
        finally:
            self._num_asking -= 1
            if not self._num_asking:
                self._silent_from = time.monotonic()

    def require_open(self) -> None:
        """Raise SessionOverError if the session is over."""
        if self.over.done():
            raise SessionOverError(f"session {self.session_id} is over; open another one")

    def end(self, failure: HeadraceError | None = None) -> None:
        """End the session; ``failure`` is the reason if it cannot go on. Further turns are refused."""
        if self.over.done():
            return
        if failure is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(failure)
            self.over.exception()  # a client that asks again may be the only one to see it

    @property
    def counts(self) -> tuple[int, int]:
        """The number of recorded turns, and of the rows (token sequences for training) that they form."""
        return self._counts_at_end or (self.session.recording.num_turns, self.session.recording.num_rows)

    async def free(self) -> None:
        """Cancel the turns under way of a session that is over, and free its recording. Only the counts are kept."""
        await self.session.close()
        while self._num_asking:  # noqa: ASYNC110  callers that were just answered still look at the recording
            await asyncio.sleep(0)
        self._counts_at_end = self.counts
        self.session.recording = Recording()

    def begin(self) -> None:
        """Note that the client starts now, so that its wait until now does not count as silence."""
        self._silent_s, self._silent_from = 0.0, time.monotonic()

    async def until_silent(self, timeout_s: float) -> None:
        """Wait until the client has had no new turn for ``timeout_s`` seconds.

        The time in which requests are under way does not count. A refused request does not end the silence. Neither
        does a turn that was answered twice before, because a program is started at most twice.
        """
        while (left_s := timeout_s - self._silence_s()) > 0:  # noqa: ASYNC110  time passes, and nothing else happens
            await asyncio.sleep(max(left_s, _SHORTEST_LOOK_S))

    def _silence_s(self) -> float:
        return self._silent_s + (0.0 if self._silent_from is None else time.monotonic() - self._silent_from)
