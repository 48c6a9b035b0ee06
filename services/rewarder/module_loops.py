"""One event loop for each of the user's modules, and a new one for a module whose loop does not turn any more.

    deadline of a call passes --> a second later the loop is in the same turn --> given up: its thread is left behind,
                                                                                  the next call gets a new loop

A loop is the module's and not the function's, so that functions of one module can share a client.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from services.rewarder.module_loop import ModuleLoop
from services.rewarder.worker_pool import RewardFailure

log = logging.getLogger(__name__)

_TURN_S = 1.0
"""A loop that after a deadline is so long in the turn it was in does not turn."""
_MAX_BLOCKED = 8
_ADVICE = "a function that blocks should be a plain def"


class ModuleLoops:
    """The loops that are in use, and those that were given up.

    Args:
        on_given_up: Told the module.
    """

    def __init__(self, on_given_up: Callable[[str], None]) -> None:
        self._on_given_up = on_given_up
        self._loops: dict[str, ModuleLoop] = {}
        self._blocked: dict[str, list[ModuleLoop]] = {}
        self._left_behind: list[ModuleLoop] = []  # by former versions, or not ended when they were closed
        self._doubted: dict[ModuleLoop, asyncio.TimerHandle] = {}

    def of(self, module: str) -> ModuleLoop:
        """Return the module's loop.

        Raises:
            RewardFailure: It has blocked too many.
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
        """Return why a call to which this happened just now got no answer, and see to it that the loop turns."""
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
        """Let a new version of the module begin without what the one before has blocked."""
        self._left_behind = [loop for loop in (*self._left_behind, *self._blocked.pop(module, ())) if loop.is_alive]

    async def close(self) -> bool:
        """Cancel all that is left; return whether it has ended. Nobody waits for a loop that was given up."""
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
            "loop, and what was begun on this one ends at its deadline. It is here:\n%s",
            loop.module,
            loop.where(),
            time.monotonic() - turn_began_at,
            _ADVICE,
            loop.stack(),
        )
        loop.give_up()
        self._on_given_up(loop.module)
