"""Runs users' async reward functions on the service's event loop, each call a task of its own under a deadline.

A call that does not end when it is cancelled is left behind, so that it holds up nobody. An async function that blocks
(``time.sleep``, heavy computation) blocks the whole service: such a function should be a plain ``def``.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

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
        self._imports: dict[tuple[str, str], asyncio.Task[RewardFunction]] = {}
        self._overdue: dict[str, Future[RewardFunction]] = {}  # by module
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
        task = asyncio.create_task(_answer(name, function, call), name=f"reward {name}")
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)
        if not task.done():
            raise RewardFailure("timeout", f"took longer than {timeout_s:g} s and was cancelled", seconds=timeout_s)
        seconds = time.monotonic() - started_at
        if task.cancelled():
            raise RewardFailure("error", "cancelled itself", seconds=seconds)
        return task.result(), seconds

    def forget(self, module: str) -> None:
        """Let go of the functions of a module that has a new version; calls under way go on with them."""
        for known in [known for known in self._functions if known[0].partition(":")[0] == module]:
            del self._functions[known]

    async def close(self) -> bool:
        """Cancel the calls left behind, again and again for a second; return whether all of them have ended."""
        for importing in self._imports.values():
            importing.cancel()
        await asyncio.gather(*self._imports.values(), return_exceptions=True)
        for _ in range(_CLOSE_ATTEMPTS):
            if not self._abandoned:
                break
            for task in self._abandoned:
                task.cancel()
            await asyncio.wait(self._abandoned, timeout=1.0 / _CLOSE_ATTEMPTS)
        return not self._abandoned

    async def _function(self, name: str, sources: Sources | None) -> RewardFunction:
        key = (name, "" if sources is None else sources.key)
        known = self._functions.get(key)
        if known is not None:
            return known
        if key not in self._imports:
            importing = asyncio.create_task(self._import(name, sources), name=f"import of reward {name}")
            self._imports[key] = importing
            importing.add_done_callback(lambda done: self._keep(key, done))
        # A call that is cancelled leaves the import to others, which goes on in its thread in any case.
        return await asyncio.shield(self._imports[key])

    def _keep(self, key: tuple[str, str], importing: "asyncio.Task[RewardFunction]") -> None:
        del self._imports[key]
        if not importing.cancelled() and importing.exception() is None:
            self._functions[key] = importing.result()

    async def _import(self, name: str, sources: Sources | None) -> RewardFunction:
        module = name.partition(":")[0]
        async with self._importing:
            if module in self._overdue and not self._overdue[module].done():
                # It holds Python's lock of the module: whoever imports that, in any version, would wait for it, too.
                detail = f"importing {module} took longer than {self._import_timeout_s:g} s and has not ended since"
                raise RewardFailure("timeout", f"{detail}; mend what it waits for, or start the rewarder again")
            loading = self._start_loading(name, sources)
            loaded = asyncio.wrap_future(loading)
            try:
                async with asyncio.timeout(self._import_timeout_s):
                    return await loaded
            except TimeoutError as error:
                self._overdue[module] = loading
                detail = f"importing its module took longer than {self._import_timeout_s:g} s"
                raise RewardFailure("timeout", detail, seconds=self._import_timeout_s) from error
            except (UserError, SystemExit) as error:
                raise RewardFailure("error", str(error)) from error

    def _start_loading(self, name: str, sources: Sources | None) -> "Future[RewardFunction]":
        """Load it in a thread of its own: one that hangs takes no thread from others and does not keep the process."""
        loading: Future[RewardFunction] = Future()
        loading.set_running_or_notify_cancel()

        def load() -> None:
            try:
                loading.set_result(load_function(name, reward_path=self._reward_path, sources=sources))
            except BaseException as error:  # noqa: BLE001  user code: a module may call sys.exit when imported
                loading.set_exception(error)

        threading.Thread(target=load, name=f"import of reward {name}", daemon=True).start()
        return loading


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
