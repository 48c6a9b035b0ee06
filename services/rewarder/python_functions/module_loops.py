"""Keeps one event loop for each user module, and gives a module a new loop when the old one is blocked.

    call misses its deadline --> a second later its loop still runs the same callbacks --> the loop is given up:
                                                    its thread is abandoned, and the next call gets a new loop

There is one loop per module and not per function, so that functions of one module can share a client.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from services.rewarder.python_functions.module_loop import ModuleLoop
from services.rewarder.reward_failure import RewardFailure

log = logging.getLogger(__name__)

_TURN_S = 1.0
"""A loop counts as blocked if it is still in the same turn this many seconds after a deadline."""
_MAX_BLOCKED = 8
_ADVICE = "a function that blocks should be a plain def"


class ModuleLoops:
    """The event loops of all users' modules: the loops in use, and blocked loops that were given up.

    Args:
        on_given_up: Called with the module when its loop is given up.
    """

    def __init__(self, on_given_up: Callable[[str], None]) -> None:
        self._on_given_up = on_given_up
        self._loops: dict[str, ModuleLoop] = {}
        self._blocked: dict[str, list[ModuleLoop]] = {}
        self._left_behind: list[ModuleLoop] = []  # blocked by older versions, or closed and not ended
        self._doubted: dict[ModuleLoop, asyncio.TimerHandle] = {}

    def of(self, module: str) -> ModuleLoop:
        """Return the event loop of a module. A module without a loop gets a new one.

        Raises:
            RewardFailure: The module has blocked 8 loops, and their threads have not ended.
        """
        loop = self._loops.get(module)
        if loop is not None:
            return loop
        blocked = self._blocked[module] = [loop for loop in self._blocked.get(module, ()) if loop.is_alive]
        if len(blocked) >= _MAX_BLOCKED:
            raise RewardFailure(
                "error",
                f"the async functions of {module} have blocked {len(blocked)} event loops, the last in "
                f"{blocked[-1].where()}, and get no more; {_ADVICE}",
            )
        self._loops[module] = loop = ModuleLoop(module)
        return loop

    def why_late(self, loop: ModuleLoop, timeout_s: float) -> str:
        """Return why a call has just missed its deadline, for its outcome.

        If the call's loop may be blocked, check in a second whether it still is, and give it up if so.
        """
        began_at = loop.turn_began_at
        if began_at is None:
            return f"took longer than {timeout_s:g} s and was cancelled"
        if loop not in self._doubted and self._loops.get(loop.module) is loop:
            look = asyncio.get_running_loop().call_later(_TURN_S, self._look_again, loop, began_at)
            self._doubted[loop] = look
        blocked_s = time.monotonic() - began_at
        if blocked_s < min(_TURN_S, timeout_s / 2):
            return f"took longer than {timeout_s:g} s and was cancelled"
        return (
            f"took longer than {timeout_s:g} s: {loop.where()} has blocked the event loop of {loop.module} for "
            f"{blocked_s:.1f} s; {_ADVICE}"
        )

    def forget(self, module: str) -> None:
        """Forget how many loops older versions of a module have blocked, so that a new version starts at zero."""
        self._left_behind = [loop for loop in (*self._left_behind, *self._blocked.pop(module, ())) if loop.is_alive]

    def end(self, module: str) -> None:
        """End the event loop of a module that is no longer used."""
        self.forget(module)
        if loop := self._loops.pop(module, None):
            loop.give_up()
            self._left_behind.append(loop)

    async def close(self) -> bool:
        """Cancel all tasks of the loops in use; return whether the threads of all loops have ended.

        Loops that were given up count too, but are not waited for.
        """
        for look in self._doubted.values():
            look.cancel()
        self._doubted.clear()
        loops = list(self._loops.values())
        self._loops.clear()
        await asyncio.gather(*(loop.close() for loop in loops))
        self._left_behind += loops
        left = [*self._left_behind, *(loop for blocked in self._blocked.values() for loop in blocked)]
        return not any(loop.is_alive for loop in left)

    def _look_again(self, loop: ModuleLoop, turn_began_at: float) -> None:
        del self._doubted[loop]
        if loop.turn_began_at != turn_began_at or self._loops.get(loop.module) is not loop:
            return
        del self._loops[loop.module]
        self._blocked.setdefault(loop.module, []).append(loop)
        log.error(
            "reward module %s: %s has blocked its event loop for %.1f s; %s. The next call of the module gets a new "
            "loop, and the calls on this one end at their deadlines. Its stack:\n%s",
            loop.module,
            loop.where(),
            time.monotonic() - turn_began_at,
            _ADVICE,
            loop.stack(),
        )
        loop.give_up()
        self._on_given_up(loop.module)
