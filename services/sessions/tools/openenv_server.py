"""Plays rollouts in the environments of an OpenEnv server: each rollout has a session of its own.

    server --openenv_listing.py--> schemas of its MCP tools, or of one tool ``step``, which takes an action
    rollout --open--> session --> reset(row) --> steps, one after the other --> state --> closed

A session's state is in the server, and dies with it or with the connection, so no call is repeated. The rollout's
reward is the reward of its last observation that has one, and 0 without any. A step that is ``done`` ends the rollout.
"""

import asyncio
import contextlib
import json
import math
import time
import zlib
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any, Self

import httpx
import msgspec

from services.sessions.origins import origin_of
from services.sessions.tools.environment_state import EnvironmentState, read_state, state_of
from services.sessions.tools.openenv_listing import OpenEnvListing, list_tools
from services.sessions.tools.openenv_session import NoPlaceError, OpenEnvSession, RefusedMessageError
from services.sessions.tools.tool_answer import for_model
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from shared.user_code.error_text import describe

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Pauses between two attempts to open a session; doubled after each."""
_MAX_SEED = 0x7FFFFFFF


class _Observed(msgspec.Struct):
    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False


class _ToolError(msgspec.Struct):
    message: str


class _Called(msgspec.Struct):
    """The observation after a call of an MCP tool: its result or its error."""

    result: Any = None
    error: _ToolError | None = None


class _Block(msgspec.Struct):
    type: str
    text: str | None = None


class _ToolResult(msgspec.Struct):
    """The result of an MCP tool as a list of content blocks."""

    content: list[_Block]
    is_error: bool = False


class OpenEnvEnvironment:
    """The environment of one rollout: a session of an OpenEnv server. ``OpenEnvServer.started`` creates it."""

    def __init__(self, session: OpenEnvSession, server: "OpenEnvServer") -> None:
        self._session = session
        self._server = server
        self._last = _Observed({})
        self._rewards: list[float] = []
        self._is_free = asyncio.Lock()

    @property
    def is_over(self) -> bool:
        """Whether the last observation was ``done``, so that the rollout ends."""
        return self._last.done

    def has(self, name: str) -> bool:
        """Whether the server listed a tool of this name."""
        return name in self._server.tools

    async def reset(self, row: Mapping[str, Any], *, rollout_id: str, group_id: str) -> str:
        """Reset the server's environment with the row, and return the observation as text to append to the prompt.

        All rollouts of a group get the same seed, so that they have the same task, unless the row has its own seed.
        """
        named = {"seed": zlib.crc32(group_id.encode()) & _MAX_SEED, "episode_id": rollout_id}
        try:
            text = await self._observe({"type": "reset", "data": named | dict(row)})
        except (RefusedMessageError, ToolError) as error:
            raise ToolLostError(f"{self._server.url}: reset: {error}") from error
        return f"\n\n{text}" if text else ""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Make one step of the environment, or call its MCP tool, and return the observation as text.

        Raises:
            ToolError: The episode is over, the environment does not accept the action, or the MCP tool failed.
            ToolLostError: The step has no result, so the rollout is lost.
        """
        called = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        action = called if self._server.has_mcp_tools else dict(arguments)
        async with self._is_free:
            if self.is_over:
                raise ToolError("The episode is over.")
            try:
                return await self._observe({"type": "step", "data": action})
            except RefusedMessageError as error:
                raise ToolError(for_model(str(error))) from error

    async def state(self) -> EnvironmentState:
        """Return the server's state with all rewards, the last observation, and whether the episode is done."""
        try:
            state = await self._session.ask({"type": "state"})
        except RefusedMessageError as error:
            raise ToolLostError(f"{self._server.url}: state: {error}") from error
        observed = {
            "reward": await self.reward(),
            "rewards": self._rewards,
            "done": self._last.done,
            "observation": self._last.observation,
        }
        return read_state(state_of(SimpleNamespace(**state | observed)))

    async def reward(self) -> float | None:
        """Return the reward of the last observation that had one; 0 without any."""
        return self._rewards[-1] if self._rewards else 0.0

    async def _observe(self, message: dict[str, Any]) -> str:
        data = await self._session.ask(message)
        try:
            observed = self._last = msgspec.convert(data, _Observed)
            observed.observation.pop("metadata", None)  # only newer servers send it
            if observed.reward is not None:
                self._rewards.append(_finite(observed.reward))
            return _text(observed.observation, is_of_tool=self._server.has_mcp_tools)
        except (ValueError, RecursionError) as error:
            raise ToolLostError(
                f"{self._server.url}: {message['type']}: not an observation: {describe(error)}"
            ) from error


class OpenEnvServer:
    """Opens a session of an OpenEnv server for each rollout of a run. Create it with ``load``."""

    has_reward = True

    def __init__(
        self, url: str, listing: OpenEnvListing, *, timeout_s: float, at_once: asyncio.Semaphore, wait_s: float
    ) -> None:
        self.url = url
        self.name = listing.name
        self.schemas = listing.schemas
        self.tools = frozenset(schema["function"]["name"] for schema in listing.schemas)
        self.has_mcp_tools = listing.has_mcp_tools
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._at_once = at_once
        self._line = asyncio.Lock()
        self._num_open = 0
        self._no_place_since_s = time.monotonic()

    @classmethod
    async def load(
        cls, url: str, *, timeout_s: float, check_timeout_s: float, at_once: asyncio.Semaphore, wait_s: float
    ) -> Self:
        """Ask a server for its environment's name and tools.

        Args:
            url: The server's URL, as OpenEnv's clients take it. The caller has checked that its origin is allowed.
            timeout_s: Deadline of each call, in seconds.
            check_timeout_s: Deadline of the requests for name and tools, in seconds.
            at_once: Limits the sessions that are open at a time.
            wait_s: How long rollouts wait, in seconds, while the server has no free session and the run has none open.

        Raises:
            UserError: The server cannot be used. The message says what to do.
        """
        # Made of its parts as they were checked: another parser might find another host in the URL.
        base = origin_of(url) + httpx.URL(url).path.rstrip("/")
        listing = await list_tools(base, timeout_s=check_timeout_s)
        return cls(base, listing, timeout_s=timeout_s, at_once=at_once, wait_s=wait_s)

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncGenerator[OpenEnvEnvironment]:
        """Open a session for one rollout, and close it after the block. Waits while no session is free.

        Raises:
            ToolLostError: No session became free in time, or the server did not make an environment.
        """
        async with self._at_once:
            session = await self._opened()
            self._num_open += 1
            try:
                yield OpenEnvEnvironment(session, self)
            finally:
                try:
                    await session.close()
                finally:
                    self._num_open -= 1
                    self._no_place_since_s = time.monotonic()  # the time limit of those that wait runs from here

    async def _opened(self) -> OpenEnvSession:
        """Open a session. While the server has none free, one rollout tries again, and the others wait behind it.

        The time limit runs only while the run has no open session, because each one that ends frees a place.
        """
        if not self._line.locked():
            try:
                return await self._open()
            except NoPlaceError:
                self._no_place_since_s = time.monotonic()
        async with self._line:
            pause_s = _FIRST_PAUSE_S
            while True:
                try:
                    session = await self._open()
                except NoPlaceError as error:
                    if self._num_open:
                        self._no_place_since_s = time.monotonic()
                    elif time.monotonic() - self._no_place_since_s > self._wait_s:
                        raise ToolLostError(
                            f"{self.url}: no session could be opened for {self._wait_s:g} s: {error}"
                        ) from error
                else:
                    self._no_place_since_s = time.monotonic()
                    return session
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open(self) -> OpenEnvSession:
        return await OpenEnvSession.open(self.url, timeout_s=self._timeout_s)


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {reward}")
    return float(reward)


def _text(observation: Mapping[str, Any], *, is_of_tool: bool) -> str:
    """Return an observation as text for the model: the texts of an MCP tool's result, or else the observation as JSON.

    Args:
        observation: The observation.
        is_of_tool: Whether it may be the result of an MCP tool, because the environment has such tools.

    Raises:
        ToolError: The MCP tool failed.
    """
    if not is_of_tool or "tool_name" not in observation:
        return for_model(_as_json(observation)) if observation else ""
    called = msgspec.convert(observation, _Called)
    if called.error is not None:
        raise ToolError(for_model(called.error.message))
    try:
        result = msgspec.convert(called.result, _ToolResult)
    except msgspec.ValidationError:  # a value of the environment's own
        return for_model(called.result if isinstance(called.result, str) else _as_json(called.result))
    text = for_model(
        "\n".join(f"[{block.type}, not shown]" if block.text is None else block.text for block in result.content)
    )
    if result.is_error:
        raise ToolError(text)
    return text


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
