"""Checks the files of a reward model and computes their version. Does not import torch.

A model with its own Python code (``auto_map``) is refused, as in the generator and the trainer. Each service repeats
these few lines, because services share only what crosses a process boundary. Weights are read only from safetensors:
the other formats are pickle, which can run code too.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from shared.errors import UserError

FILES_TO_FETCH = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""The files of a model, on the hub or in a directory: no pickle, no Python."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "spm.model")
_WITH_AUTO_MAP = ("config.json", "tokenizer_config.json")
_MAX_JSON_BYTES = 8 * 1024 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time in ns of each file. It is cheap, and differs when a file has changed."""


def check_config(directory: Path, *, name: str) -> str:
    """Check a model's configs, and return the architecture that ``config.json`` names, or else its model type.

    Raises:
        UserError: The directory does not have a reward model that can be loaded.
    """
    if (directory / "adapter_config.json").is_file():
        raise UserError(f"{name} is an adapter (adapter_config.json); merge it into its base model and save that")
    if not (directory / "config.json").is_file():
        raise UserError(f"{name} has no config.json, so it is not a transformers model")
    configs = {file: _read_json(directory / file, name) for file in _WITH_AUTO_MAP if (directory / file).is_file()}
    for file, content in configs.items():
        if _has_auto_map(content):
            raise UserError(
                f"{file} of {name} has auto_map: the model would run Python code from its own directory, which "
                "headrace refuses. Use a model whose architecture transformers knows"
            )
    config = configs["config.json"]
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"config.json of {name} has no model_type, so it is not a transformers model")
    _check_num_labels(config, name)
    architectures: Any = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])  # pyright: ignore[reportUnknownArgumentType]  it is JSON
    return str(config["model_type"])


def check_files(directory: Path, *, name: str) -> None:
    """Raise UserError unless the model's directory has safetensors weights and a tokenizer."""
    if not any(directory.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        if others:
            raise UserError(
                f"the weights of {name} are in {others[0]}, which is pickle and may run code; headrace reads "
                "safetensors: save the model again with save_pretrained of a current transformers"
            )
        raise UserError(f"{name} has no *.safetensors, and headrace reads no other weights")
    if not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        raise UserError(f"{name} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); save it beside the model")


def fingerprint(directory: Path) -> Fingerprint:
    """Return the name, size and modification time of each of the model's files; raises OSError."""
    stats = [(path.name, path.stat()) for path in _files(directory)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def content_hash(directory: Path) -> str:
    """Return the SHA-256 of the names and contents of the model's files; raises OSError. Reads all of the files."""
    whole = hashlib.sha256()
    for path in _files(directory):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        whole.update(f"{path.name}\0{digest.hexdigest()}\n".encode())
    return whole.hexdigest()


def _files(directory: Path) -> Sequence[Path]:
    found = {path for pattern in FILES_TO_FETCH for path in directory.glob(pattern) if path.is_file()}
    return sorted(found)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise UserError(f"{path.name} of {name} is larger than {_MAX_JSON_BYTES} bytes")
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} of {name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.name} of {name} is not a JSON object")
    return cast("dict[str, Any]", content)


def _check_num_labels(config: dict[str, Any], name: str) -> None:
    labels: Any = config.get("id2label")
    count: Any = config.get("num_labels", 1) if labels is None else len(labels)
    if count != 1:
        raise UserError(
            f"{name} gives {count} numbers for a text (num_labels in its config.json), and a reward is one; use a "
            "model with num_labels=1, or a reward function that calls this one and says which number counts"
        )


def _has_auto_map(content: dict[str, Any]) -> bool:
    unvisited: list[Any] = [content]
    while unvisited:
        node = unvisited.pop()
        if isinstance(node, dict):
            if "auto_map" in node:
                return True
            unvisited.extend(cast("dict[str, Any]", node).values())
        elif isinstance(node, list):
            unvisited.extend(cast("Sequence[Any]", node))
    return False
