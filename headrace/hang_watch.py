"""Notices that a service hangs: it takes connections, as the kernel does for it, and says nothing for a minute.

    every few seconds: a question to its port --> any reaction   it lives, however busy it is, or loading
                                              --> none           a minute of these: it hangs

Whatever reacts turns its event loop, so the answer itself does not matter: 503 is one, and so is a TLS alert. Only time
in which this process itself ran is counted: after a laptop's sleep nobody has been silent for hours.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
PING = b"PING\r\n"
SILENT_S = 60.0
FIRST_REACTION_S = 600.0
"""From the start, with everything that a service imports from a slow disk."""
_TICK_S, _ASK_EVERY_S, _ASK_AGAIN_S = 1.0, 5.0, 20.0


@dataclass(frozen=True)
class Question:
    """What a service is asked.

    Args:
        port: Of this machine.
        text: Something that it reacts to.
    """

    port: int
    text: bytes = LIVEZ


async def until_it_hangs(question: Question) -> float:
    """Return, once nobody has reacted for long, for how many seconds; cancelled otherwise."""
    silence, patience_s = Silence(), max(FIRST_REACTION_S, SILENT_S)
    while silence.seconds < patience_s:
        reacting = asyncio.create_task(_reacts(question), name=f"is port {question.port} alive")
        try:
            asked = Silence()
            while not reacting.done() and asked.seconds < _ASK_AGAIN_S and silence.seconds < patience_s:
                await asyncio.wait({reacting}, timeout=_TICK_S)
                asked.go_on()
                silence.go_on()
        finally:
            reacting.cancel()
            await asyncio.gather(reacting, return_exceptions=True)
        if not reacting.cancelled() and reacting.result():
            await asyncio.sleep(min(_ASK_EVERY_S, SILENT_S / 4))
            silence, patience_s = Silence(), SILENT_S
        elif not reacting.cancelled():
            await asyncio.sleep(_TICK_S)  # nobody listens yet
            silence.go_on()
    return silence.seconds


class Silence:
    """Seconds that have passed while this process ran: of a gap in which it did not, two ticks count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = time.monotonic()

    def go_on(self) -> None:
        """Count the time since the last look."""
        now = time.monotonic()
        self.seconds += min(now - self._looked_at, 2 * _TICK_S)
        self._looked_at = now


async def _reacts(question: Question) -> bool:
    """Return once there was any reaction; False if nobody listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", question.port)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):  # it closes: a reaction too
            writer.write(question.text)
            await writer.drain()
            await reader.read(1)
    finally:
        writer.transport.abort()
    return True
