"""Reads the facts about a run's model that a simulated replica needs, from config.json: no weights, no tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import UserError


@dataclass(frozen=True)
class ModelFacts:
    """Limits of a model's inputs and outputs.

    Attributes:
        vocab_size: Token ids are less than this.
        eos_token_id: Token that ends a completion; None if the config does not state it.
        max_positions: Maximum tokens of prompt and completion together; None if the config does not state it.
    """

    vocab_size: int
    eos_token_id: int | None
    max_positions: int | None


def read_model_facts(model: str, *, revision: str | None) -> ModelFacts:
    """Read the facts from config.json of a model directory or a Hugging Face id. Blocks, and may download the file.

    Raises:
        UserError: The config cannot be read, or does not state the vocabulary size.
    """
    try:
        config = msgspec.json.decode(_config_path(model, revision).read_bytes(), type=_Config)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UserError(f"the model {model} cannot be read: {error}", field="model") from error
    text = config.text_config or _Config()
    vocab_size = config.vocab_size or text.vocab_size
    if vocab_size is None or vocab_size < 2:
        raise UserError(f"config.json of {model} does not state the vocabulary size", field="model")
    eos = text.eos_token_id if config.eos_token_id is None else config.eos_token_id
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    return ModelFacts(
        vocab_size=vocab_size,
        eos_token_id=eos if eos is not None and 0 <= eos < vocab_size else None,
        max_positions=config.max_position_embeddings or text.max_position_embeddings,
    )


class _Config(msgspec.Struct):
    """The fields that are read from config.json. A multimodal model nests the text model's fields."""

    vocab_size: int | None = None
    eos_token_id: int | list[int] | None = None
    max_position_embeddings: int | None = None
    text_config: "_Config | None" = None


def _config_path(model: str, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model) / "config.json"
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{model} is not a directory, and huggingface-hub, which could download it, is not installed"
        ) from error
    hub: Any = huggingface_hub  # partly untyped
    return Path(str(hub.hf_hub_download(model, "config.json", revision=revision)))
