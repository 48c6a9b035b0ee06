"""Fails the build of an image whose torch, NCCL or vLLM is not the one that its arguments name.

    python3 check_versions.py torch=2.13.0 nccl=2.29.7 vllm=0.32.0

NCCL refuses to talk across its own versions, so the generator's image and the trainer's name the same ones, and each
proves here that it has them. A name without a value is not looked at.
"""

import importlib.metadata
import sys


def found(name: str) -> str:
    """Return the release of one of them, without its build."""
    if name == "nccl":
        import torch

        return ".".join(str(part) for part in torch.cuda.nccl.version()[:3])
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    status = 0
    for name, _, wanted in (argument.partition("=") for argument in arguments):
        if wanted:
            there = found(name)
            sys.stdout.write(f"{name} {there}, wanted {wanted}\n")
            status |= there != wanted
    if status:
        sys.stdout.write(
            "Trainer and generator must have the same torch and NCCL. Build both images with --build-arg TORCH=... "
            "and --build-arg NCCL=... of the vLLM image that the generator is built on.\n"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
