"""What a weight push is to a simulated engine: its time passes, its version is taken on, and the bytes are nobody's.

    transport simulated   nothing is sent; receiving takes as long as ``receive_bytes_per_s`` says
    transport gloo        the bytes come over the real wire, are checked, and thrown away (gloo_transfer.py)

The order of the moves, their fences and their deadlines are weight_receiver.py's, as for a real engine.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Protocol

from services.generator.adapter import AdapterSpec
from services.generator.simulated.engine import SimulatedEngine
from services.generator.simulated.settings import SimulationSettings
from services.generator.worker_reports import Progress
from shared.control import Transport
from shared.lineage import LineageVersion

IDLE, RECEIVING = "idle", "receiving"
_SHORT_S = 0.002
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


class Transfer(Protocol):
    """The one worker of a simulated replica: moves of worker_transfer.WorkerTransfer. Every one returns at once."""

    def enter(self, where: dict[str, Any]) -> None:
        """Begin to enter a communicator."""
        ...

    def receive(self, what: dict[str, Any]) -> None:
        """Begin to receive."""
        ...

    def progress(self) -> Progress:
        """Return how far it is."""
        ...

    def leave(self) -> None:
        """Leave the communicator."""
        ...

    def forget(self) -> None:
        """Forget what was received."""
        ...

    def load(self) -> None:
        """Put what was received to use."""
        ...


class NoTransfer:
    """Receives nothing, in the time it would take.

    Args:
        bytes_per_s: How fast it pretends to be, in seconds that pass here.
    """

    def __init__(self, *, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._done_at = 0.0

    def enter(self, where: dict[str, Any]) -> None:
        """Nothing is entered."""

    def receive(self, what: dict[str, Any]) -> None:
        """Begin to be busy."""
        num_bytes = sum(
            math.prod(shape) * _BYTES.get(dtype_name, 1)
            for dtype_name, shape in zip(what["dtype_names"], what["shapes"], strict=True)
        )
        self._done_at = time.monotonic() + num_bytes / self._bytes_per_s

    def progress(self) -> Progress:
        """See Transfer."""
        return Progress(RECEIVING if time.monotonic() < self._done_at else IDLE, None, None)

    def leave(self) -> None:
        """Stop being busy."""
        self._done_at = 0.0

    def forget(self) -> None:
        """There is nothing to forget."""

    def load(self) -> None:
        """There is nothing to load."""


class SimulatedReceivingEngine:
    """ReceivingEngine of receiving_engine.py over a simulated engine.

    Args:
        engine: Held, and told its version.
        settings: Say what is received, and how fast.
    """

    def __init__(self, engine: SimulatedEngine, settings: SimulationSettings) -> None:
        self._engine = engine
        self._transport: Transport = settings.transport
        self._transfer = _transfer(settings)
        self._label = ""

    @property
    def adapter(self) -> AdapterSpec | None:
        """None: adapters are received like anything else."""
        return None

    @property
    def transports(self) -> Sequence[Transport]:
        """What it can receive over."""
        return [self._transport]

    @property
    def device_uuid(self) -> str | None:
        """None: there is no GPU."""
        return None

    @property
    def num_workers(self) -> int:
        """One rank."""
        return 1

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:
        """Make one move of Transfer."""
        return [getattr(self._transfer, move)(**arguments)]

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:
        """Return how far the transfer is, a moment later if it is not done."""
        progress = self._transfer.progress()
        if progress.phase != IDLE:
            await asyncio.sleep(min(wait_s, _SHORT_S))
        return [self._transfer.progress()]

    def close(self) -> None:
        """There is nothing to close."""

    async def pause(self, *, keep_cache: bool) -> None:
        """Hold decoding; a cache that is lost costs a simulated engine nothing."""
        del keep_cache
        self._engine.hold()

    async def abort_and_pause(self) -> None:
        """Abort every request, and hold decoding."""
        self._engine.hold()
        self._engine.abort_all()

    async def resume(self) -> None:
        """Go on decoding."""
        self._engine.resume()

    async def name_version(self, version: str) -> None:
        """Take the version on."""
        self._engine.take_on(LineageVersion.parse(version))
        self._label = version

    async def read_version(self) -> str:
        """Return it."""
        return self._label

    async def load_adapter(self, directory: Path) -> None:
        """There is nothing to load."""
        del directory

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        """There are no weights to score it with.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"a simulated generator cannot score a probe of {len(token_ids)} tokens: it has no weights")


def import_transfer(settings: SimulationSettings) -> None:
    """Import what the transport needs. torch takes seconds, in which an event loop would renew no lease."""
    if settings.transport == "gloo":
        import services.generator.simulated.gloo_transfer

        assert services.generator.simulated.gloo_transfer is not None


def _transfer(settings: SimulationSettings) -> Transfer:
    if settings.transport == "simulated":
        return NoTransfer(bytes_per_s=settings.receive_bytes_per_s * settings.speed_up)
    from services.generator.simulated.gloo_transfer import GlooTransfer

    return GlooTransfer()
