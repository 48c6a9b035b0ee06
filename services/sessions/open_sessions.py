"""The sessions that clients may ask for turns, each with a base URL and a key of its own.

    a rollout of a training run  --opened------------------> until its agent program has ended
    POST /v1/sessions            --open_for_evaluation-----> until it is ended, or its deadline passes

A key is made of the session's id and a secret of this process. It lives as long as its session: afterwards it is still
recognised, so that the client reads that the session is over, and opens nothing. Sessions for evaluation are in the
memory of this process, and end with it. Rollouts are recorded in Redis, and another replica plays them again.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any

import msgspec

from services.sessions.recording.recorded import Entry
from services.sessions.recording.recording import Recording
from services.sessions.session import Session, TurnSource
from services.sessions.session_store import SessionFullError
from shared.errors import HeadraceError
from shared.messages import MAX_MESSAGE_BYTES
from shared.turns import ChatMessage, SampledTurn, TurnRefusedError

SESSIONS_PATH = "/v1/sessions"
_SHORTEST_LOOK_S = 0.1
"""Time between two looks at a client's silence, which stands still while a request is under way."""
_MAX_TURNS = 1024
_NUM_STARTS = 2
"""Most processes of one program in a session: it is started again if its first one dies, and reads its turns again."""


class SessionOverError(HeadraceError):
    """The session has ended, its deadline has passed, or it cannot go on."""


class UnknownSessionError(HeadraceError):
    """The key is not the session's."""


class NotServedError(HeadraceError):
    """No session can be opened for the run now."""


class TooManySessionsError(HeadraceError):
    """As many sessions are open as may be."""


class TurnLimit:
    """The turns under way in sessions of clients. Turns of rollouts have no such limit.

    Args:
        most: Most turns at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """Count a turn while the block runs.

        Raises:
            TooManySessionsError: Too many turns are under way.
        """
        if self._num >= self._most:
            raise TooManySessionsError(
                f"{self._num} turns of sessions are under way, which is the limit; ask again in a moment"
            )
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1


class OpenSession:
    """One session, as its client uses it.

    Args:
        session_id: The id in its URL.
        session: Samples and records its turns.
        run_id: The run whose policy is sampled.
        base_url: The URL for clients of OpenAI's and Anthropic's protocols.
        api_key: The key for this URL.
        max_completion_length: Most tokens of a row after its prompt.
        expires_at_s: When it ends at the latest, in Unix seconds; None for a rollout's.
        limit: Bounds its turns under way, together with those of other sessions; None for a rollout's.
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

    async def turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, max_tokens: int, seed: int | None
    ) -> SampledTurn:
        """Return the next turn of a conversation; see Session.turn.

        Raises:
            SessionOverError: The session is over.
            TooManySessionsError: Too many turns are under way.
            TurnRefusedError: No generator can continue the conversation.
        """
        self.require_open()
        with contextlib.nullcontext() if self._limit is None else self._limit.one():
            return await self._turn(messages, tools, max_tokens=max_tokens, seed=seed)

    async def _turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, max_tokens: int, seed: int | None
    ) -> SampledTurn:
        self._silent_s, self._silent_from = self._silence_s(), None
        self._num_asking += 1
        try:
            turn = await self.session.turn(
                messages, tools, max_tokens=max_tokens, max_completion_tokens=self._max_completion_length, seed=seed
            )
        except TurnRefusedError as error:
            self.is_full = error.kind == "context_length"
            raise
        except HeadraceError as error:
            self.end(error)
            raise SessionOverError(f"session {self.session_id} cannot go on: {error}") from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise SessionOverError(f"session {self.session_id} ended before the turn was whole") from None
        else:
            self.is_full = False
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
        """End the session, with the reason if it cannot go on. Further turns are refused."""
        if self.over.done():
            return
        if failure is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(failure)
            self.over.exception()  # a client that asks again may be the only one to see it

    @property
    def counts(self) -> tuple[int, int]:
        """Number of its turns, and of their rows."""
        return self._counts_at_end or (self.session.recording.num_turns, self.session.recording.num_rows)

    async def free(self) -> None:
        """End the turns under way of a session that is over, and forget all of them but their counts."""
        await self.session.close()
        while self._num_asking:  # noqa: ASYNC110  callers that were just answered still look at the recording
            await asyncio.sleep(0)
        self._counts_at_end = self.counts
        self.session.recording = Recording()

    def begin(self) -> None:
        """Note that the client begins now: its wait until then is not silence."""
        self._silent_s, self._silent_from = 0.0, time.monotonic()

    async def until_silent(self, timeout_s: float) -> None:
        """Wait until the client has had no new turn for ``timeout_s`` seconds.

        The time in which requests are under way does not count. Refused requests do not end the silence, nor does a
        turn that is answered more often than a program may be started.
        """
        while (left_s := timeout_s - self._silence_s()) > 0:  # noqa: ASYNC110  time passes, and nothing else happens
            await asyncio.sleep(max(left_s, _SHORTEST_LOOK_S))

    def _silence_s(self) -> float:
        return self._silent_s + (0.0 if self._silent_from is None else time.monotonic() - self._silent_from)


class _ServedRun:
    """A run for which sessions may be opened, and its open sessions."""

    def __init__(self, generators: TurnSource, max_completion_length: int) -> None:
        self.generators = generators
        self.max_completion_length = max_completion_length
        self.sessions: set[asyncio.Task[None]] = set()


class OpenSessions:
    """All open sessions of this process.

    Args:
        url: This replica's own URL. Sessions are played where they were opened, so no other replica knows their keys.
        max_sessions: Most sessions for evaluation at a time.
        max_turns: Most turns under way in them.
    """

    def __init__(self, *, url: str, max_sessions: int, max_turns: int = _MAX_TURNS) -> None:
        self._url = url.rstrip("/")
        self._max_sessions = max_sessions
        self._limit = TurnLimit(max_turns)
        self._secret = secrets.token_bytes(32)
        self._open: dict[str, OpenSession] = {}
        self._runs: dict[str, _ServedRun] = {}

    def find(self, session_id: str, keys: Iterable[str]) -> OpenSession:
        """Return the session that a request is for.

        Args:
            session_id: The id in the request's path.
            keys: The keys that the request has.

        Raises:
            UnknownSessionError: None of the keys is the session's.
            SessionOverError: The session is over, and forgotten.
        """
        if not any(hmac.compare_digest(key.encode(), self._key(session_id).encode()) for key in keys):
            raise UnknownSessionError("the key is not the key of this session; use the api_key that came with its URL")
        if session_id not in self._open:
            raise SessionOverError(f"session {session_id} is over; open another one")
        return self._open[session_id]

    @contextlib.asynccontextmanager
    async def serving(self, run_id: str, generators: TurnSource, *, max_completion_length: int) -> AsyncGenerator[None]:
        """Let sessions for evaluation be opened for a run while the block runs. Its end ends them."""
        run = self._runs[run_id] = _ServedRun(generators, max_completion_length)
        try:
            yield
        finally:
            del self._runs[run_id]
            for session in run.sessions:
                session.cancel()
            await asyncio.gather(*run.sessions, return_exceptions=True)

    @contextlib.contextmanager
    def opened(self, session: Session, *, run_id: str, max_completion_length: int) -> Generator[OpenSession]:
        """Open a rollout's session while the block runs."""
        opened = self._new(session, run_id=run_id, max_completion_length=max_completion_length)
        try:
            yield opened
        finally:
            opened.end()
            del self._open[opened.session_id]

    def open_for_evaluation(self, run_id: str, *, deadline_s: float) -> OpenSession:
        """Open a session for a run that is served. It ends after ``deadline_s`` seconds.

        Raises:
            NotServedError: The run is not served here, or has no turns.
            TooManySessionsError: Too many sessions are open.
        """
        run = self._runs.get(run_id)
        if run is None:
            raise NotServedError(
                f"run {run_id} is not served, or is not an agent run: sessions are for runs with tools or an agent, "
                "from their start to their end"
            )
        num_open = sum(one.expires_at_s is not None and not one.over.done() for one in self._open.values())
        if num_open >= self._max_sessions:
            raise TooManySessionsError(
                f"{num_open} sessions are open, which is the limit; end one, or set HEADRACE_MAX_OPEN_SESSIONS"
            )
        session = Session(
            f"evaluation-{secrets.token_hex(8)}", run_id=run_id, generators=run.generators, record=_InMemory().record
        )
        opened = self._new(
            session,
            run_id=run_id,
            max_completion_length=run.max_completion_length,
            expires_at_s=time.time() + deadline_s,
            limit=self._limit,
        )
        keeping = asyncio.create_task(self._keep(opened, deadline_s), name=f"session {opened.session_id}")
        run.sessions.add(keeping)
        keeping.add_done_callback(run.sessions.discard)
        return opened

    async def _keep(self, opened: OpenSession, deadline_s: float) -> None:
        """Keep a session until its deadline. Its state can be read until then, also after its end."""
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({opened.over})
                await opened.free()
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        finally:
            opened.end()
            del self._open[opened.session_id]
            await opened.session.close()

    def _new(
        self,
        session: Session,
        *,
        run_id: str,
        max_completion_length: int,
        expires_at_s: float | None = None,
        limit: TurnLimit | None = None,
    ) -> OpenSession:
        session_id = secrets.token_hex(16)
        self._open[session_id] = OpenSession(
            session_id,
            session,
            run_id=run_id,
            base_url=f"{self._url}{SESSIONS_PATH}/{session_id}",
            api_key=self._key(session_id),
            max_completion_length=max_completion_length,
            expires_at_s=expires_at_s,
            limit=limit,
        )
        return self._open[session_id]

    def _key(self, session_id: str) -> str:
        return hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()


class _InMemory:
    """Bounds the recording of a session that is stored nowhere else."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def record(self, number: int, entry: Entry) -> None:
        """See Session; raises SessionFullError."""
        self._num_bytes += len(msgspec.msgpack.encode(entry))
        if self._num_bytes > MAX_MESSAGE_BYTES:
            raise SessionFullError(f"entry {number} of the session makes it larger than {MAX_MESSAGE_BYTES} bytes")


def _is_cancelled() -> bool:
    """Whether this task is being cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
