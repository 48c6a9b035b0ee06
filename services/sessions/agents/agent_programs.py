"""Asks agent programs to play a rollout: a function in a worker process, or a program behind a URL.

    function   AgentPool --run(base_url, api_key, prompt, **row)--> its reward, or None
    URL        POST {session_id, base_url, api_key, prompt, row} --> 200 when it is done, {} or {"reward": 1.0}

A run may name only URLs of origins that the operator allows, and redirects are not followed, so the key of a session
goes nowhere else.
"""

import asyncio
import math
from collections.abc import Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Protocol, Self, cast

import httpx
import msgspec

from services.sessions.agents.agent_tasks import AgentCall, AgentPool, DescribedAgent
from services.sessions.origins import require_allowed
from shared.errors import UserError
from shared.messages import PromptGroup
from shared.user_code.call_failure import CallFailure
from shared.user_code.error_text import printable
from shared.user_code.worker_frames import Refused

_LONGEST_S = 7 * 24 * 3600.0
"""The deadline of a worker's call. Silence ends a program long before it."""
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_SHOWN = 500
"""Characters of an answer or an exception in messages. They travel with the rollout."""
_CONNECT_TIMEOUT_S = 5.0


class AgentFailedError(Exception):
    """An agent program failed, could not be reached, or gave an unusable answer. The message says why."""


class Client(Protocol):
    """The session that an agent program gets: the URL and the key with which it asks for the policy's turns."""

    session_id: str
    base_url: str
    api_key: str

    def begin(self) -> None:
        """Note that the program starts now, so that its wait until now does not count as silence."""
        ...


class AgentProgram(Protocol):
    """A user's program that plays one rollout at a time: it asks for the policy's turns, and may return a reward."""

    @property
    def name(self) -> str:
        """The program's name in the run file: ``package.module:function``, or a URL."""
        ...

    async def run(self, client: Client, prompt: PromptGroup) -> float | None:
        """Have the program play one rollout, and wait for its end. Return its reward, or None if it gives none.

        Raises:
            AgentFailedError: The program ended with an error.
        """
        ...


class AgentFunction:
    """An agent program that is a Python function, called in a worker process. Create it with ``load``."""

    def __init__(
        self, name: str, what: DescribedAgent, pool: AgentPool, places: asyncio.Semaphore, *, lane: str
    ) -> None:
        self.name = name
        self._what = what
        self._pool = pool
        self._places = places
        self._lane = lane

    @classmethod
    async def load(
        cls, name: str, pool: AgentPool, places: asyncio.Semaphore, *, lane: str, check_timeout_s: float
    ) -> Self:
        """Import the function from its current file, in a separate process, and check which arguments it takes.

        Args:
            name: ``package.module:function``.
            pool: The worker processes.
            places: One place for each worker. A rollout waits for a place, and this wait does not count as silence.
            lane: The run's id, or ``check`` for a run that is being submitted. Worker processes serve lanes in turn.
            check_timeout_s: Deadline of importing the module, in seconds.

        Raises:
            UserError: The function cannot be used as an agent program.
        """
        what = await pool.inspections.inspect(name, timeout_s=check_timeout_s)
        if isinstance(what, Refused):
            raise UserError(what.detail)
        return cls(name, what, pool, places, lane=lane)

    async def run(self, client: Client, prompt: PromptGroup) -> float | None:
        """Call the function in a worker process; return its reward, or None. If the worker dies, call it once more.

        The second call gets the recorded turns for the same requests.
        """
        call = msgspec.msgpack.encode(AgentCall(client.base_url, client.api_key, prompt.prompt, prompt.columns))
        async with self._places:
            client.begin()
            try:
                answer, _ = await self._pool.call(
                    self.name, call, lane=self._lane, timeout_s=_LONGEST_S, sources=self._what.sources
                )
            except CallFailure as failure:
                raise AgentFailedError(f"{self.name}: {failure.detail}") from failure
        if answer.ended == "raised":
            last_line = answer.trace.rstrip().rpartition("\n")[2]
            raise AgentFailedError(f"{self.name} ended with {printable((last_line or answer.text)[:_MAX_SHOWN])}")
        return _finite(self.name, float(answer.text)) if answer.text else None


class AgentUrl:
    """An agent program behind a URL, which gets one POST request for each rollout.

    Args:
        url: Where the program takes the requests.
        http: Client made by agent_http_client.
        places: Limits the rollouts of all programs behind URLs at a time, because each may have a request under way.
        allowed: The origins that the operator allows.

    Raises:
        UserError: The URL is not allowed.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, places: asyncio.Semaphore, *, allowed: Sequence[str]) -> None:
        require_allowed(url, allowed, option="agent", what="agent programs", variable="HEADRACE_AGENT_ORIGINS")
        self.name = url
        self._http = http
        self._places = places

    async def run(self, client: Client, prompt: PromptGroup) -> float | None:
        """POST the session, the prompt and the row to the URL, and return the reward in the answer, or None."""
        async with self._places:
            return await self._asked(client, prompt)

    async def _asked(self, client: Client, prompt: PromptGroup) -> float | None:
        body = {
            "session_id": client.session_id,
            "base_url": client.base_url,
            "api_key": client.api_key,
            "prompt": prompt.prompt,
            "row": prompt.columns,
        }
        client.begin()
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        try:
            async with self._http.stream(
                "POST", self.name, content=msgspec.json.encode(body), headers=headers
            ) as response:
                answer = b""
                async for part in response.aiter_raw():
                    answer += part
                    if len(answer) > _MAX_ANSWER_BYTES:
                        raise AgentFailedError(f"{self.name} answered more than {_MAX_ANSWER_BYTES} bytes")
        except httpx.HTTPError as error:
            raise AgentFailedError(f"{self.name} cannot be reached: {type(error).__name__}: {error}") from error
        if response.status_code >= 300:
            raise AgentFailedError(f"{self.name} answered {response.status_code}: {_shown(answer)}")
        return self._reward(answer)

    def _reward(self, answer: bytes) -> float | None:
        try:
            said: Any = msgspec.json.decode(answer) if answer.strip() else None
            reward = cast("dict[str, Any]", said).get("reward") if isinstance(said, dict) else said
            return None if reward is None else _finite(self.name, msgspec.convert(reward, float))
        except (ValueError, RecursionError) as error:
            raise AgentFailedError(
                f'{self.name} answered {_shown(answer)}; answer nothing, or JSON such as {{"reward": 1.0}}'
            ) from error


def agent_http_client() -> httpx.AsyncClient:
    """Return the HTTP client for agent programs behind URLs.

    Answers have no deadline here. The run's option ``agent_timeout_s`` bounds the silence of a program. Rollouts share
    no cookies, and no connections, which a server may close just when they are used again.
    """
    return httpx.AsyncClient(
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        follow_redirects=False,
        trust_env=False,
    )


def _finite(name: str, reward: float) -> float:
    if not math.isfinite(reward):
        raise AgentFailedError(f"{name} reported the reward {reward}, which is not a finite number")
    return reward


def _shown(answer: bytes) -> str:
    return printable(answer[:_MAX_SHOWN].decode(errors="replace"))
