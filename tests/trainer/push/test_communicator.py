"""A communicator that cannot be formed raises our own error."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from services.trainer.push.gloo_communicator import GlooCommunicator
from shared.errors import PushError

pytestmark = pytest.mark.unit


def test_a_store_that_torch_cannot_open_is_a_failed_push(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise torch.distributed.DistNetworkError("too many open files")

    monkeypatch.setattr(torch.distributed, "TCPStore", refuse)
    with pytest.raises(PushError, match=r"cannot be opened on 127\.0\.0\.1: too many open files"):
        GlooCommunicator(address="127.0.0.1")
