"""Implements the weight push for a simulated engine: takes time and changes the version, but loads no weights.

    transport simulated   nothing is sent; receiving takes as long as ``receive_bytes_per_s`` says
    transport gloo        the bytes come over the real wire, are checked, and thrown away (gloo_transfer.py)

weight_receiver.py controls order, conflicts and deadlines of the moves, as for a real engine.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Protocol

from services.generator.engine.adapter import AdapterSpec
from services.generator.simulated.simulated_engine import SimulatedEngine
from services.generator.simulated.simulation_settings import SimulationSettings
from services.generator.worker.worker_reports import IDLE, RECEIVING, Progress
from shared.control import Transport
from shared.lineage import LineageVersion

_SHORT_S = 0.002
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


class Transfer(Protocol):
    """Receives weights as the only worker of a simulated replica.

    It has the methods of WorkerTransfer (worker/worker_transfer.py). Each returns at once.
    """

    def enter(self, where: dict[str, Any]) -> None:
        """Begin to enter the communicator that the fields of JoinRequest in ``where`` describe."""
        ...

    def receive(self, what: dict[str, Any]) -> None:
        """Begin to receive the parameters that the fields of BeginRequest in ``what`` announce."""
        ...

    def progress(self) -> Progress:
        """Return the phase of the current job, its failure, and the checksum of the received weights."""
        ...

    def leave(self) -> None:
        """Leave the communicator."""
        ...

    def forget(self) -> None:
        """Discard the received weights."""
        ...

    def load(self) -> None:
        """Check that the received weights are complete. No model loads them."""
        ...


class NoTransfer:
    """Transfer that moves no bytes: it only takes as long as receiving would.

    Args:
        bytes_per_s: Simulated speed, in bytes per second of real time.
    """

    def __init__(self, *, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._done_at = 0.0

    def enter(self, where: dict[str, Any]) -> None:
        """Do nothing: without bytes to move, a communicator is not needed."""

    def receive(self, what: dict[str, Any]) -> None:
        """Be busy for as long as receiving these parameters would take."""
        num_bytes = sum(
            math.prod(shape) * _BYTES.get(dtype_name, 1)
            for dtype_name, shape in zip(what["dtype_names"], what["shapes"], strict=True)
        )
        self._done_at = time.monotonic() + num_bytes / self._bytes_per_s

    def progress(self) -> Progress:
        """Return the phase ``receiving`` until the simulated time has passed, then ``idle``, without a checksum."""
        return Progress(RECEIVING if time.monotonic() < self._done_at else IDLE, None, None)

    def leave(self) -> None:
        """Stop being busy, because the push was given up."""
        self._done_at = 0.0

    def forget(self) -> None:
        """Do nothing, because nothing was received."""

    def load(self) -> None:
        """Do nothing, because nothing is loaded."""


class SimulatedReceivingEngine:
    """Implements ReceivingEngine (engine/receiving_engine.py) for a simulated engine.

    Args:
        engine: The engine that is paused and gets the version.
        settings: Settings of the simulation, with transport and speed.
    """

    def __init__(self, engine: SimulatedEngine, settings: SimulationSettings) -> None:
        self._engine = engine
        self._transport: Transport = settings.transport
        self._transfer = _transfer(settings)
        self._label = ""

    @property
    def adapter(self) -> AdapterSpec | None:
        """None, even if a run pushes adapters: they are received in the same way as whole models."""
        return None

    @property
    def transports(self) -> Sequence[Transport]:
        """Only the transport of the settings: ``simulated`` or ``gloo``."""
        return [self._transport]

    @property
    def device_uuid(self) -> str | None:
        """None, because a GPU is not used."""
        return None

    @property
    def num_workers(self) -> int:
        """Always 1: the replica is a single rank of a communicator."""
        return 1

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:
        """Call the method ``move`` of the replica's Transfer, and return a list with its result."""
        return [getattr(self._transfer, move)(**arguments)]

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:
        """Return the progress of the transfer; wait a moment first if it is not done."""
        progress = self._transfer.progress()
        if progress.phase != IDLE:
            await asyncio.sleep(min(wait_s, _SHORT_S))
        return [self._transfer.progress()]

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    async def pause(self, *, keep_cache: bool) -> None:
        """Pause decoding. ``keep_cache`` has no effect, because a KV cache is not simulated."""
        del keep_cache
        self._engine.pause()

    async def abort_and_pause(self) -> None:
        """Abort every request, and pause decoding."""
        self._engine.pause()
        self._engine.abort_all()

    async def resume(self) -> None:
        """Resume decoding."""
        self._engine.resume()

    async def name_version(self, version: str) -> None:
        """Sample with this version from the next token on."""
        self._engine.take_on(LineageVersion.parse(version))
        self._label = version

    async def read_version(self) -> str:
        """Return the label that was passed to ``name_version`` last."""
        return self._label

    async def load_adapter(self, directory: Path) -> None:
        """Do nothing, because nothing is loaded."""
        del directory

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        """Refuse the probe, because it cannot be scored without weights.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"a simulated generator cannot score a probe of {len(token_ids)} tokens: it has no weights")


def import_transfer(settings: SimulationSettings) -> None:
    """Import the modules that the transport needs; to be called in a thread.

    Importing torch on the event loop would delay lease renewals by seconds.
    """
    if settings.transport == "gloo":
        import services.generator.simulated.gloo_transfer

        assert services.generator.simulated.gloo_transfer is not None


def _transfer(settings: SimulationSettings) -> Transfer:
    if settings.transport == "simulated":
        return NoTransfer(bytes_per_s=settings.receive_bytes_per_s * settings.speed_up)
    from services.generator.simulated.gloo_transfer import GlooTransfer

    return GlooTransfer()
