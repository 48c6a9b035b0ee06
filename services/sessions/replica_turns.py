"""Has one generator replica sample turns. Turns that are requested at the same time share one HTTP request.

    turn A --> sent
    turn B --+                     head of the answer
    turn C --+--> wait meanwhile ---------------------> B, C, D sent together
    turn D --+                     turn A, a line of the answer

A turn is one assistant message. A generator sends the head of its answer before it samples, so a turn waits neither
for others to be sampled nor for others that may come. Equal turns, such as the first turns of a group's rollouts, are
one TurnRequest. If an answer breaks off, its remaining turns fail, and their callers ask again.

A caller may give up its turn. The generator still samples it to its end, unless all other turns of its request have
been answered or given up: then the connection is closed, which aborts the rest.
"""

import asyncio
import contextvars
import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import httpx
import msgspec

from shared.errors import MessageError, UnavailableError
from shared.message_invariants import MAX_GENERATIONS
from shared.service.tls import why_away
from shared.turns import (
    MAX_TURN_BYTES,
    TURN_PATH,
    RefusalKind,
    SampledTurn,
    TurnAnswer,
    TurnRefusedError,
    TurnRequest,
    decode_turn_answer,
    encode_turn_requests,
)

LOOK_EVERY_S: Final = 1.0
"""Seconds between two checks of which replicas are alive."""
_MAX_TURNS = MAX_GENERATIONS
"""Most turns of one request, which may all be equal."""
_BYTES_BESIDE = 1024 + 64
"""Most bytes of a request's id, its number of turns, and what is between two requests."""


class NotThereError(UnavailableError):
    """A replica cannot sample a turn now; another one may."""


class FailedError(NotThereError):
    """A replica failed while it sampled a turn. If the turn is the cause, every other replica will fail, too."""


class BrokenOffError(NotThereError):
    """A replica died, or stopped serving the run, after it had begun a turn. The turn may be the cause."""


@dataclass(eq=False)
class _Asked:
    """A turn that a caller waits for. ``body`` has a placeholder for the id, so equal turns have equal bodies."""

    request: TurnRequest
    body: bytes
    answer: "asyncio.Future[TurnAnswer | Exception]"
    """An exception is a result, too: a future with an exception that nothing reads causes a warning."""
    has_begun: bool = False
    """Whether the replica has sent the head of its answer."""

    def end(self, answer: TurnAnswer | Exception) -> None:
        if not self.answer.done():  # done already if its caller has given it up
            self.answer.set_result(answer)


_Batch = list[list[_Asked]]
"""The turns of one HTTP request, equal ones together."""


class ReplicaTurns:
    """Sends requests for turns to one generator replica, and returns each answer to its caller.

    Args:
        http: Client made by turn_http_client.
        name: The replica's id.
        url: The replica's address.
    """

    def __init__(self, http: httpx.AsyncClient, *, name: str, url: str) -> None:
        self.url = url
        self._http = http
        self._what = f"generator {name} at {url}"
        self._waiting: deque[_Asked] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._exchanges: set[asyncio.Task[None]] = set()
        # Logs do not name the group of the first caller.
        self._context = contextvars.copy_context()

    async def ask(self, request: TurnRequest, *, is_there: Callable[[], Awaitable[bool]]) -> SampledTurn:
        """Have the replica sample one turn. Stop waiting once ``is_there`` returns False: the replica is gone.

        Raises:
            TurnRefusedError: No generator can continue this conversation.
            NotThereError: The turn was not sampled here; FailedError or BrokenOffError if the turn may be the cause.
        """
        body = encode_turn_requests([msgspec.structs.replace(request, request_id="-")])
        asked = _Asked(request, body, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name=f"send to {self._what}", context=self._context)
        try:
            while not (await asyncio.wait({asked.answer}, timeout=LOOK_EVERY_S))[0]:
                if not await is_there():
                    raise (BrokenOffError if asked.has_begun else NotThereError)(f"{self._what} is gone")
        finally:
            asked.answer.cancel()
        return self._sampled(asked.answer.result())

    def _sampled(self, answer: TurnAnswer | Exception) -> SampledTurn:
        if isinstance(answer, Exception):
            raise answer
        if answer.turn is not None:
            return answer.turn
        assert answer.refusal is not None
        kind, reason = answer.refusal.kind, answer.refusal.reason
        if kind == "failed":
            raise FailedError(f"{self._what} failed: {reason}")
        if kind == "unavailable":
            raise BrokenOffError(f"{self._what} cannot sample a turn: {reason}")
        raise TurnRefusedError(f"{self._what} refused a turn: {reason}", kind=kind)

    async def _send_all(self) -> None:
        try:
            while batch := self._next_batch():
                await self._begin(batch)
        finally:
            self._sender = None

    def _next_batch(self) -> _Batch:
        """Remove and return the turns that have waited longest, as many as fit into one request; [] if none waits."""
        batch: dict[bytes, list[_Asked]] = {}
        num_turns = num_bytes = 0
        while self._waiting and num_turns < _MAX_TURNS:
            asked = self._waiting[0]
            if not asked.answer.done():
                if asked.body not in batch:
                    num_bytes += len(asked.body) + _BYTES_BESIDE
                    if batch and num_bytes > MAX_TURN_BYTES:
                        break
                batch.setdefault(asked.body, []).append(asked)
                num_turns += 1
            self._waiting.popleft()
        return [*batch.values()]

    async def _begin(self, batch: _Batch) -> None:
        """Send a batch of turns. Return when the head of the answer has arrived, or the batch has failed."""
        begun = asyncio.Event()
        exchange = asyncio.create_task(self._exchange(batch, begun), name=f"turns of {self._what}")
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        answers = [asked.answer for asked in itertools.chain(*batch)]

        def end_if_given_up(_: object) -> None:
            if all(answer.done() for answer in answers) and any(answer.cancelled() for answer in answers):
                exchange.cancel()

        for answer in answers:
            answer.add_done_callback(end_if_given_up)
        exchange.add_done_callback(lambda _: begun.set())
        await begun.wait()

    async def _exchange(self, batch: _Batch, begun: asyncio.Event) -> None:
        failure: Exception
        try:
            await self._read_answers(batch, begun)
            failure = BrokenOffError(f"{self._what} ended its answer early")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            kind = BrokenOffError if begun.is_set() else NotThereError
            failure = kind(f"{self._what} cannot be reached: {why_away(error, url=self.url)}")
        except Exception as error:  # noqa: BLE001  the callers raise it
            failure = error
        if isinstance(failure, TurnRefusedError) and len(batch) > 1:
            # Only one of them may be the cause, or only their number.
            await self._begin(batch[: len(batch) // 2])
            await self._begin(batch[len(batch) // 2 :])
            return
        for asked in itertools.chain(*batch):
            asked.end(failure)

    async def _read_answers(self, batch: _Batch, begun: asyncio.Event) -> None:
        """Send a batch of turns in one HTTP request, and give each answer to a caller that waits for it.

        Raises:
            TurnRefusedError: The whole request was refused.
            NotThereError, httpx.HTTPError: The turns without an answer were not sampled.
        """
        body = encode_turn_requests([_joined(equal) for equal in batch])
        headers = {"content-type": "application/json"}
        async with self._http.stream("POST", f"{self.url}{TURN_PATH}", content=body, headers=headers) as response:
            if response.status_code != 200:
                raise self._problem(response.status_code, _fields(await response.aread()))
            begun.set()
            for begun_turn in itertools.chain(*batch):
                begun_turn.has_begun = True
            async for line in _lines(response):
                try:
                    answer = decode_turn_answer(line)
                    asked_for = batch[answer.index]
                except (MessageError, IndexError) as error:
                    raise NotThereError(
                        f"{self._what} answered in an unknown form; do both have the same headrace version? {error}"
                    ) from error
                if asked := next((asked for asked in asked_for if not asked.answer.done()), None):
                    asked.end(answer)

    def _problem(self, status: int, problem: dict[str, Any]) -> Exception:
        """Return the error for an answer with a status other than 200, which concerns all turns of a batch."""
        detail = problem.get("detail") or f"HTTP {status}"
        if status in (400, 413, 422):  # without a kind, the server's limits refused the body unread
            without_kind: RefusalKind = "malformed" if status == 400 else "context_length"
            return TurnRefusedError(f"{self._what} refused a turn: {detail}", kind=problem.get("kind", without_kind))
        if status == 500:
            return FailedError(f"{self._what} failed: {detail}")
        if status == 401:
            detail = "HTTP 401: its internal key is another one; give both the same HEADRACE_INTERNAL_KEY"
        return NotThereError(f"{self._what} cannot sample a turn: {detail}")


def _joined(equal: list[_Asked]) -> TurnRequest:
    """Return equal turns as one TurnRequest for ``n`` samples. Its id is new in each attempt."""
    request = equal[0].request
    return msgspec.structs.replace(request, request_id=f"{request.request_id}-{secrets.token_hex(4)}", n=len(equal))


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the lines of an answer. httpx's aiter_lines also splits at characters that occur within JSON strings."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def _fields(body: bytes) -> dict[str, Any]:
    try:
        problem = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return cast("dict[str, Any]", problem) if isinstance(problem, dict) else {}
