"""Checks that a run's model exists, is a language model that transformers loads, and brings no code of its own.

    /absolute/directory    checked on this machine
    org/name               looked up on the Hugging Face hub; no answer from the hub is a warning, not an error
    anything else          refused: a relative path has no meaning for a service

A config with ``auto_map`` names Python code to run at load time, and is always refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from services.trainer.checkpoints.tensor_headers import damaged_tensor_file
from services.trainer.data.dataset_rows import http_errors
from services.trainer.submit_checks.lora_check import check_targets
from services.trainer.submit_checks.prompt_lengths import num_positions, whose_positions
from shared.errors import UnavailableError, UserError
from shared.files.file_roots import why_unreadable
from shared.run_options.run_config import RunConfig

HubLookup = Callable[[str, str | None], Mapping[str, Any]]
"""(hub id, revision) -> the model's config.json on the hub. Raises UserError or UnavailableError."""

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_IN_A_TOKENIZER = ("added_tokens", "model")
"""Keys of tokenizer.json that transformers reads."""
_MAX_JSON_BYTES = 8 * 1024 * 1024


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` can be a Hugging Face id, ``name`` or ``org/name``."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and len(name) <= 96


def check_model(config: RunConfig, *, lookup: HubLookup) -> list[str]:
    """Check a run's model, in its directory or on the hub, and return warnings. Blocks on the disk and the hub.

    Raises:
        UserError: The model cannot be trained; the message says why.
    """
    if config.model.startswith("/"):
        if config.model_revision is not None:
            raise UserError("only models of the hub have revisions; leave it out", field="model_revision")
        _check_fit(config, _check_directory(Path(config.model)))
        check_targets(config.lora_target_modules or (), Path(config.model))
        return []
    if not is_hub_id(config.model):
        raise UserError(
            f"{config.model[:200]!r} is neither an absolute path nor a Hugging Face id. The trainer "
            "cannot resolve a relative path: give the absolute one (`headrace submit` makes it absolute for you)",
            field="model",
        )
    try:
        found = lookup(config.model, config.model_revision)
    except UnavailableError as error:
        no_directory = "" if "/" in config.model else f"there is no directory {config.model} at the trainer, and "
        return [f"the model was not checked: {no_directory}{config.model} is treated as a hub id, but {error}"]
    _refuse_code(found, where=f"{config.model} on the hub")
    _check_fit(config, found)
    return []


def hub_lookup(timeout_s: float, *, endpoint: str | None = None) -> HubLookup:
    """Return a function that looks models up on the Hugging Face hub; ``endpoint`` is HF_ENDPOINT by default."""

    def lookup(name: str, revision: str | None) -> Mapping[str, Any]:
        import huggingface_hub
        from huggingface_hub import HfApi, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        untyped: Any = huggingface_hub  # partly
        in_trouble: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, *http_errors())
        try:
            info = HfApi(endpoint=endpoint).model_info(name, revision=revision, timeout=timeout_s)
            files = {sibling.rfilename for sibling in info.siblings or []}
            if files and "config.json" not in files:
                raise UserError(f"{name} has no config.json on the hub: it is not a transformers model", field="model")
            if info.gated and not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
                # Anybody may read its description, but not its files.
                file = hf_hub_url(name, "config.json", revision=revision, endpoint=endpoint)
                untyped.get_hf_file_metadata(file, timeout=timeout_s, endpoint=endpoint)
        except HFValidationError as error:
            raise UserError(f"{name} cannot be a Hugging Face id: {error}", field="model") from error
        except GatedRepoError as error:
            raise UserError(
                f"{name} is gated; accept its terms on the hub and give the trainer a token in HF_TOKEN", field="model"
            ) from error
        except RevisionNotFoundError as error:
            raise UserError(f"{name} has no revision {revision!r} on the hub", field="model_revision") from error
        except RepositoryNotFoundError as error:
            raise UserError(
                f"{name} is not on the hub, or private; check the spelling, set HF_TOKEN if it is private, or give the "
                "absolute path of a directory",
                field="model",
            ) from error
        except in_trouble as error:
            raise UnavailableError(f"the Hugging Face hub did not answer ({type(error).__name__})") from error
        return cast("Mapping[str, Any]", info.config or {})

    return lookup


def _check_directory(directory: Path) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise UserError(
            f"there is no directory {directory} on the trainer's machine; give the absolute path of a directory with "
            "config.json, or a Hugging Face id",
            field="model",
        )
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json, so it is not a transformers model", field="model")
    config = read_json(directory / "config.json")
    _refuse_code(config, where=str(directory / "config.json"))
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            f"{directory / 'config.json'} has no model_type, so it is not a transformers model", field="model"
        )
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{directory} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); save it there with "
            "tokenizer.save_pretrained",
            field="model",
        )
    if (directory / "tokenizer_config.json").is_file():
        path = directory / "tokenizer_config.json"
        _refuse_code(read_json(path), where=str(path))
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{directory} has no .safetensors weights; save them with model.save_pretrained. Pickled weights (.bin) "
            "are not loaded",
            field="model",
        )
    _refuse_damaged(directory)
    return config


def _refuse_damaged(directory: Path) -> None:
    if (cut := damaged_tensor_file(directory)) is not None:
        raise UserError(
            f"{cut} is damaged: its header cannot be read, or its size is not the one in it; copy it again",
            field="model",
        )
    tokenizer = directory / "tokenizer.json"
    try:
        text = tokenizer.read_bytes() if tokenizer.is_file() else None
        found: Any = None if text is None else msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{tokenizer} cannot be read as a JSON object; copy it again", field="model") from error
    if found is not None and (missing := [name for name in _IN_A_TOKENIZER if name not in found]):
        raise UserError(f"{tokenizer} is damaged: it has no {' and no '.join(missing)}; copy it again", field="model")


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the contents of a model's JSON file.

    Raises:
        UserError: The file is too large, cannot be read, or does not contain a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise UserError(f"{path} is larger than {_MAX_JSON_BYTES} bytes", field="model")
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(why_unreadable(error), field="model") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({type(error).__name__})", field="model") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object", field="model")
    return cast("dict[str, Any]", found)


def _refuse_code(config: Mapping[str, Any], *, where: str) -> None:
    if config.get("auto_map"):
        raise UserError(
            f"{where} has auto_map: the model needs Python code from its repository, which is never run. Use an "
            "architecture that is built into transformers",
            field="model",
        )


def _check_fit(config: RunConfig, model: Mapping[str, Any]) -> None:
    longest = num_positions(config, model)
    of_prompt = config.max_prompt_length or 1
    wanted = config.max_completion_length + of_prompt
    if longest is not None and wanted > longest:
        raise UserError(
            f"prompt and completion may have {wanted} tokens together, more than the {longest} positions of "
            f"{whose_positions(config)}; lower max_completion_length to at most {max(1, longest - of_prompt)}"
            + ("" if config.max_prompt_length else ", and leave room for the prompts"),
            field="max_completion_length",
        )
