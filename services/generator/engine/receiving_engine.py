"""The engine as a weight push uses it. vllm_receiving_engine.py implements it with vLLM.

    decoding:  enter --> receive --> submit_probe     or: leave
    held:      pause --> load, read back --> resume   or: abort_and_pause

guarded_engine.py adds deadlines.
"""

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from services.generator.engine.adapter import AdapterSpec
from services.generator.worker.worker_reports import Progress
from shared.control import Transport


class ReceivingEngine(Protocol):
    """The engine as a weight push uses it. vllm_receiving_engine.py implements it with vLLM.

    Methods may raise any exception; guarded_engine.py turns it into a readable error.
    """

    @property
    def adapter(self) -> AdapterSpec | None:
        """Spec of the adapters that it serves; None if whole models arrive."""
        ...

    @property
    def transports(self) -> Sequence[Transport]:
        """The transports over which its workers can receive."""
        ...

    @property
    def num_workers(self) -> int:
        """Number of ranks that the engine takes in a communicator."""
        ...

    @property
    def device_uuid(self) -> str | None:
        """UUID of its GPU; None if it has no GPU, or several."""
        ...

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:
        """Make one move of worker_transfer.WorkerTransfer in every worker, and return all answers."""
        ...

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:
        """Return every worker's progress, after waiting up to ``wait_s`` seconds for news."""
        ...

    async def pause(self, *, keep_cache: bool) -> None:
        """Hold decoding between two steps. Requests stay; if the cache is kept, they need not be read again."""
        ...

    async def abort_and_pause(self) -> None:
        """Abort every request, discard the cache, and hold decoding."""
        ...

    async def resume(self) -> None:
        """Resume decoding."""
        ...

    async def name_version(self, version: str) -> None:
        """Set the version label of every token sampled from now on."""
        ...

    async def read_version(self) -> str:
        """Return the version label."""
        ...

    async def load_adapter(self, directory: Path) -> None:
        """Load an adapter in place of the previous one."""
        ...

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        """Queue a prompt ahead of all others, and return an awaitable for its answer.

        The answer has one list for each data-parallel engine: the logprob of every token but the first, in nats at
        temperature 1, under the weights that are loaded when it is computed.
        """
        ...

    def close(self) -> None:
        """Release resources; no method is called afterwards."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """Further methods of an engine that releases its GPU memory between two batches."""

    @property
    def is_asleep(self) -> bool:
        """Whether some of its memory is released."""
        ...

    async def sleep(self) -> None:
        """Hold decoding and release the memory of weights and cache."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take memory back: first of the weights, then of the cache. Decoding resumes with the second."""
        ...
