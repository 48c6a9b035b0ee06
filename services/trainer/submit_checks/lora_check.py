"""Checks at submit that a model has the layers that a LoRA run names, without torch and without loading weights.

A header of a weight file that cannot be read is ignored. The training rank, which loads the model, decides in the end
(lora.py).
"""

from collections.abc import Iterable
from pathlib import Path

from services.trainer.checkpoints.tensor_headers import tensor_headers
from shared.errors import UserError

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


def linear_layers(directory: Path) -> set[str]:
    """Return the names of layers with a matrix, without the experts of a mixture, which get no adapters."""
    layers = {
        name.removesuffix(".weight")
        for name, about in tensor_headers(directory).items()
        if name.endswith(".weight") and len(about.get("shape", ())) == 2
    }
    return {name for name in layers if ".experts." not in name and name.rpartition(".")[2] not in _NO_LAYERS}
