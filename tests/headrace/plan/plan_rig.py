"""Options for plans in tests, and a model to plan for."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import command_line as cli

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200, "max_position_embeddings": 4096,
}  # fmt: skip

PACE = (
    "--dtype", "bfloat16", "--groups-per-step", 32, "--num-generations", 8, "--completion-tokens", 1500,
    "--max-completion-length", 4096, "--trainer-tokens-per-s", 9000,
)  # fmt: skip


def large_model(directory: Path) -> Path:
    """Return a model of 8 190 735 360 parameters, with the shape of Qwen3-8B."""
    directory.mkdir()
    shape = {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


def planned(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    assert cli.main(["plan", "--json", *map(str, arguments)]) == status
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def value(body: dict[str, Any], section: str, name: str) -> float:
    found: float = body["plan"][section][name]["value"]
    return found
