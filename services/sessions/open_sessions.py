"""Opens and finds the sessions in which HTTP clients ask for turns, each with a base URL and a key of its own.

    a rollout of a training run  --opened------------------> until its agent program has ended
    POST /v1/sessions            --open_for_evaluation-----> until it is ended, or its deadline passes

A turn is one assistant message of the policy. A key is derived from the session's id and a secret of this process. Once
the session has ended, its key is still recognised, but only to answer that the session is over. Sessions for evaluation
are in the memory of this process, and end with it. Rollouts are recorded in Redis, so other replicas can continue them.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Iterable

import msgspec

from services.sessions.open_session import OpenSession, SessionOverError, TurnLimit
from services.sessions.recording.recorded import Entry
from services.sessions.session import Session, TurnSource
from services.sessions.session_store import SessionFullError
from shared.errors import HeadraceError
from shared.messages import MAX_MESSAGE_BYTES

SESSIONS_PATH = "/v1/sessions"
_MAX_TURNS = 1024


class UnknownSessionError(HeadraceError):
    """None of a request's keys is the key of the session in the request's path."""


class NotServedError(HeadraceError):
    """No session can be opened for the run: it is not being played here, or it has neither tools nor an agent."""


class TooManySessionsError(HeadraceError):
    """The limit of open sessions is reached."""


class _ServedRun:
    """A run for which sessions for evaluation may be opened, and the tasks that keep its open sessions."""

    def __init__(self, generators: TurnSource, max_completion_length: int) -> None:
        self.generators = generators
        self.max_completion_length = max_completion_length
        self.sessions: set[asyncio.Task[None]] = set()


class OpenSessions:
    """Opens the sessions of this process, finds them by id and key, and ends them.

    Args:
        url: This replica's own URL. Sessions are played where they were opened, so no other replica knows their keys.
        max_sessions: Most sessions for evaluation at a time.
        max_turns: Most turns under way in the sessions for evaluation, asked for or sampled for clients that have gone.
    """

    def __init__(self, *, url: str, max_sessions: int, max_turns: int = _MAX_TURNS) -> None:
        self._url = url.rstrip("/")
        self._max_sessions = max_sessions
        self._limit, self._sampling = TurnLimit(max_turns), TurnLimit(max_turns)
        self._secret = secrets.token_bytes(32)
        self._open: dict[str, OpenSession] = {}
        self._runs: dict[str, _ServedRun] = {}

    def find(self, session_id: str, keys: Iterable[str]) -> OpenSession:
        """Return the session in a request's path, if the request has the session's key.

        Args:
            session_id: The id in the request's path.
            keys: The keys that the request has.

        Raises:
            UnknownSessionError: None of the keys is the session's.
            SessionOverError: The session has ended, and is no longer kept.
        """
        if not any(hmac.compare_digest(key.encode(), self._key(session_id).encode()) for key in keys):
            raise UnknownSessionError("the key is not the key of this session; use the api_key that came with its URL")
        if session_id not in self._open:
            raise SessionOverError(f"session {session_id} is over; open another one")
        return self._open[session_id]

    @contextlib.asynccontextmanager
    async def serving(self, run_id: str, generators: TurnSource, *, max_completion_length: int) -> AsyncGenerator[None]:
        """Allow sessions for evaluation of a run to be opened while the block runs. They end with the block."""
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
        """Give the session of a training rollout a URL and a key while the block runs."""
        opened = self._new(session, run_id=run_id, max_completion_length=max_completion_length)
        try:
            yield opened
        finally:
            opened.end()
            del self._open[opened.session_id]

    def open_for_evaluation(self, run_id: str, *, deadline_s: float) -> OpenSession:
        """Open a session for evaluation with the policy of a run. It ends after ``deadline_s`` seconds at the latest.

        Raises:
            NotServedError: The run is not being played here, or has neither tools nor an agent.
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
            f"evaluation-{secrets.token_hex(8)}",
            run_id=run_id,
            generators=run.generators,
            record=_InMemory().record,
            sampling=self._sampling.one,
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
        # A task that is cancelled before its first step runs none of its code.
        keeping.add_done_callback(lambda _: self._forget(opened))
        return opened

    async def _keep(self, opened: OpenSession, deadline_s: float) -> None:
        """Keep a session until its deadline, so that its state can be read after its end, too; then remove it."""
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({opened.over})
                await opened.free()
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        finally:
            self._forget(opened)
            await opened.session.close()

    def _forget(self, opened: OpenSession) -> None:
        opened.end()
        self._open.pop(opened.session_id, None)

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
    """Limits the size of a session for evaluation, whose recording is kept only in memory."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def record(self, number: int, entry: Entry) -> None:
        """Add the size of an entry. Raises SessionFullError if the session exceeds MAX_MESSAGE_BYTES."""
        self._num_bytes += len(msgspec.msgpack.encode(entry))
        if self._num_bytes > MAX_MESSAGE_BYTES:
            raise SessionFullError(f"entry {number} of the session makes it larger than {MAX_MESSAGE_BYTES} bytes")
