"""A communicator that cannot be formed raises our own error."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from services.trainer.push import nccl_communicator
from services.trainer.push.gloo_communicator import GlooCommunicator
from services.trainer.push.nccl_communicator import NcclCommunicator
from shared.errors import PushError

pytestmark = pytest.mark.unit


def test_a_store_that_torch_cannot_open_is_a_failed_push(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise torch.distributed.DistNetworkError("too many open files")

    monkeypatch.setattr(torch.distributed, "TCPStore", refuse)
    with pytest.raises(PushError, match=r"cannot be opened on 127\.0\.0\.1: too many open files"):
        GlooCommunicator(address="127.0.0.1")


class Nccl:
    """Replaces NCCL's library. Every operation that is begun takes as long as ``is_busy``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_busy = False
        self.on_init: Callable[[], None] = lambda: None

    def ncclCommInitRankConfig(self, handle: Any, world_size: int, *_: Any) -> int:
        assert world_size == 2
        handle._obj.value = 1
        self.on_init()
        return 0

    def ncclCommGetAsyncError(self, _: Any, state: Any) -> int:
        state._obj.value = 7 if self.is_busy else 0
        return 0

    def ncclAllReduce(self, *_: Any) -> int:
        self.calls.append("all-reduce")
        return 0

    def ncclBroadcast(self, *_: Any) -> int:
        self.calls.append("broadcast")
        return 0

    def ncclCommAbort(self, _: Any) -> int:
        self.calls.append("abort")
        return 0


class DoneEvent:
    """Replaces a CUDA event."""

    def record(self, _: Any) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    nccl = Nccl()
    monkeypatch.setattr(nccl_communicator, "unique_id", lambda: bytes(128))
    monkeypatch.setattr(nccl_communicator, "_library", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    return nccl


@pytest.fixture
def communicator(nccl: Nccl) -> NcclCommunicator:
    assert nccl.calls == []
    communicator = NcclCommunicator()
    communicator._device = torch.device("cpu")  # pyright: ignore[reportPrivateUsage]
    return communicator


def test_an_nccl_communicator_that_is_closed_while_it_is_made_is_aborted(
    nccl: Nccl, communicator: NcclCommunicator
) -> None:
    nccl.on_init = communicator.close
    with pytest.raises(PushError, match="closed while it was formed"):
        communicator.rendezvous(world_size=2, timeout_s=1.0)
    assert nccl.calls == ["abort"]


def test_a_closed_nccl_communicator_is_aborted_once_and_sends_nothing(
    nccl: Nccl, communicator: NcclCommunicator
) -> None:
    chunk = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(PushError, match="is closed"):
        communicator.broadcast(chunk, timeout_s=120.0)
    communicator.rendezvous(world_size=2, timeout_s=120.0)
    communicator.broadcast(chunk, timeout_s=120.0)
    communicator.close()
    communicator.close()
    cannot_be_copied = torch.empty(3, dtype=torch.uint8, device="meta")
    with pytest.raises(PushError, match="is closed"):
        communicator.broadcast(cannot_be_copied, timeout_s=120.0)
    assert nccl.calls == ["all-reduce", "broadcast", "abort"]


def test_a_rank_that_never_enters_nccl_costs_the_deadline(nccl: Nccl, communicator: NcclCommunicator) -> None:
    nccl.is_busy = True
    with pytest.raises(PushError, match="entering NCCL did not finish in time"):
        communicator.rendezvous(world_size=2, timeout_s=0.01)


def test_closing_an_nccl_communicator_ends_a_wait_in_another_thread(nccl: Nccl, communicator: NcclCommunicator) -> None:
    communicator.rendezvous(world_size=2, timeout_s=120.0)
    nccl.is_busy = True
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(communicator.broadcast, torch.zeros(3, dtype=torch.uint8), timeout_s=240.0)
        while "broadcast" not in nccl.calls:
            time.sleep(0.01)
        communicator.close()
        with pytest.raises(PushError, match="ncclBroadcast was aborted"):
            sending.result(timeout=120)
