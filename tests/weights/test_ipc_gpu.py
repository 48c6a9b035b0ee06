"""The wire within one GPU, and an engine that sleeps, on a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.trainer.push import gloo_communicator
from services.trainer.push.gloo_communicator import IpcCommunicator
from services.trainer.push.packing import announce, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

BUFFER_BYTES = 1 << 20


@pytest.mark.parametrize("is_expandable", [False, True])
def test_another_process_reads_what_is_copied_into_the_buffer(
    is_expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    binding: Any = cast("Any", torch)._C
    binding._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")
    monkeypatch.setattr(gloo_communicator, "_buffers", {})
    # The second is larger than the buffer.
    named = [("a", torch.full((1000,), 0.5, device="cuda")), ("b", torch.ones(1000, 1000, device="cuda"))]
    communicator = IpcCommunicator(address="127.0.0.1", buffer_bytes=BUFFER_BYTES)
    binding._accelerator_setAllocatorSettings("expandable_segments:False")
    (buffer,) = gloo_communicator._buffers.values()  # pyright: ignore[reportPrivateUsage]
    cuda: Any = torch.cuda  # partly untyped
    (segment,) = [
        one
        for one in cuda.memory_snapshot()
        if one["address"] <= buffer.data_ptr() < one["address"] + one["total_size"]
    ]
    assert not segment["is_expandable"]
    where = {
        "transport": "ipc",
        "master_address": "127.0.0.1",
        "master_port": communicator.port,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 60.0,
        "buffer_bytes": BUFFER_BYTES,
        "ipc_buffer": communicator.export().model_dump(),
    }
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.weights.ipc_peer"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert peer.stdin is not None
        peer.stdin.write(json.dumps({"where": where, "shapes": {"a": [1000], "b": [1000, 1000]}}) + "\n")
        peer.stdin.flush()
        communicator.rendezvous(world_size=2, timeout_s=100.0)
        for chunk in pack(named, announce(named), buffer_bytes=BUFFER_BYTES):
            communicator.broadcast(chunk, timeout_s=20.0)
        output, _ = peer.communicate(timeout=120)
        assert json.loads(output.splitlines()[-1]) == {"a": 500.0, "b": 1_000_000.0}
    finally:
        peer.kill()
        peer.wait()
        communicator.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_engine_that_sleeps_gives_its_memory_away_and_takes_it_back(model_dir: Path) -> None:
    from services.generator.engine.engine import start_engine
    from services.generator.engine.engine_spec import EngineSpec
    from services.generator.engine.receiving_engine import VllmReceivingEngine

    spec = EngineSpec(str(model_dir), None, "bfloat16", 256, sleeps=True)
    engine = await start_engine(
        spec, extra_args={"gpu_memory_utilization": 0.3, "enforce_eager": True}, has_cuda=True, timeout_s=300
    )
    try:
        receiving = VllmReceivingEngine(engine.client)
        awake_bytes, total_bytes = torch.cuda.mem_get_info()
        await receiving.sleep()
        asleep_bytes, _ = torch.cuda.mem_get_info()
        assert receiving.is_asleep
        assert asleep_bytes - awake_bytes > 0.1 * total_bytes
        await receiving.wake("weights")
        assert receiving.is_asleep
        await receiving.wake("kv_cache")
        assert not receiving.is_asleep
    finally:
        await engine.shutdown()
