"""Runs users' async reward functions on the event loop of their module. Each call is a task with a deadline.

A call that does not end when it is cancelled is abandoned, so that it delays no other call. An async function that
blocks (``time.sleep``, heavy computation) delays only functions of its own module, until their deadlines
(module_loops.py). But all threads share Python's global interpreter lock: C code that keeps it, such as a runaway
regular expression, blocks the whole service.
"""

import asyncio
import functools
import time
from concurrent.futures import Future

from services.rewarder.logged_values import LoggedValues
from services.rewarder.python_functions.module_loop import NoAnswer
from services.rewarder.python_functions.module_loops import ModuleLoops
from services.rewarder.reward_answer import Answer
from services.rewarder.reward_call import (
    CallError,
    RewardCall,
    RewardFunction,
    arguments_for,
    everyone,
    judge,
    own_copy,
    with_logged,
)
from services.rewarder.reward_failure import RewardFailure
from shared.errors import UserError
from shared.service.daemon_thread import started
from shared.user_code.error_text import describe, origin_of, users_trace
from shared.user_code.function_loading import load_function
from shared.user_code.module_sources import Sources, finder, forget_imported
from shared.user_code.places import Places


class LoopFunctions:
    """Imports users' async reward functions into this process, and calls them on the event loops of their modules.

    Another process has imported and inspected each function before.
    """

    def __init__(self, *, places: Places, import_timeout_s: float) -> None:
        self._places = places
        self._import_timeout_s = import_timeout_s
        self._functions: dict[tuple[str, str], RewardFunction] = {}
        self._loops = ModuleLoops(self._import_anew)
        self._to_import_anew: set[str] = set()
        self._imports: dict[tuple[str, str], asyncio.Task[RewardFunction]] = {}
        self._overdue: dict[str, Future[RewardFunction]] = {}  # by module
        # Concurrent imports of one module in several threads invalidate the finders' caches and can miss the file.
        self._importing = asyncio.Lock()

    async def call(
        self, name: str, call: RewardCall, *, timeout_s: float, sources: Sources | None
    ) -> tuple[Answer, float]:
        """Run an async reward function; return its answer and the seconds that it ran.

        ``sources`` is the version of its module; None for a module without a file.

        Raises:
            RewardFailure: The function cannot be imported, is late or cancels itself, or its module gets no event loop.
        """
        function = await self._function(name, sources)
        loop = self._loops.of(name.partition(":")[0])
        started_at = time.monotonic()
        answer = await loop.run(name, functools.partial(answer_of, name, function, own_copy(call)), timeout_s=timeout_s)
        if answer is NoAnswer.LATE:
            raise RewardFailure("timeout", self._loops.why_late(loop, timeout_s), seconds=timeout_s)
        seconds = time.monotonic() - started_at
        if answer is NoAnswer.CANCELLED:
            raise RewardFailure("error", "cancelled itself", seconds=seconds)
        return answer, seconds

    def forget(self, module: str) -> None:
        """Forget the functions of a module that has a new version. Calls under way continue in the old version."""
        self._let_go(module)
        self._loops.forget(module)

    def end(self, module: str) -> None:
        """Forget a module that is no longer used, and end its event loop."""
        self._let_go(module)
        self._to_import_anew.discard(module)
        self._loops.end(module)
        finder().forget(module)

    async def close(self) -> bool:
        """Cancel all tasks of async functions, repeatedly for a second; return whether all of them have ended."""
        for importing in self._imports.values():
            importing.cancel()
        await asyncio.gather(*self._imports.values(), return_exceptions=True)
        return await self._loops.close()

    def _let_go(self, module: str) -> None:
        for known in [known for known in self._functions if known[0].partition(":")[0] == module]:
            del self._functions[known]

    def _import_anew(self, module: str) -> None:
        """Mark a module to be imported again, because clients and locks in its globals belong to its old event loop."""
        self._let_go(module)
        self._to_import_anew.add(module)

    async def _function(self, name: str, sources: Sources | None) -> RewardFunction:
        key = (name, "" if sources is None else sources.key)
        known = self._functions.get(key)
        if known is not None:
            return known
        if key not in self._imports:
            importing = asyncio.create_task(self._import(name, sources), name=f"import of reward {name}")
            self._imports[key] = importing
            importing.add_done_callback(lambda done: self._keep(key, done))
        # A cancelled call does not cancel the import, which other calls may need and which a thread cannot stop.
        return await asyncio.shield(self._imports[key])

    def _keep(self, key: tuple[str, str], importing: "asyncio.Task[RewardFunction]") -> None:
        del self._imports[key]
        if not importing.cancelled() and importing.exception() is None:
            self._functions[key] = importing.result()

    async def _import(self, name: str, sources: Sources | None) -> RewardFunction:
        module = name.partition(":")[0]
        async with self._importing:
            if module in self._overdue and not self._overdue[module].done():
                # The old import holds Python's lock of the module, so importing any version of it would wait too.
                detail = f"importing {module} took longer than {self._import_timeout_s:g} s and has not ended since"
                raise RewardFailure("timeout", f"{detail}; fix the cause of the wait, or restart the rewarder")
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
        """Load a function in a daemon thread, and return its future. An import that hangs does not prevent the exit."""
        module = name.partition(":")[0]
        if sources is not None and module in self._to_import_anew:
            forget_imported(sources)
        self._to_import_anew.discard(module)
        loop = self._loops.of(module)

        def load() -> RewardFunction:
            loop.adopt_thread()  # a worker has a loop too when it imports the module for a check
            return load_function(name, places=self._places, sources=sources)

        return started(load, name=f"import of reward {name}")


async def answer_of(name: str, function: RewardFunction, call: RewardCall) -> Answer:
    """Call an async reward function, and return its answer: ``error`` if it raised. Only a cancellation is raised."""
    num_completions = len(call.completions)
    try:
        logged = LoggedValues()
        returned = await function(**arguments_for(function, call, name=name, logged=logged))
        return Answer(with_logged(judge(returned, num_completions), logged))
    except CallError as error:
        return Answer(everyone(num_completions, "error", str(error)))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  user code: SystemExit here would end the service
        verdicts = everyone(num_completions, "error", describe(error))
        return Answer(verdicts, users_trace(error), origin=origin_of(error))
