"""Reward functions in Python, built in or the user's: what each of them is, and where it is called.

    async function  -> this event loop, under a deadline
    sync function   -> a worker, under a deadline
    built-in        -> a worker, under a deadline

A module has one version at a time: that of its file when a worker imported it for the first time, or at the last check.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from services.rewarder.built_in_rewards import built_in
from services.rewarder.function_loading import Stamp, check_name, edited
from services.rewarder.loop_functions import LoopFunctions
from services.rewarder.reward_call import RewardCall
from services.rewarder.worker_frames import Answer, Inspected, Refused
from services.rewarder.worker_pool import RewardFailure, WorkerPool
from shared.errors import HeadraceError

log = logging.getLogger(__name__)

VERSION_CHARACTERS = 12


class PythonFunctions:
    """A RewardSource that knows every name: what no other one knows is a function, or a mistake."""

    def __init__(
        self, pool: WorkerPool, *, loop_functions: LoopFunctions, import_timeout_s: float, check_timeout_s: float
    ) -> None:
        self._pool = pool
        self._loop_functions = loop_functions
        self._import_timeout_s = import_timeout_s
        self._check_timeout_s = check_timeout_s
        self._known: dict[str, Inspected] = {}
        self._checked: dict[str, Stamp | None] = {}  # by module: the only version that may score
        self._inspecting: dict[str, asyncio.Task[Inspected | Refused]] = {}

    async def knows(self, name: str) -> bool:
        """See RewardSource."""
        return True

    def exists(self, name: str) -> bool:
        """Return whether a function of this name has been found."""
        return name in self._known or built_in(name) is not None

    async def inspect(self, name: str, kwargs: Mapping[str, Any] | None = None) -> Inspected | Refused:
        """Import it as its file is now, to be called with these; the next call to a changed one runs the new code."""
        inspected = await self._inspect(name, self._check_timeout_s, kwargs)
        if isinstance(inspected, Inspected):
            self._take_in(name, inspected)
        return inspected

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """See RewardSource. The deadline runs from when the function is called."""

        def checked() -> Stamp | None:
            return self._checked.get(_module_of(name))

        encoded = msgspec.msgpack.encode(call)
        inspected = await self._what_is(name)
        if inspected.kind == "async":
            answer, seconds = await self._loop_functions.call(name, encoded, timeout_s=timeout_s, checked=checked)
        else:
            answer, seconds = await self._pool.call(name, encoded, lane=lane, timeout_s=timeout_s, checked=checked)
        return msgspec.structs.replace(answer, version=_version(checked())), seconds

    async def close(self) -> None:
        """Cancel what is being inspected."""
        tasks: list[asyncio.Task[Any]] = list(self._inspecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take_in(self, name: str, inspected: Inspected) -> None:
        module = _module_of(name)
        if self._checked.setdefault(module, inspected.stamp) != inspected.stamp:
            log.info("the module of reward %s has changed on disk and is imported anew", name)
            self._checked[module] = inspected.stamp
            for known in [known for known in self._known if _module_of(known) == module]:
                del self._known[known]
            self._loop_functions.forget(name)
            self._pool.renew()
        self._known[name] = inspected

    async def _what_is(self, name: str) -> Inspected:
        """Return what ``name`` is, asking a worker once however many groups wait for it."""
        if name not in self._known:
            if built_in(name) is not None:
                return Inspected("built-in")
            if name not in self._inspecting:
                self._inspecting[name] = asyncio.create_task(
                    self._inspect(name, self._import_timeout_s), name=f"inspect reward {name}"
                )
                self._inspecting[name].add_done_callback(lambda _: self._inspecting.pop(name, None))
            inspected = await asyncio.shield(self._inspecting[name])
            if isinstance(inspected, Refused):
                raise RewardFailure("error", inspected.detail)
            checked = self._checked.setdefault(_module_of(name), inspected.stamp)
            if checked is not None and checked != inspected.stamp:
                raise RewardFailure("error", edited(checked))
            self._known[name] = inspected
        return self._known[name]

    async def _inspect(
        self, name: str, timeout_s: float, kwargs: Mapping[str, Any] | None = None
    ) -> Inspected | Refused:
        try:
            check_name(name)
            return await self._pool.inspect(name, timeout_s=timeout_s, kwargs=kwargs)
        except (HeadraceError, OSError) as error:
            return Refused(str(error))


def _module_of(name: str) -> str:
    return name.partition(":")[0]


def _version(stamp: Stamp | None) -> str:
    """Return the first digits of the sha256 of the module's file; empty for what comes with headrace."""
    return "" if stamp is None else stamp[1][:VERSION_CHARACTERS]
