"""An NCCL group against a stand-in for NCCL's library: every wait ends. On GPUs, see test_nccl.py."""

import base64
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from services.generator.worker.nccl_wire import NcclWire
from shared.errors import PushError
from shared.weights import nccl_group
from shared.weights.nccl_group import NcclGroup, OnGpu
from tests.eventually import eventually

pytestmark = pytest.mark.unit

IDENTIFIER = base64.b64encode(bytes(128)).decode()
OPERAND = OnGpu(address=4096, num_elements=3, stream=0, mark=lambda: lambda: True)


class Nccl:
    """Replaces NCCL's library. Every operation that is begun takes as long as ``is_busy``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_busy = False
        self.num_looks = 0
        self.aborting = threading.Lock()
        """An abort waits for it."""
        self.on_init: Callable[[], None] = lambda: None

    def ncclCommInitRankConfig(self, handle: Any, world_size: int, *_: Any) -> int:
        assert world_size == 2
        handle._obj.value = 1
        self.on_init()
        return 0

    def ncclCommGetAsyncError(self, _: Any, state: Any) -> int:
        self.num_looks += 1
        state._obj.value = 7 if self.is_busy else 0
        return 0

    def ncclAllReduce(self, *_: Any) -> int:
        self.calls.append("all-reduce")
        return 0

    def ncclBroadcast(self, *_: Any) -> int:
        self.calls.append("broadcast")
        return 0

    def ncclCommAbort(self, _: Any) -> int:
        with self.aborting:
            self.calls.append("abort")
        return 0


class DoneEvent:
    """Replaces a CUDA event."""

    def record(self, _: Any) -> None:
        pass

    def query(self) -> bool:
        return True


def stream_of(_: torch.device) -> SimpleNamespace:
    return SimpleNamespace(cuda_stream=0)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    nccl = Nccl()
    monkeypatch.setattr(nccl_group, "_library", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    return nccl


@pytest.fixture
def group(nccl: Nccl) -> NcclGroup:
    assert nccl.calls == []
    return NcclGroup(bytes(128), rank=0)


def test_an_nccl_group_that_is_closed_while_it_is_made_is_aborted(nccl: Nccl, group: NcclGroup) -> None:
    nccl.on_init = group.close
    with pytest.raises(PushError, match="closed while it was formed"):
        group.enter(OPERAND, world_size=2, timeout_s=1.0)
    assert nccl.calls == ["abort"]


def test_a_closed_nccl_group_is_aborted_once_and_sends_nothing(nccl: Nccl, group: NcclGroup) -> None:
    with pytest.raises(PushError, match="is closed"):
        group.broadcast(OPERAND, timeout_s=120.0)
    group.enter(OPERAND, world_size=2, timeout_s=120.0)
    group.broadcast(OPERAND, timeout_s=120.0)
    group.close()
    group.close()
    with pytest.raises(PushError, match="is closed"):
        group.broadcast(OPERAND, timeout_s=120.0)
    assert nccl.calls == ["all-reduce", "broadcast", "abort"]


def test_a_rank_that_never_enters_nccl_costs_the_deadline(nccl: Nccl, group: NcclGroup) -> None:
    nccl.is_busy = True
    with pytest.raises(PushError, match="entering NCCL did not finish in time"):
        group.enter(OPERAND, world_size=2, timeout_s=0.01)


def test_closing_an_nccl_group_ends_a_wait_in_another_thread(nccl: Nccl, group: NcclGroup) -> None:
    group.enter(OPERAND, world_size=2, timeout_s=120.0)
    nccl.is_busy = True
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(group.broadcast, OPERAND, timeout_s=240.0)
        while "broadcast" not in nccl.calls:
            time.sleep(0.01)
        group.close()
        with pytest.raises(PushError, match="ncclBroadcast was aborted"):
            sending.result(timeout=120)


async def test_a_worker_that_is_to_leave_while_others_have_not_entered_leaves_at_once(nccl: Nccl) -> None:
    """Another replica may have died. Waiting for it, this one could not enter the next communicator."""
    nccl.is_busy, is_given_up = True, threading.Event()

    def enter() -> NcclWire:
        return NcclWire(
            unique_id=IDENTIFIER,
            rank=1,
            world_size=2,
            device=torch.device("cpu"),
            timeout_s=600.0,
            is_given_up=is_given_up.is_set,
        )

    with ThreadPoolExecutor(1) as threads:
        entering = threads.submit(enter)
        await eventually(lambda: nccl.num_looks)
        is_given_up.set()
        with pytest.raises(PushError, match="entering NCCL was aborted"):
            entering.result(timeout=120)
    await eventually(lambda: nccl.calls == ["abort"])


async def test_leaving_nccl_does_not_wait_for_the_abort(nccl: Nccl) -> None:
    wire = NcclWire(
        unique_id=IDENTIFIER,
        rank=1,
        world_size=2,
        device=torch.device("cpu"),
        timeout_s=120.0,
        is_given_up=lambda: False,
    )
    leaving = threading.Thread(target=wire.leave, name="worker's main loop")
    with nccl.aborting:
        leaving.start()
        leaving.join(timeout=60)
        assert not leaving.is_alive()
        assert nccl.calls == ["all-reduce"]
    await eventually(lambda: nccl.calls == ["all-reduce", "abort"])
