"""Reads the weights that a run left, without the trainer's code, and lists their problems.

checkpoint/manifest.json     every file has the size and the checksum listed there
checkpoint/model, optimizer  tensors load, and no number is infinite or NaN
checkpoint/core_state.json   Adam has made as many steps as the checkpoint's name says
model/                       the final model: the weights of that checkpoint, bit for bit
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def weight_problems(run_dir: Path, checkpoint: Path, step: int) -> list[str]:
    """Return one sentence for each problem.

    Args:
        run_dir: The run's directory. If it has no final model, that check is skipped.
        checkpoint: The run's newest checkpoint.
        step: Step of that checkpoint.
    """
    from safetensors import SafetensorError  # this module is also imported where safetensors is not installed

    try:
        problems = list(_unlike_manifest(checkpoint))
        model, optimizer = _tensors(checkpoint / "model"), _tensors(checkpoint / "optimizer")
        problems += _not_finite({**model, **optimizer}, checkpoint.name)
        state = json.loads((checkpoint / "core_state.json").read_text("utf-8"))
        steps = {int(state["policy_version"]), *map(int, state["adam_steps"].values())}
        if steps != {step}:
            problems.append(f"{checkpoint.name}: the optimizer made {', '.join(map(str, sorted(steps)))} steps")
        if (run_dir / "model").is_dir():
            problems += _unlike(_tensors(run_dir / "model"), model)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        return [f"the weights of {checkpoint.name} do not load: {error!r}"]
    return problems


def _unlike_manifest(checkpoint: Path) -> Iterable[str]:
    listed = json.loads((checkpoint / "manifest.json").read_text("utf-8"))["files"]
    found = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    for name in sorted({*listed} ^ (found - {"manifest.json"})):
        yield f"{checkpoint.name}/{name} is {'missing' if name in listed else 'not in the manifest'}"
    for name in sorted(found & {*listed}):
        content = (checkpoint / name).read_bytes()
        expected = listed[name]
        if (len(content), hashlib.sha256(content).hexdigest()) != (expected["size_bytes"], expected["sha256"]):
            yield f"{checkpoint.name}/{name} is not what its manifest says"


def _tensors(directory: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise ValueError(f"{directory} has no tensors")
    return tensors


def _not_finite(tensors: dict[str, Any], where: str) -> Iterable[str]:
    for name, values in sorted(tensors.items()):
        if not np.isfinite(values).all():
            yield f"{where}: {name} has numbers that are not finite"


def _unlike(final: dict[str, Any], trained: dict[str, Any]) -> Iterable[str]:
    if final.keys() != trained.keys():
        yield f"the final model has other tensors: {', '.join(sorted(final.keys() ^ trained.keys()))}"
    elif unlike := sorted(name for name in final if not np.array_equal(final[name], trained[name])):
        yield f"the final model has other weights than its checkpoint: {', '.join(unlike)}"
