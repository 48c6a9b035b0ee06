"""A communicator that cannot be formed raises our own error."""

import contextlib
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


def test_an_nccl_communicator_that_is_closed_while_it_is_made_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    num_aborts = 0

    class SlowToMake:
        def __init__(self, _identifier: bytes, *, world_size: int) -> None:
            assert world_size == 2
            communicator.close()

        def abort(self) -> None:
            nonlocal num_aborts
            num_aborts += 1

    monkeypatch.setattr(nccl_communicator, "unique_id", lambda: bytes(128))
    monkeypatch.setattr(nccl_communicator, "NcclComm", SlowToMake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    communicator = NcclCommunicator()
    with pytest.raises(PushError, match="closed while it was formed"):
        communicator.rendezvous(world_size=2, timeout_s=1.0)
    assert num_aborts == 1
