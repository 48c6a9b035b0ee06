"""Checks at submit that a model has the layers that a LoRA run names, without torch and without loading weights.

A weight file whose header cannot be read is ignored. The training rank, which loads the model, decides in the end
(lora.py).
"""

from collections.abc import Iterable
from pathlib import Path

from services.trainer.checkpoints.tensor_headers import linear_layers
from shared.errors import UserError


def check_targets(targets: Iterable[str], directory: Path) -> None:
    """Check that each of a LoRA run's target names fits a linear layer of the model in ``directory``.

    Raises:
        UserError: A name fits no layer; the message lists the names of the layers.
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
