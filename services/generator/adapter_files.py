"""Takes pushed adapters, notices when they are not what the model and the run expect, and writes them for vLLM to load.

    check_announced (names, shapes) -> received aside -> write: in the directory --receiving_engine.py--> add_lora

vLLM leaves out, without a word, an adapter for a layer it does not have, and takes one half of a pair for a pair; both
are errors here. Every worker of an engine has the same adapters and writes the same files.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from vllm.lora.utils import parse_fine_tuned_lora_name

from services.generator.staged_weights import Spec


class AdapterFiles:
    """One push of a model's adapters.

    Args:
        model: The worker's shard of the model.
        directory: Where vLLM will load them from; the same for all workers, and made if it is not there.
        config: PEFT's adapter_config.json.
    """

    def __init__(self, model: Any, *, directory: str, config: dict[str, Any]) -> None:
        self._model = model
        self._directory = Path(directory)
        self._config = config

    def check(self, specs: Iterable[Spec]) -> None:
        """Return if these adapters are whole, and of this model and rank.

        Raises:
            ValueError: They are not.
        """
        manager = self._model.lora_manager
        known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        pairs: dict[str, set[bool]] = {}
        for name, _, shape in specs:
            layer, is_a = parse_fine_tuned_lora_name(name, mapper)
            pairs.setdefault(layer, set()).add(is_a)
            rank = shape[0 if is_a else 1]
            if rank != self._config["r"]:
                raise ValueError(f"the pushed adapter {name} has rank {rank}, the run has {self._config['r']}")
        if unknown := sorted(pairs.keys() - known):
            raise ValueError(
                f"vLLM's model has no layer for {len(unknown)} of the pushed adapters, among them {unknown[:3]}; leave "
                "these layers out of lora_target_modules"
            )
        if halves := sorted(layer for layer, found in pairs.items() if len(found) < 2):
            raise ValueError(f"the push lacks one half of {len(halves)} adapters, among them {halves[:3]}")

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write them where vLLM will look."""
        self._directory.mkdir(parents=True, exist_ok=True)
        # Workers of one machine write the same bytes to the same place, each file at once.
        aside = self._directory / f".{os.getpid()}"
        cast(Any, safetensors.torch).save_file(dict(tensors), aside)
        aside.replace(self._directory / "adapter_model.safetensors")
        aside.write_text(json.dumps(self._config))
        aside.replace(self._directory / "adapter_config.json")
