"""Counts the GPUs that a process sees, without torch and without the driver."""

import re
from collections.abc import Mapping
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")


def num_gpus(environment: Mapping[str, str], *, devices: Path = Path("/dev")) -> int:
    """Return how many GPUs a process with this environment sees."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sum(1 for device in devices.iterdir() if _GPU.fullmatch(device.name))
    count = 0
    for name in visible.split(","):
        if name.strip() in ("", "-1"):
            break  # CUDA ignores every device after the first invalid one
        count += 1
    return count
