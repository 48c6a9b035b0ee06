"""Fails the build of an image if its torch, NCCL or vLLM does not have the version in the arguments.

    python3 check_versions.py torch=2.13.0 nccl=2.29.7 vllm=0.32.0

Different NCCL versions refuse to communicate. So the images of generator and trainer name the same versions, and each
build checks them here. A name without a value is not checked.
"""

import importlib.metadata
import sys


def found(name: str) -> str:
    """Return the installed version of NCCL or of a package, without the part after ``+``; "none" if it is missing."""
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
    """Print each version; return 0 if all are as wanted, else 1."""
    status = 0
    for name, _, wanted in (argument.partition("=") for argument in arguments):
        if wanted:
            there = found(name)
            sys.stdout.write(f"{name} {there}, wanted {wanted}\n")
            status |= there != wanted
    if status:
        sys.stdout.write(
            "Trainer and generator must have the same torch and NCCL. Build both images with --build-arg TORCH=... "
            "and --build-arg NCCL=... set to the versions in the vLLM image that the generator is built on.\n"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
