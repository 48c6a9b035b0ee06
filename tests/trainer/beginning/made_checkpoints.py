"""Writes directories that look like checkpoints, models and adapters, without torch."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.trainer.checkpoints.manifest import write_manifest

QWEN: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
ADAM = ("exp_avg", "exp_avg_sq")


def write_tensors(file: Path, names: Sequence[str], *, dtype: str = "F32", dimensions: int = 1) -> None:
    """Write a safetensors file with an empty tensor for each name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"dtype": dtype, "shape": [0] * dimensions, "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(names, about)).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def make_checkpoint(
    run_dir: Path,
    *,
    step: int,
    ledger: Mapping[str, Any] | None = None,
    rows: Mapping[str, Any] | None = None,
    steps_before: int = 0,
    model: Mapping[str, Any] = QWEN,
    adapter: Mapping[str, Any] | None = None,
    moments: Sequence[str] = ADAM,
    incarnation: int = 1,
) -> Path:
    """Write the checkpoint of ``step`` into a run's directory, and return its own directory."""
    path = run_dir / "checkpoints" / f"step_{step:08d}"
    write_tensors(path / "model" / "shard.safetensors", ["w"])
    if adapter is None:
        (path / "model" / "config.json").write_text(json.dumps(dict(model)))
    else:
        (path / "model" / "adapter_config.json").write_text(json.dumps(dict(adapter)))
    write_tensors(path / "optimizer" / "shard.safetensors", [f"{moment}/w" for moment in moments])
    schedule = {"last_epoch": steps_before + step, "base_lrs": [1e-6], "_last_lr": [1e-6]}
    core = {"policy_version": step, "schedule": schedule, "adam_steps": {"w": float(step)} if moments else {}}
    core |= {"entropy": {"entropy_coef": 0.0, "last_entropy": None}}
    (path / "core_state.json").write_text(json.dumps(core))
    kept = dict(ledger or {"admitted": 2 * step, "trained": [[0, 2 * step - 1]], "dropped": {}})
    extra: dict[str, Any] = {"ledger": kept, "num_tokens": 0, "considered_to": "0"}
    extra |= {} if rows is None else {"rows": dict(rows)}
    state = {"step": step, "incarnation": incarnation, "extra": extra}
    (path / "trainer_state.json").write_text(json.dumps(state))
    write_manifest(path)
    return path


def make_adapter(directory: Path, **about: Any) -> Path:
    """Write a PEFT adapter's directory."""
    write_tensors(directory / "adapter_model.safetensors", ["base_model.model.q_proj.lora_A.weight"])
    (directory / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 32} | about))
    return directory


def make_model(directory: Path, **about: Any) -> Path:
    """Write a transformers model's directory."""
    write_tensors(directory / "model.safetensors", ["w"])
    (directory / "config.json").write_text(json.dumps(QWEN | about))
    return directory
