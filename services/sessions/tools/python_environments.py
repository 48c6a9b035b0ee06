"""Runs environments that users wrote in Python: one object for each rollout, in a process of its own.

    factory --inspect, in a process of its own--> schemas of its tools
    rollout --start--> process --> reset(row) --> tools, one after the other --> state --> reward
                          |
                          +--after the last call, in the background--> clean-up code, at most two seconds --> killed

A process that dies takes its state along, so its calls are not repeated: the rollout is lost.
"""

import asyncio
import contextlib
import json
import math
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self

import msgspec

from services.sessions.tools.environment_state import EnvironmentState, read_state
from services.sessions.tools.environment_tasks import (
    CLEAN_UP,
    IMPORT,
    RESET,
    REWARD,
    STATE,
    DescribedEnvironment,
    EnvironmentTasks,
    MethodCall,
)
from services.sessions.tools.tool_answer import ListResult, ToolAnswer
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from shared.errors import UserError
from shared.user_code.call_failure import CallFailure
from shared.user_code.error_text import printable
from shared.user_code.fork_server import WorkerStartError
from shared.user_code.inspections import Inspections
from shared.user_code.limits import Limits
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused, Task
from shared.user_code.worker_process import WorkerDiedError, WorkerProcess

_Process = WorkerProcess[ToolAnswer, DescribedEnvironment]
_NUM_INSPECTIONS = 2
_CLEAN_UP_S = 2.0
"""Longest time of an environment's clean-up code."""


class PythonEnvironment:
    """The environment of one rollout: a user's Python object in a process of its own. ``started`` creates it."""

    is_over = False
    """Always False: a TRL environment cannot refuse further calls. It can only tell the model that it is done."""

    def __init__(
        self, factory: str, what: DescribedEnvironment, process: _Process, *, timeout_s: float, import_timeout_s: float
    ) -> None:
        self._factory = factory
        self._what = what
        self._process = process
        self._timeout_s = timeout_s
        self._import_timeout_s = import_timeout_s
        self._tools = frozenset(schema["function"]["name"] for schema in what.schemas)
        self._is_free = asyncio.Lock()
        self._was_asked = False

    def has(self, name: str) -> bool:
        """Whether the environment's class has a tool of this name."""
        return name in self._tools

    async def reset(self, row: Mapping[str, Any], *, rollout_id: str, group_id: str) -> str:
        """Make the environment, call its ``reset`` with the row, and return the text to append to the prompt.

        Random numbers are seeded with the rollout's id, so that they differ between the rollouts of a group, as in TRL.
        """
        del group_id
        return await self._own(MethodCall(RESET, dict(row), rollout_id))

    async def reward(self) -> float | None:
        """Call ``get_reward``; return None if it is not defined, or returned None or NaN.

        Raises:
            ToolLostError: It raised an exception, or returned an infinite number.
        """
        if not self._what.has_reward or not (shown := await self._own(MethodCall(REWARD))):
            return None
        reward = float(shown)
        if math.isnan(reward):  # means to TRL, too, that it does not apply
            return None
        if math.isinf(reward):
            raise ToolLostError(f"{self._factory}: {REWARD} returned {reward}")
        return reward

    async def state(self) -> EnvironmentState:
        """Return the environment's public attributes, as far as JSON can express them.

        Raises:
            ToolLostError: They cannot be read.
        """
        text = await self._own(MethodCall(STATE))
        try:
            return read_state(text)
        except ValueError as error:
            raise ToolLostError(f"{self._factory}: its attributes cannot be read: {error}") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str | ListResult:
        """Call a method of the environment with the model's arguments. Simultaneous calls run one after the other.

        Raises:
            ToolError: The environment does not have this tool, or the method raised an exception.
            ToolLostError: The call has no result, so the rollout is lost.
        """
        if not self.has(name):
            raise ToolError(f"Tool {name} not found.")
        answer = await self._ask(MethodCall(name, json.dumps(arguments)))
        if answer.ended == "raised":
            raise ToolError(answer.text)
        return answer.result

    async def import_module(self) -> None:
        """Import the environment's module in its process, under the deadline of imports.

        Raises:
            ToolLostError: The module was not imported.
        """
        await self._own(MethodCall(IMPORT))

    async def clean_up(self) -> None:
        """Run the environment's clean-up code (``__del__``, ``atexit``), for at most two seconds, as the last call."""
        if self._was_asked:
            with contextlib.suppress(ToolLostError, TimeoutError):
                async with asyncio.timeout(_CLEAN_UP_S):
                    await self._ask(MethodCall(CLEAN_UP))

    async def _own(self, call: MethodCall) -> str:
        answer = await self._ask(call)
        if answer.ended == "raised":
            raise ToolLostError(f"{self._factory}: {call.method} ended with an exception: {printable(answer.text)}")
        return answer.text

    async def _ask(self, call: MethodCall) -> ToolAnswer:
        sources = self._what.sources
        task = Task(self._factory, msgspec.Raw(msgspec.msgpack.encode(call)), self._timeout_s, self._import_timeout_s)
        async with self._is_free:
            self._was_asked = True
            if sources is not None:
                task = msgspec.structs.replace(task, version=sources.key, sources=self._process.give(sources))
            try:
                answer, _ = await self._process.answer(task)
            except CallFailure as failure:
                await self._process.kill()
                raise ToolLostError(f"{self._factory}: {call.method} {failure.detail}") from failure
            except WorkerDiedError as error:
                how = await self._process.kill()
                raise ToolLostError(f"{self._factory}: {call.method}: its process died: {error.why or how}") from error
            except BaseException:  # cancelled: the next reply would be the answer to this call
                await self._process.kill()
                raise
        if isinstance(answer, Refused):
            raise ToolLostError(f"{self._factory}: {answer.detail}")
        return answer


class PythonEnvironments:
    """Starts a process with a user's environment for each rollout of a run. Create it with ``load``."""

    def __init__(
        self,
        factory: str,
        what: DescribedEnvironment,
        places: Places,
        limits: Limits,
        *,
        timeout_s: float,
        import_timeout_s: float,
        at_once: asyncio.Semaphore,
    ) -> None:
        self._factory = factory
        self._what = what
        self._places = places
        self._limits = limits
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._import_timeout_s = import_timeout_s
        self._ending = set[asyncio.Task[None]]()
        self._importing = asyncio.Semaphore(os.cpu_count() or 1)
        """Imports compete for the processors, and each has a deadline."""

    @classmethod
    async def load(
        cls,
        factory: str,
        places: Places,
        limits: Limits,
        *,
        timeout_s: float,
        import_timeout_s: float,
        at_once: asyncio.Semaphore,
    ) -> Self:
        """Import a factory from its current files, make one environment in a separate process, and read its tools.

        Args:
            factory: ``package.module:function``, or ``package.module:Class``.
            places: The directories and packages that the factory may come from.
            limits: The limits of each environment's process.
            timeout_s: Deadline of each call, in seconds.
            import_timeout_s: Deadline of importing the module and making one environment, in seconds.
            at_once: Limits the environments that exist at a time. All types of environments of a run share it.

        Raises:
            UserError: The factory cannot be used. The message says what to do.
        """
        inspections = Inspections[ToolAnswer, DescribedEnvironment](
            limits, EnvironmentTasks(places), num_at_once=_NUM_INSPECTIONS
        )
        module, _, name = factory.partition(":")
        step = f"importing {module} and making a {name}"
        what = await inspections.inspect(factory, timeout_s=import_timeout_s, step=step)
        if isinstance(what, Refused):
            raise UserError(what.detail)
        return cls(
            factory,
            what,
            places,
            limits,
            timeout_s=timeout_s,
            import_timeout_s=import_timeout_s,
            at_once=at_once,
        )

    @property
    def name(self) -> str:
        """The environments' class, as ``module:Class``."""
        return self._what.name

    @property
    def has_reward(self) -> bool:
        """Whether the environments' class has a method ``get_reward``."""
        return self._what.has_reward

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the class's public methods, without ``reset`` and ``get_reward``, in OpenAI's format."""
        return self._what.schemas

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncGenerator[PythonEnvironment]:
        """Start a process for one rollout's environment, and end it after the block. Waits while the limit is reached.

        Raises:
            ToolLostError: No process could be started, or the environment's module was not imported.
        """
        await self._at_once.acquire()
        try:
            process = await _Process.start(self._limits, EnvironmentTasks(self._places))
        except BaseException as error:
            self._at_once.release()
            if isinstance(error, WorkerStartError):
                raise ToolLostError(f"{self._factory}: no process could be started: {error}") from error
            raise
        environment = PythonEnvironment(
            self._factory,
            self._what,
            process,
            timeout_s=self._timeout_s,
            import_timeout_s=self._import_timeout_s,
        )
        try:
            async with self._importing:
                await environment.import_module()
            yield environment
        finally:
            ending = asyncio.create_task(self._end(environment, process), name=f"end of a {self._factory}")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.sleep(0)  # a task that is cancelled before it has begun would kill nothing

    async def _end(self, environment: PythonEnvironment, process: _Process) -> None:
        try:
            await environment.clean_up()
        finally:
            await process.kill()
            self._at_once.release()
