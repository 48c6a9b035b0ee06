"""Watches the files of the imported reward modules, and reloads edited modules. Looks about once per second.

    mtime or size differs --> the same at two looks: writing has ended --> contents differ --> imports in a new process?
                                                                              yes: in force, under a new version
                                                                              no:  the old version stays, with a warning

Only files of HEADRACE_REWARD_PATH are watched. A missing file is waited for, because editors rename files when saving.
A module that nothing uses is forgotten if its own file is gone, or if it was uploaded.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from services.rewarder.python_functions.python_functions import PythonFunctions
from shared.service.daemon_thread import in_thread
from shared.user_code.module_sources import SourceFile, Sources, is_on_disk
from shared.user_code.places import Places, is_uploaded

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 10.0
_LAST_RETRY_S = 300.0
_UPLOADS_EVERY_S = 60.0

_State = tuple[tuple[str, int, int, int] | None, ...]
"""Path, inode, size in bytes and modification time in ns of each file, None for a missing file."""


class ModuleWatch:
    """Looks for edits of reward modules' files, and reloads the edited modules.

    Args:
        functions: The functions whose modules are watched.
        places: The directories whose files are watched.
        every_s: Time between two looks, in seconds; 0 to ignore edits and only forget unused uploaded modules.
    """

    def __init__(self, functions: PythonFunctions, *, places: Places, every_s: float) -> None:
        self._functions = functions
        self._places = places
        self._every_s = every_s
        self._last: dict[str, _State] = {}
        self._handled: dict[str, tuple[_State, str]] = {}  # by module: the last handled state, and the version in force
        self._retries: dict[str, tuple[float, float]] = {}  # by module: the time of the next try, and the wait for it
        self._looks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look at all modules repeatedly, until cancelled. A module that takes long to import delays no other."""
        try:
            while True:
                await asyncio.sleep(self._every_s or _UPLOADS_EVERY_S)
                self._begin_looks()
        finally:
            looks = list(self._looks.values())
            self._looks.clear()
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def look(self) -> None:
        """Look at all modules once, and wait until edits that the look before this one saw too have been handled."""
        self._begin_looks()
        await asyncio.gather(*self._looks.values())

    def _begin_looks(self) -> None:
        for module, sources in self._functions.modules.items():
            if not self._every_s and not is_uploaded(module):
                continue
            if module in self._looks and self._looks[module].done():
                self._looks.pop(module).result()
            if module not in self._looks:
                self._looks[module] = asyncio.create_task(self._look_at(module, sources), name=f"look at {module}")

    async def _look_at(self, module: str, sources: Sources) -> None:
        if is_uploaded(module) and self._forget_unused(module):
            return  # every upload is a module of its own: those without a use would fill the memory
        if not self._every_s:
            return
        files = [file for file in sources.files if self._places.holds(file.module, file.path)]
        state = await in_thread(lambda: _state(files), name="look at a reward module")
        is_settled = state == self._last.get(module)
        self._last[module] = state
        seen = state, sources.key
        if not is_settled or (seen == self._handled.get(module) and not self._may_retry(module)):
            return
        self._handled[module] = seen
        gone = [Path(file.path).name for file, there in zip(files, state, strict=True) if there is None]
        if state[:1] == (None,) and self._forget_unused(module):
            pass
        elif gone:
            self._functions.warn(module, f"{', '.join(gone)} cannot be found")
            self._retries[module] = (time.monotonic() + _LAST_RETRY_S, 0.0)  # it may be unused by then
        elif await in_thread(lambda: is_on_disk(files), name="look at a reward module"):
            self._functions.take_back_warning(module)
            self._retries.pop(module, None)
        elif await self._functions.reload(module):
            self._retries.pop(module, None)
        else:
            # A later import may succeed without a change of these files, once a missing module that it imports exists.
            _, waited_s = self._retries.get(module, (0.0, 0.0))
            wait_s = min(_LAST_RETRY_S, max(_FIRST_RETRY_S, 2 * waited_s))
            self._retries[module] = (time.monotonic() + wait_s, wait_s)

    def _forget_unused(self, module: str) -> bool:
        if not self._functions.forget_unused(module):
            return False
        for known in (self._last, self._handled, self._retries):
            known.pop(module, None)
        return True

    def _may_retry(self, module: str) -> bool:
        return module in self._retries and time.monotonic() >= self._retries[module][0]


def _state(files: Sequence[SourceFile]) -> _State:
    found: list[tuple[str, int, int, int] | None] = []
    for file in files:
        try:
            stat = Path(file.path).stat()
        except OSError:
            found.append(None)
        else:
            found.append((file.path, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
