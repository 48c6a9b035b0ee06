"""The GPUs and versions of this machine, for conditions and for the report.

``python -m benchmarks.gpu_check.machine`` prints them as JSON. They are asked in a process that ends, because a process
that has asked CUDA keeps some hundred MiB of a GPU.
"""

import importlib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

REPOSITORY = Path(__file__).resolve().parents[2]
_ASK_WITHIN_S = 180.0
_VERSIONS = ("vllm", "transformers", "trl", "bitsandbytes", "vllm-bnb-plugin")


class Gpu(msgspec.Struct, frozen=True):
    """One GPU that this process sees."""

    name: str
    total_gib: float
    free_gib: float


class Machine(msgspec.Struct, frozen=True):
    """This machine. ``gpus`` is empty if torch sees none."""

    gpus: list[Gpu]
    driver: str
    versions: dict[str, str]
    """By name: torch, CUDA, NCCL, vLLM and others."""

    def same_as(self, other: "Machine") -> bool:
        """Return whether results of both belong into one report; free memory does not count."""
        ours, theirs = ([gpu.name for gpu in machine.gpus] for machine in (self, other))
        return (ours, self.driver, self.versions) == (theirs, other.driver, other.versions)


def has_package(name: str) -> bool:
    """Return whether a distribution is installed."""
    return version_of(name) is not None


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ask() -> Machine:
    """Return this machine.

    Raises:
        RuntimeError: torch could not be asked; the message has its last line.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_check.machine"]
    asked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=_ASK_WITHIN_S)
    if asked.returncode:
        raise RuntimeError(f"torch could not be asked for GPUs: {(asked.stderr.strip().splitlines() or ['?'])[-1]}")
    return msgspec.json.decode(asked.stdout.splitlines()[-1], type=Machine)


def commit() -> str:
    """Return the short name of the commit, with ``+`` if files were changed; "unknown" outside a git checkout."""
    try:
        name = _output("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD")
        changed = _output("git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}+" if changed else name


def main() -> None:
    """Print this machine as JSON."""
    torch: Any = importlib.import_module("torch")
    cuda = torch.cuda
    gpus: list[dict[str, Any]] = []
    for index in range(cuda.device_count()):
        free_bytes, total_bytes = cuda.mem_get_info(index)
        name = cuda.get_device_name(index)
        gpus.append({"name": name, "total_gib": total_bytes / 2**30, "free_gib": free_bytes / 2**30})
    versions = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, cuda.nccl.version()))}
    versions |= {name: version for name in _VERSIONS if (version := version_of(name)) is not None}
    print(json.dumps({"gpus": gpus, "driver": _driver(), "versions": versions}))


def _driver() -> str:
    try:
        lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return lines[0].strip() if lines else "unknown"


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=os.environ)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
