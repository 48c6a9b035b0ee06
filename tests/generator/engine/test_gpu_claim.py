"""Replicas on a machine that all see the same GPUs divide them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.generator.engine import gpu_claim
from services.generator.engine.gpu_claim import claim_gpus
from services.generator.settings import GeneratorSettings
from shared.errors import UserError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:  # a process keeps its claims until it ends; a test must not
    yield
    while gpu_claim.open_locks:
        os.close(gpu_claim.open_locks.pop())


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a /dev with three GPUs and other devices."""
    directory = tmp_path / "dev"
    directory.mkdir()
    for name in ("nvidia4", "nvidia5", "nvidia6", "nvidiactl", "nvidia-uvm", "null"):
        (directory / name).touch()
    return directory


def test_each_replica_gets_gpus_that_no_other_has(tmp_path: Path, devices: Path) -> None:
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    assert claim_gpus(tmp_path, num_gpus=1, environment=first, devices=devices) == ["0"]
    assert claim_gpus(tmp_path, num_gpus=2, environment=second, devices=devices) == ["1", "2"]
    assert first == {"CUDA_VISIBLE_DEVICES": "0"}
    assert second == {"CUDA_VISIBLE_DEVICES": "1,2"}


def test_a_replica_that_finds_too_few_gpus_reports_it_and_keeps_none(tmp_path: Path, devices: Path) -> None:
    claim_gpus(tmp_path, num_gpus=2, environment={}, devices=devices)
    with pytest.raises(UserError, match=r"needs 2 of the 3 GPUs it sees, and other generators have claimed 2"):
        claim_gpus(tmp_path, num_gpus=2, environment={}, devices=devices)
    assert claim_gpus(tmp_path, num_gpus=1, environment={}, devices=devices) == ["2"], "it had released the third"


def test_only_what_cuda_may_see_is_claimed(tmp_path: Path, devices: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3, 5"}
    assert claim_gpus(tmp_path, num_gpus=1, environment=environment, devices=devices) == ["3"]
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES is empty"):
        claim_gpus(tmp_path, num_gpus=1, environment={"CUDA_VISIBLE_DEVICES": ""}, devices=devices)


def test_a_replica_without_gpus_reports_it_and_does_not_blame_others(tmp_path: Path, devices: Path) -> None:
    for device in devices.glob("nvidia?"):
        device.unlink()
    with pytest.raises(UserError, match=r"sees no GPU: .*/nvidia0 does not exist; give its container GPUs"):
        claim_gpus(tmp_path, num_gpus=1, environment={}, devices=devices)
    (devices / "dxg").touch()
    with pytest.raises(UserError, match=r"on WSL2 .* name them in CUDA_VISIBLE_DEVICES"):
        claim_gpus(tmp_path, num_gpus=1, environment={}, devices=devices)
    assert claim_gpus(tmp_path, num_gpus=1, environment={"CUDA_VISIBLE_DEVICES": "0"}, devices=devices) == ["0"]


def test_a_killed_replica_leaves_its_gpu_free(tmp_path: Path, devices: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from services.generator.engine.gpu_claim import claim_gpus\n"
        "claim_gpus(Path(sys.argv[1]), num_gpus=3, environment={}, devices=Path(sys.argv[2]))\n"
        "print('claimed', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(devices)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as replica:
        assert replica.stdout is not None
        assert replica.stdout.readline() == b"claimed\n"
        with pytest.raises(UserError):
            claim_gpus(tmp_path, num_gpus=1, environment={}, devices=devices)
        os.kill(replica.pid, signal.SIGKILL)
    assert claim_gpus(tmp_path, num_gpus=3, environment={}, devices=devices) == ["0", "1", "2"]


def test_a_directory_that_is_not_there_is_a_sentence(tmp_path: Path, devices: Path) -> None:
    with pytest.raises(UserError, match="HEADRACE_GPU_CLAIMS_DIR"):
        claim_gpus(tmp_path / "nothing", num_gpus=1, environment={}, devices=devices)


@pytest.mark.parametrize(
    ("values", "url"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:8100"),
        ({"host": "0.0.0.0", "api_key": "a", "internal_key": "b"}, "http://box-7:8100"),
        ({"advertise_url": "http://me:1"}, "http://me:1"),
        ({"host": "::1"}, "http://[::1]:8100"),
    ],
)
def test_a_replica_that_listens_everywhere_is_reached_by_its_machines_name(
    values: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box-7")
    assert GeneratorSettings(**values).url(8100) == url  # type: ignore[arg-type]
