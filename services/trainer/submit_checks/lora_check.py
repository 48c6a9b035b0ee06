"""Checks a LoRA run at submit, without torch and without loading weights.

    does the model have the layers?    by the headers of its weight files
    can the base be held in 4 bits?    by this machine's GPUs and packages

A header that cannot be read is ignored. The training rank, which loads the model, decides in the end (lora.py).
"""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from services.trainer.checkpoints.tensor_headers import tensor_headers
from shared.errors import UserError
from shared.gpus import num_gpus
from shared.install_commands import install_packages
from shared.run_options.run_config import RunConfig

_NO_LAYERS = ("embed_tokens", "lm_head", "embed_out", "wte", "wpe")


def check_targets(targets: Iterable[str], directory: Path) -> None:
    """Check that the model in a directory has the layers.

    Raises:
        UserError: It has no layer of some name; the message lists the names it has.
    """
    layers = linear_layers(directory)
    unmatched = [
        target for target in targets if not any(name == target or name.endswith(f".{target}") for name in layers)
    ]
    if layers and unmatched:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise UserError(
            f"no linear layer of this model is named {' or '.join(unmatched)}; its layers are {known}. Leave "
            "lora_target_modules out to give an adapter to each of them",
            field="lora_target_modules",
        )


def why_not_4bit(config: RunConfig, environment: Mapping[str, str]) -> str | None:
    """Return why a training rank with this environment could not hold the base in 4 bits, or None if it can."""
    if not config.load_in_4bit:
        return None
    if num_gpus(environment) == 0:
        return "load_in_4bit needs a GPU, and the trainer has none; leave it out"
    if importlib.util.find_spec("bitsandbytes") is None:
        return (
            f"load_in_4bit needs bitsandbytes where the trainer runs; install with {install_packages('bitsandbytes')}"
        )
    return None


def linear_layers(directory: Path) -> set[str]:
    """Return the names of layers with a matrix, without the experts of a mixture, which get no adapters."""
    layers = {
        name.removesuffix(".weight")
        for name, about in tensor_headers(directory).items()
        if name.endswith(".weight") and len(about.get("shape", ())) == 2
    }
    return {name for name in layers if ".experts." not in name and name.rpartition(".")[2] not in _NO_LAYERS}
