"""Runs users' async reward functions on the service's event loop, each call a task of its own under a deadline.

A call that does not end when it is cancelled is left behind, so that it holds up nobody. An async function that blocks
(``time.sleep``, heavy computation) blocks the whole service: such a function should be a plain ``def``.
"""

import asyncio
import time
from collections.abc import Sequence

from services.rewarder.function_loading import load_function
from services.rewarder.module_sources import Sources
from services.rewarder.reward_call import (
    CallError,
    RewardCall,
    RewardFunction,
    arguments_for,
    describe,
    everyone,
    judge,
    own_copy,
    users_trace,
)
from services.rewarder.worker_frames import Answer
from services.rewarder.worker_pool import RewardFailure
from shared.errors import UserError

_CLOSE_ATTEMPTS = 10


class LoopFunctions:
    """The async functions that were imported into this process; a worker has imported each of them before."""

    def __init__(self, *, reward_path: Sequence[str], import_timeout_s: float) -> None:
        self._reward_path = tuple(reward_path)
        self._import_timeout_s = import_timeout_s
        self._functions: dict[tuple[str, str], RewardFunction] = {}
        self._abandoned: set[asyncio.Task[Answer]] = set()
        # Importing one module in several threads at once, each invalidating the finders' caches, can miss the file.
        self._importing = asyncio.Lock()

    async def call(
        self, name: str, call: RewardCall, *, timeout_s: float, sources: Sources | None
    ) -> tuple[Answer, float]:
        """Run one async reward function; return its answer and the seconds it ran.

        ``sources`` is the version of its module.

        Raises:
            RewardFailure: It cannot be imported, or its deadline passed.
        """
        function = await self._function(name, sources)
        started_at = time.monotonic()
        task = asyncio.create_task(_answer(name, function, own_copy(call)), name=f"reward {name}")
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)
        if not task.done():
            raise RewardFailure("timeout", f"took longer than {timeout_s:g} s and was cancelled")
        if task.cancelled():
            raise RewardFailure("error", "cancelled itself")
        return task.result(), time.monotonic() - started_at

    def forget(self, module: str) -> None:
        """Let go of the functions of a module that has a new version; calls under way go on with them."""
        for known in [known for known in self._functions if known[0].partition(":")[0] == module]:
            del self._functions[known]

    async def close(self) -> bool:
        """Cancel the calls left behind, again and again for a second; return whether all of them have ended."""
        for _ in range(_CLOSE_ATTEMPTS):
            if not self._abandoned:
                break
            for task in self._abandoned:
                task.cancel()
            await asyncio.wait(self._abandoned, timeout=1.0 / _CLOSE_ATTEMPTS)
        return not self._abandoned

    async def _function(self, name: str, sources: Sources | None) -> RewardFunction:
        key = (name, "" if sources is None else sources.key)
        async with self._importing:
            if key not in self._functions:
                self._functions[key] = await self._import(name, sources)
            return self._functions[key]

    async def _import(self, name: str, sources: Sources | None) -> RewardFunction:
        try:
            async with asyncio.timeout(self._import_timeout_s):
                return await asyncio.to_thread(load_function, name, reward_path=self._reward_path, sources=sources)
        except TimeoutError as error:
            detail = f"importing its module took longer than {self._import_timeout_s:g} s"
            raise RewardFailure("timeout", detail) from error
        except (UserError, SystemExit) as error:
            raise RewardFailure("error", str(error)) from error


async def _answer(name: str, function: RewardFunction, call: RewardCall) -> Answer:
    num_completions = len(call.completions)
    try:
        return Answer(judge(await function(**arguments_for(function, call, name=name)), num_completions))
    except CallError as error:
        return Answer(everyone(num_completions, "error", str(error)))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  user code: SystemExit here would end the service
        return Answer(everyone(num_completions, "error", describe(error)), users_trace(error))
