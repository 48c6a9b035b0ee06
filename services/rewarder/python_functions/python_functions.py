"""Inspects and calls reward functions in Python, both built-ins and the user's.

    async function  -> the event loop of its module, under a deadline
    sync function   -> a worker, under a deadline
    built-in        -> a worker, under a deadline

A module has one version at a time, kept in memory (module_sources.py). It is read from the files at the first import,
at a check, or after an edit that can be imported (module_watch.py). All functions of one prompt group use the same
version. A call ends in the version that it began with.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.rewarder.built_ins.built_in_rewards import built_in, check_name
from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.rate_limits import FunctionLimits
from services.rewarder.python_functions.reward_tasks import RewardPool
from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from shared.errors import HeadraceError
from shared.service.daemon_thread import in_thread
from shared.user_code.call_failure import CallFailure
from shared.user_code.module_sources import Sources, is_on_disk
from shared.user_code.worker_frames import Refused

log = logging.getLogger(__name__)

_IN_USE_FOR_S = 600.0
"""Seconds that a function counts as in use after its last call. An edit that removes a function in use is refused."""


@dataclass
class ModuleVersion:
    """One version of a user's module, and the descriptions of its functions that were inspected.

    ``sources`` has the content of its files. It is None for a module without a file.
    """

    sources: Sources | None
    functions: dict[str, Inspected] = field(default_factory=dict[str, Inspected])


@dataclass
class _Group:
    """State of all calls of one prompt group: the modules' versions, and the rows as msgpack if a worker needs them."""

    versions: dict[str, ModuleVersion] = field(default_factory=dict[str, ModuleVersion])
    encoded: bytes = b""


_group: ContextVar[_Group | None] = ContextVar("the group of this call", default=None)


class PythonFunctions:
    """Inspects and calls Python reward functions, both built-ins and the user's.

    It accepts every name: a name that is not an endpoint or a reward model must be a Python function or a mistake.
    """

    def __init__(
        self,
        pool: RewardPool,
        *,
        loop_functions: LoopFunctions,
        import_timeout_s: float,
        check_timeout_s: float,
        limits: FunctionLimits | None = None,
        in_use: Callable[[], Collection[str]] = tuple,
        forgotten: Callable[[str], None] | None = None,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._loop_functions = loop_functions
        self._import_timeout_s = import_timeout_s
        self._check_timeout_s = check_timeout_s
        self._in_use = in_use
        self._forgotten = forgotten
        self._modules: dict[str, ModuleVersion] = {}
        self._warnings: dict[str, str] = {}
        self._called_at: dict[str, float] = {}
        self._inspecting: dict[tuple[str, str], asyncio.Task[Inspected | Refused]] = {}

    @property
    def modules(self) -> dict[str, Sources]:
        """The version in force of each module, by the module's name. Modules without a file are left out."""
        found = ((module, version.sources) for module, version in self._modules.items())
        return {module: sources for module, sources in found if sources is not None}

    @contextlib.contextmanager
    def one_group(self) -> Generator[None]:
        """Make all calls that begin in this block use the same version of a module, and encode their rows only once.

        The calls must have the same rows and deadline. Rows may be large, and calls may wait for workers for minutes.
        """
        group = _Group()
        token = _group.set(group)
        try:
            yield
        finally:
            _group.reset(token)
            group.encoded = b""  # tasks that users' functions leave behind keep the context

    async def knows(self, name: str) -> bool:
        """Return True: a name that is not an endpoint or a reward model is treated as a Python function."""
        return True

    def exists(self, name: str) -> bool:
        """Return whether ``name`` is a built-in or a user's function that was found in its module."""
        version = self._modules.get(_module_of(name))
        return built_in(name) is not None or (version is not None and name in version.functions)

    def listed(self) -> list[tuple[str, Inspected, str, str]]:
        """Return name, description, version and warning of each user function that was found."""
        return [
            (name, inspected, _version(version), self._warnings.get(module, ""))
            for module, version in self._modules.items()
            for name, inspected in version.functions.items()
        ]

    async def inspect(self, name: str, kwargs: Mapping[str, Any] | None = None) -> Inspected | Refused:
        """Import a function from its current files, and return its description or the reason why it cannot be used.

        ``kwargs`` are checked against its parameters. Later calls run the imported version. An edit is refused if a run
        uses a function of the module that would no longer work.
        """
        module = _module_of(name)
        give_up_at = time.monotonic() + self._check_timeout_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            inspected = await self._inspect(name, left_s, kwargs=kwargs)
            if isinstance(inspected, Refused):
                return inspected
            if inspected.kind == "built-in":
                return _without_columns_of(kwargs, inspected)
            before = self._modules.get(module)
            if before is not None and self._is_in_force(inspected.sources, module):
                before.functions[name] = inspected
                return _without_columns_of(kwargs, inspected)
            others = () if before is None else (before.functions.keys() & self._in_use()) - {name}
            left_s = give_up_at - time.monotonic()
            usable, refused = await self._inspect_all(others, left_s, sources=inspected.sources)
            if refused:
                lost, why = ", ".join(sorted(refused)), next(iter(refused.values()))
                return Refused(f"{module} was edited, and a run uses {lost}, which cannot be used any more: {why}")
            if await self._put_in_force(module, before, ModuleVersion(inspected.sources, usable | {name: inspected})):
                return _without_columns_of(kwargs, inspected)
        return Refused(f"the files of {module} are being changed; try again when they are saved")

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """Call a Python function: in a worker process, or on its module's event loop if it is async.

        The deadline starts when the function is called, after the wait for limits and for a worker.

        Raises:
            RewardFailure: The call failed. Its outcome says why.
        """
        inspected, version = await self._what_is(name)
        self._called_at[name] = time.monotonic()
        sources = None if version is None else version.sources
        try:
            async with contextlib.nullcontext() if self._limits is None else self._limits.turn(name, call, lane=lane):
                if inspected.kind == "async":
                    answer, seconds = await self._loop_functions.call(name, call, timeout_s=timeout_s, sources=sources)
                else:
                    group = _group.get() or _Group()
                    with_deadline = msgspec.structs.replace(call, timeout_s=timeout_s)
                    group.encoded = group.encoded or msgspec.msgpack.encode(with_deadline)
                    answer, seconds = await self._pool.call(
                        name, group.encoded, lane=lane, timeout_s=timeout_s, sources=sources
                    )
        except CallFailure as failure:
            failed = RewardFailure(failure.outcome, failure.detail, seconds=failure.seconds)
            failed.version = _version(version)
            raise failed from failure
        except RewardFailure as failure:
            failure.version = _version(version)
            raise
        return msgspec.structs.replace(answer, version=_version(version)), seconds

    async def reload(self, module: str) -> bool:
        """Use a module's current files for later calls if all its functions in use can be imported from them.

        Otherwise the old version stays, usually with a warning. Return whether a new version is in force.
        """
        before = self._modules[module]
        usable, refused = await self._inspect_all(before.functions, self._import_timeout_s, in_background=True)
        if self._modules[module] is not before:
            return True  # a check has put a new version in force meanwhile
        missed = [detail for name, detail in refused.items() if self._is_needed(name)]
        if missed or not usable:
            self.warn(module, (missed or list(refused.values()))[0])
            return False
        versions = {_key(what.sources) for what in usable.values()}
        if len(versions) > 1:
            return False  # the files were changed between two inspections; the next look handles the change
        return await self._put_in_force(module, before, ModuleVersion(next(iter(usable.values())).sources, usable))

    def warn(self, module: str, why: str) -> None:
        """Warn in the log and in GET /v1/rewards that an edit of a module is not in force."""
        version = _version(self._modules[module])
        warning = f"an edit of {module} is not in force, version {version} still is: {why}"
        if self._warnings.get(module) != warning:
            self._warnings[module] = warning
            log.warning("%s", warning)

    def take_back_warning(self, module: str) -> None:
        """Remove a module's warning from GET /v1/rewards."""
        self._warnings.pop(module, None)

    def forget_unused(self, module: str) -> bool:
        """Forget a module and its imports, unless a run uses it or its functions were called in the last ten minutes.

        Return whether the module is forgotten. It is read again when it is named again.
        """
        functions = self._modules[module].functions
        if any(self._is_needed(name) for name in functions):
            return False
        for name in functions:
            self._called_at.pop(name, None)
            if self._forgotten is not None:
                self._forgotten(name)
        del self._modules[module]
        self.take_back_warning(module)
        self._loop_functions.end(module)
        self._pool.forget(module)
        return True

    async def close(self) -> None:
        """Cancel the inspections of functions that are under way."""
        tasks: list[asyncio.Task[Any]] = list(self._inspecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_in_force(self, sources: Sources | None, module: str) -> bool:
        version = self._modules.get(module)
        return version is not None and _key(version.sources) == _key(sources)

    def _is_needed(self, name: str) -> bool:
        called_at = self._called_at.get(name)
        was_called = called_at is not None and time.monotonic() - called_at < _IN_USE_FOR_S
        return was_called or name in self._in_use()

    async def _put_in_force(self, module: str, before: ModuleVersion | None, version: ModuleVersion) -> bool:
        """Replace a module's version ``before`` by ``version``; return whether ``version`` is in force now.

        Nothing is replaced if the files have changed since ``version`` was read, or ``before`` was replaced meanwhile.
        """
        if version.sources is not None:
            files = version.sources.files
            if not await in_thread(lambda: is_on_disk(files), name="look at a reward module"):
                return False
        now = self._modules.get(module)
        if now is not None and self._is_in_force(version.sources, module):
            now.functions |= version.functions
        elif now is before:
            self._modules[module] = version
        else:
            return False
        self.take_back_warning(module)
        if now is not None and now is not self._modules[module]:
            log.info("reward module %s was edited and is imported again: version %s", module, _version(version))
            self._loop_functions.forget(module)
            self._pool.renew()
        return True

    async def _what_is(self, name: str) -> tuple[Inspected, ModuleVersion | None]:
        """Return a function's description, and its module's version for the current prompt group (None for a built-in).

        A function is inspected once, even if many groups wait for it.
        """
        if built_in(name) is not None:
            return Inspected("built-in"), None
        module = _module_of(name)
        group = _group.get()
        while True:
            version = self._modules.get(module)
            if group is not None and version is not None:
                version = group.versions.setdefault(module, version)
            if version is not None and name in version.functions:
                return version.functions[name], version
            inspected = await self._inspect_once(name, None if version is None else version.sources)
            if version is None:
                version = self._modules.setdefault(module, ModuleVersion(inspected.sources))
            if _key(version.sources) == _key(inspected.sources):
                version.functions[name] = inspected

    async def _inspect_once(self, name: str, sources: Sources | None) -> Inspected:
        key = (name, _key(sources))
        if key not in self._inspecting:
            self._inspecting[key] = asyncio.create_task(
                self._inspect(name, self._import_timeout_s, sources=sources), name=f"inspect reward {name}"
            )
            self._inspecting[key].add_done_callback(lambda _: self._inspecting.pop(key, None))
        inspected = await asyncio.shield(self._inspecting[key])
        if isinstance(inspected, Refused):
            raise RewardFailure("error", inspected.detail)
        return inspected

    async def _inspect_all(
        self, names: Collection[str], timeout_s: float, *, sources: Sources | None = None, in_background: bool = False
    ) -> tuple[dict[str, Inspected], dict[str, str]]:
        """Return the descriptions of the usable functions, and the reasons why the others cannot be used."""
        names = list(names)  # a copy, because functions may be added meanwhile
        found = await asyncio.gather(
            *(self._inspect(name, timeout_s, sources=sources, in_background=in_background) for name in names)
        )
        by_name = dict(zip(names, found, strict=True))
        usable = {name: what for name, what in by_name.items() if isinstance(what, Inspected)}
        return usable, {name: what.detail for name, what in by_name.items() if isinstance(what, Refused)}

    async def _inspect(
        self,
        name: str,
        timeout_s: float,
        *,
        sources: Sources | None = None,
        kwargs: Mapping[str, Any] | None = None,
        in_background: bool = False,
    ) -> Inspected | Refused:
        try:
            check_name(name)
            return await self._pool.inspections.inspect(
                name, timeout_s=timeout_s, sources=sources, kwargs=kwargs, in_background=in_background
            )
        except (HeadraceError, OSError) as error:
            return Refused(str(error))


def _without_columns_of(kwargs: Mapping[str, Any] | None, inspected: Inspected) -> Inspected:
    """Return the description without the required columns that these keyword arguments replace."""
    given = frozenset(kwargs or {})
    needed = [columns for columns in inspected.required_columns if not given.intersection(columns)]
    return msgspec.structs.replace(inspected, required_columns=needed)


def _module_of(name: str) -> str:
    return name.partition(":")[0]


def _key(sources: Sources | None) -> str:
    return "" if sources is None else sources.key


def _version(version: ModuleVersion | None) -> str:
    """Return the version text of an outcome. It is empty for built-ins and for modules without a file."""
    return "" if version is None or version.sources is None else version.sources.version
