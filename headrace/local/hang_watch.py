"""Detects a hanging service: the kernel accepts connections for it, but it sends nothing for a minute.

    every few seconds: a request to its port --> any reaction   it is alive, also if busy or loading
                                             --> no reaction    for a minute (ten after its start): it hangs

Any reaction shows that the event loop runs, so the answer itself does not matter: 503 counts, and so does a TLS alert.
Only time in which this process itself ran is counted. Otherwise every service would seem to hang after a laptop slept.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
PING = b"PING\r\n"
SILENT_S = 60.0
FIRST_REACTION_S = 600.0
"""Longest wait for the first reaction after the start: a service may import its packages from a slow disk."""
_TICK_S, _ASK_EVERY_S, _ASK_AGAIN_S = 1.0, 5.0, 20.0


@dataclass(frozen=True)
class Question:
    """The request that tests whether a service is alive.

    Args:
        port: Port on 127.0.0.1.
        text: Bytes to send, to which the service reacts.
    """

    port: int
    text: bytes = LIVEZ


async def until_it_hangs(question: Question) -> float:
    """Wait until the service hangs, and return the seconds of its silence. Cancel the call to stop watching."""
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
            await asyncio.sleep(_TICK_S)  # the service does not listen yet
            silence.go_on()
    return silence.seconds


class Silence:
    """Counts seconds in which this process runs. A gap, such as a laptop's sleep, counts as two seconds at most."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = time.monotonic()

    def go_on(self) -> None:
        """Add the time since the last call, at most two seconds."""
        now = time.monotonic()
        self.seconds += min(now - self._looked_at, 2 * _TICK_S)
        self._looked_at = now


async def _reacts(question: Question) -> bool:
    """Send the request and return True at the service's first reaction, or False if nothing listens on the port."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", question.port)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):  # closing the connection is a reaction too
            writer.write(question.text)
            await writer.drain()
            await reader.read(1)
    finally:
        writer.transport.abort()
    return True
