"""What a weight push needs of an engine. vllm_receiving.py has the real one.

    decoding:  enter --> receive --> submit_probe     or: leave
    held:      pause --> load, read back --> resume   or: abort_and_pause

Deadlines are guarded_engine.py's.
"""

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from services.generator.adapter import AdapterSpec
from services.generator.worker_reports import Progress
from shared.control import Transport


class ReceivingEngine(Protocol):
    """What a push needs of an engine. vllm_receiving.py has the real one.

    Whatever fails in it raises any exception; a sentence is made of it here.
    """

    @property
    def adapter(self) -> AdapterSpec | None:
        """What it serves adapters of; None if whole models arrive."""
        ...

    @property
    def transports(self) -> Sequence[Transport]:
        """What its workers can receive over."""
        ...

    @property
    def num_workers(self) -> int:
        """How many ranks it takes in a communicator."""
        ...

    @property
    def device_uuid(self) -> str | None:
        """Of its GPU; None if it has none, or several."""
        ...

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:
        """Make one move of worker_transfer.WorkerTransfer in every worker, and return all answers."""
        ...

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:
        """Return how far every worker is; wait for news up to ``wait_s`` first."""
        ...

    async def pause(self, *, keep_cache: bool) -> None:
        """Hold decoding, between two steps; requests stay, and with the cache they need not be read again."""
        ...

    async def abort_and_pause(self) -> None:
        """Abort every request, forget the cache, and hold decoding."""
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    async def name_version(self, version: str) -> None:
        """Name the weights: the label of every token sampled from now on."""
        ...

    async def read_version(self) -> str:
        """Return that name."""
        ...

    async def load_adapter(self, directory: Path) -> None:
        """Put an adapter in place of the one before."""
        ...

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        """Queue a prompt before all others, and return its coming answer.

        That is the logprob of every token but the first, in nats at temperature 1, under the weights of the time when
        it is computed; one list for each data-parallel engine.
        """
        ...

    def close(self) -> None:
        """Nothing is asked of it from now on."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """What else is needed of an engine that gives its GPU memory away between two batches."""

    @property
    def is_asleep(self) -> bool:
        """Whether some of its memory is given away."""
        ...

    async def sleep(self) -> None:
        """Hold decoding and give the memory of weights and cache away."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take memory back: of the weights, then of the cache. Decoding goes on with the second."""
        ...
