"""Shares a machine's GPUs among replicas that all see the same GPUs, as with Docker Compose's `--scale generator=N`.

    gpu-0.lock  <- held by replica a        gpu-1.lock  <- held by replica b        gpu-2.lock  free

A claim is a lock on a file in a directory that the replicas share. The kernel releases it whenever the process ends, so
a restarted replica finds its GPU free. CUDA then sees only the claimed GPUs.
"""

import fcntl
import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

from shared.errors import UserError

log = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
open_locks: list[int] = []
"""Descriptors that hold the locks; open as long as this process lives."""


def claim_gpus(
    directory: Path, *, num_gpus: int, environment: MutableMapping[str, str], devices: Path = Path("/dev")
) -> list[str]:
    """Claim ``num_gpus`` of the visible GPUs, hide the others from CUDA, and return the claimed indices.

    Raises:
        UserError: No GPU is visible, too few are free, or the directory cannot be written.
    """
    visible = _visible(environment, devices)
    if not visible:
        raise UserError(_why_none(environment, devices))
    claims: list[tuple[str, int]] = []
    try:
        for index in visible:
            if len(claims) == num_gpus:
                break
            file = os.open(directory / f"gpu-{index}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                claims.append((index, file))
    except OSError as error:
        raise UserError(
            f"HEADRACE_GPU_CLAIMS_DIR: {directory} cannot be written: {error.strerror}; name a directory that all "
            "replicas on this machine share"
        ) from error
    if len(claims) < num_gpus:
        num_taken = len(visible) - len(claims)
        for _, file in claims:
            os.close(file)
        raise UserError(
            f"this generator needs {num_gpus} of the {len(visible)} GPUs it sees, and other generators have claimed "
            f"{num_taken}; start fewer, or give them more GPUs"
        )
    open_locks.extend(file for _, file in claims)
    indices = [index for index, _ in claims]
    environment[_VISIBLE] = ",".join(indices)
    log.info("claimed GPU %s", ", ".join(indices))
    return indices


def _visible(environment: MutableMapping[str, str], devices: Path) -> list[str]:
    """Return the GPU indices that CUDA may use: from CUDA_VISIBLE_DEVICES, or one for each GPU device in /dev."""
    if _VISIBLE in environment:
        return [index.strip() for index in environment[_VISIBLE].split(",") if index.strip()]
    return [str(index) for index in range(len(list(devices.glob("nvidia[0-9]*"))))]


def _why_none(environment: MutableMapping[str, str], devices: Path) -> str:
    if _VISIBLE in environment:
        return f"this generator sees no GPU: {_VISIBLE} is empty; name GPUs in it, or unset it"
    if (devices / "dxg").exists():
        return (
            f"this generator sees no GPU: on WSL2 ({devices}/dxg) GPUs are not separate devices and cannot be "
            f"counted; name them in {_VISIBLE}, such as 0"
        )
    return (
        f"this generator sees no GPU: {devices}/nvidia0 does not exist; give its container GPUs (the runtime "
        "nvidia, NVIDIA_VISIBLE_DEVICES), and check that `nvidia-smi` lists them on the machine"
    )
