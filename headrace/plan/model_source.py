"""Finds a model's config.json in a directory or at the Hugging Face hub. Weights are counted, never loaded.

In a directory, the headers of the weight files give the number of weights of any architecture.
"""

import asyncio
import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from headrace.asking import MAX_BYTES, Answer, asking
from headrace.plan.model_shape import FAMILIES, ModelShape, model_shape
from shared.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_MAX_HEADER_BYTES = 64 << 20
_TIMEOUT_S = 20.0
"""Time limit for the hub's whole answer."""


def read_shape(model: str, *, revision: str | None = None, num_parameters: float | None = None) -> ModelShape:
    """Read the sizes of a model from its config.json, in a directory or at the Hugging Face hub.

    Args:
        model: A directory, the path of a config.json, or a hub id.
        revision: The revision at the hub; ``main`` if None.
        num_parameters: The number of weights, if given. It replaces the counted number.

    Raises:
        UserError: The config.json is missing, or does not contain enough. The message says what to give instead.
    """
    directory = Path(model)
    if directory.is_file() and directory.suffix != ".json":
        raise UserError(f"{model} is not a config.json; give its directory, or the config.json there")
    if directory.is_file():
        where, config, counted = model, _read(directory), _count(directory.parent)
    elif directory.is_dir():
        where, config, counted = str(directory / "config.json"), _read(directory / "config.json"), _count(directory)
    elif model.endswith(".json"):
        raise UserError(f"the file {model} does not exist; give the model's directory, or its config.json")
    elif model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model) or ".." in model:
        raise UserError(f"{model} is neither an existing directory nor a Hugging Face id")
    else:
        where, config, counted = f"config.json of {model}", _fetch(model, revision or "main"), None
    shape = model_shape(config, where=where)
    known = int(num_parameters) if num_parameters else counted or shape.num_parameters
    if known is None:
        raise UserError(
            f"the weights of {shape.model_type or model} cannot be counted from its config.json (possible for "
            f"{', '.join(FAMILIES)}): give a directory with its weight files, or --parameters"
        )
    return replace(shape, num_parameters=known)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return _table(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no config.json, so it is not a transformers model") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def _fetch(model: str, revision: str) -> Mapping[str, Any]:
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    url = f"{endpoint}/{model}/resolve/{revision}/config.json"
    answer = asyncio.run(_ask(url))
    instead = "give the directory of a copy of the model, or leave --model out and give --parameters"
    if not answer.status:
        raise UserError(f"the Hugging Face hub cannot be asked for {model}: {answer.why}; {instead}")
    if answer.status != HTTPStatus.OK:
        raise UserError(
            f"{model} is not a directory here, and {url} answers {answer.status}: check the spelling, "
            f"set HF_TOKEN if it is private, or {instead}"
        )
    if not isinstance(answer.body, dict):
        raise UserError(f"{url} is not a JSON object of at most {MAX_BYTES >> 20} MiB; {instead}")
    return cast("Mapping[str, Any]", answer.body)


async def _ask(url: str) -> Answer:
    async with asking(timeout_s=_TIMEOUT_S, is_abroad=True) as asker:
        return await asker.get(url, key=os.environ.get("HF_TOKEN", ""))


def _table(text: str, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is not a JSON object")
    return cast("Mapping[str, Any]", found)


def _count(directory: Path) -> int | None:
    """Return the number of weights in a directory's safetensors files; None without files, or if one is unreadable."""
    files = [file for file in sorted(directory.glob("*.safetensors")) if "adapter" not in file.name]
    counts = [_count_in(file) for file in files]
    known = [count for count in counts if count is not None]
    return sum(known) if files and len(known) == len(files) else None


def _count_in(file: Path) -> int | None:
    """Return the number of weights in a safetensors file, from its header (8 bytes of length, JSON); None on error."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                return None
            header: dict[str, Any] = json.loads(stream.read(length))
        return sum(int(math.prod(one["shape"])) for name, one in header.items() if name != "__metadata__")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return None
