"""A plan as tests ask for it, and a small model to plan for."""

import json
from typing import Any

import pytest

from headrace import cli

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200, "max_position_embeddings": 4096,
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    assert cli.main(["plan", "--json", *map(str, arguments)]) == status
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def value(body: dict[str, Any], section: str, name: str) -> float:
    found: float = body["plan"][section][name]["value"]
    return found
