"""The NCCL wire: the sender against a worker's end, each in a process of its own. Needs two GPUs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from services.trainer.push.nccl_communicator import NcclCommunicator, nccl_version
from services.trainer.push.packing import announce, pack
from shared.errors import PushError
from shared.weights.nccl_group import unique_id

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has NCCL")
def test_without_nccl_the_message_says_what_to_do() -> None:
    assert nccl_version() is None
    with pytest.raises(PushError, match="install a CUDA build of torch, or use gloo"):
        unique_id()


@pytest.mark.gpu
@two_gpus
def test_a_worker_receives_what_the_sender_broadcasts() -> None:
    named = [("a", torch.full((1000,), 0.5, device="cuda:0")), ("b", torch.ones(10, 10, device="cuda:0"))]
    communicator = NcclCommunicator()
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.weights.nccl_peer"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert peer.stdin is not None
        order = {
            "unique_id": communicator.nccl_unique_id,
            "shapes": {"a": [1000], "b": [10, 10]},
            "buffer_bytes": 1000,
        }
        peer.stdin.write(json.dumps(order) + "\n")
        peer.stdin.flush()
        communicator.rendezvous(world_size=2, timeout_s=100.0)
        for chunk in pack(named, announce(named), buffer_bytes=1000):
            communicator.broadcast(chunk, timeout_s=20.0)
        output, _ = peer.communicate(timeout=120)
        assert json.loads(output.splitlines()[-1]) == {"a": 500.0, "b": 100.0}
    finally:
        peer.kill()
        peer.wait()
        communicator.close()


@pytest.mark.gpu
@two_gpus
def test_a_peer_that_never_enters_costs_the_deadline_and_no_more() -> None:
    communicator = NcclCommunicator()
    started = time.monotonic()
    with pytest.raises(PushError, match="did not finish in time"):
        communicator.rendezvous(world_size=2, timeout_s=3.0)
    communicator.close()
    assert time.monotonic() - started < 10.0
