"""An engine without a model: real wires and staging memory, and a dictionary for the weights."""

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import torch

from services.generator.engine.adapter import AdapterSpec
from services.generator.worker.staged_weights import StagedWeights
from services.generator.worker.weight_wires import Wire, open_wire, receive_version
from services.generator.worker.worker_reports import Progress
from shared.control import Transport
from shared.weights.parameter_spec import Spec

PROBE_LOGPROBS = [-1.0, -2.0, -3.0]
"""Its logprobs for every prompt of four tokens."""


def is_there(directory: str) -> bool:
    return Path(directory).is_dir()


class FakeEngine:
    """See receiving_engine.ReceivingEngine.

    Attributes:
        failing: Calls that raise a bare Exception, as vLLM's do; workers' moves have names of their own.
        failing_late: Moves that fail after they have begun.
        hanging: Calls that do not return until they are cancelled. A move that begins something never ends.
        seconds: How long calls take, in seconds; others take no time.
        calls: Every call so far, in order, except queries of the workers' progress.
        spoilt: Whether loaded weights are wrong.
        damage_staged: Whether one received byte is changed.
        answers_probes: While it is cleared, probes get no answer.
        checks: While it is cleared, the announcement is still being checked.
    """

    transports: Sequence[Transport] = ("gloo", "disk")
    num_workers = 1
    device_uuid: str | None = None

    def __init__(self, adapter: AdapterSpec | None = None) -> None:
        self.adapter = adapter
        self._wire: Wire | None = None
        self._buffer_bytes = 0
        self._work: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._staged: StagedWeights | None = None
        self._checksum: str | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.announced: dict[str, Any] = {}
        self.version = "none"
        self.is_paused = False
        self.num_aborted = 0
        self.keeps_cache: bool | None = None
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.failing_late: set[str] = set()
        self.hanging: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.spoilt = False
        self.probe_logprobs = list(PROBE_LOGPROBS)
        self.answers_probes = asyncio.Event()
        self.answers_probes.set()
        self.checks = asyncio.Event()
        self.checks.set()
        self.damage_staged = False

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise Exception(f"Call to {name} method failed: out of memory")  # noqa: TRY002  vLLM's way
        if name in self.hanging:
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds.get(name, 0.0))

    async def pause(self, *, keep_cache: bool) -> None:
        await self._called("pause")
        self.keeps_cache = keep_cache
        self.is_paused = True

    async def abort_and_pause(self) -> None:
        await self._called("abort_and_pause")
        self.num_aborted += 1
        self.is_paused = True

    async def resume(self) -> None:
        await self._called("resume")
        self.is_paused = False

    async def name_version(self, version: str) -> None:
        await self._called("name_version")
        self.version = version

    async def read_version(self) -> str:
        await self._called("read_version")
        return self.version

    async def load_adapter(self, directory: Path) -> None:
        assert str(directory) == self.announced["adapter"]["directory"]
        assert is_there(str(directory))
        await self._called("load_adapter")
        self._load()

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        assert len(token_ids) == len(PROBE_LOGPROBS) + 1
        await self._called("submit_probe")

        async def answer() -> list[list[float]]:
            await self._called("probe")
            await self.answers_probes.wait()
            return [[logprob - 5.0 * self.spoilt for logprob in self.probe_logprobs]]

        return answer()

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:
        if move in ("enter", "receive"):
            self.calls.append(move)
            assert self._work is None or self._work.done(), "the worker's thread is busy"
            if move in self.failing:
                raise Exception(f"Call to {move} method failed: out of memory")  # noqa: TRY002
            self._failure = None
            job = self._enter(**arguments) if move == "enter" else self._receive(**arguments)
            self._work = asyncio.create_task(self._job(move, job), name=f"fake worker {move}")
            return [None]
        await self._called(move)
        if move == "leave":
            self.close()
        elif move == "forget":
            self._staged = self._checksum = None
        else:
            assert move == "load"
            assert self.is_paused
            self._load()
        return [None]

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:
        is_busy = self._work is not None and not self._work.done()
        if is_busy:
            await asyncio.sleep(min(wait_s, 0.002))
            is_busy = self._work is not None and not self._work.done()
        if not self.checks.is_set():
            await asyncio.sleep(min(wait_s, 0.002))
            return [Progress("checking", None, None)]
        return [Progress("receiving" if is_busy else "idle", self._failure, self._checksum)]

    def close(self) -> None:
        if self._wire is not None:
            self._wire.leave()
        self._wire = None

    def _load(self) -> None:
        assert self._staged is not None
        assert self._checksum is not None
        self.weights = {name: tensor.clone() for name, tensor in self._staged.tensors.items()}

    async def _job(self, move: str, job: Any) -> None:
        if move in self.hanging:
            job.close()
            await asyncio.Event().wait()
        if move in self.failing_late:
            job.close()
            self._failure = "out of memory"
            return
        try:
            await job
        except Exception as error:  # noqa: BLE001  as worker_transfer.py does
            self._failure = str(error)

    async def _enter(self, where: dict[str, Any]) -> None:
        self.close()
        self._buffer_bytes = where["buffer_bytes"]
        self._wire = await asyncio.to_thread(open_wire, where, rank=0, device=torch.device("cpu"))

    async def _receive(self, what: dict[str, Any]) -> None:
        self.announced, self._checksum = what, None
        named = zip(what["names"], what["dtype_names"], what["shapes"], strict=True)
        specs = tuple(Spec(name, getattr(torch, dtype_name), tuple(shape)) for name, dtype_name, shape in named)
        staged = self._staged
        if staged is None or staged.specs != specs:
            staged = self._staged = StagedWeights(specs)
        assert self._wire is not None
        await asyncio.to_thread(receive_version, staged, self._wire, what, buffer_bytes=self._buffer_bytes)
        if self.damage_staged:
            name = what["names"][-1]
            staged.tensors[name].view(torch.uint8)[-1] ^= 1
            staged.changed(name)
        self._checksum = staged.checksum()
