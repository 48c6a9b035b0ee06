"""Checks that pushed adapters match the model and the run, and writes them as files for vLLM to load.

    check (names, shapes) -> received into staging -> write: in the directory --receiving_engine.py--> add_lora

vLLM silently skips an adapter for a layer that it does not have, and accepts one half of a pair as a pair. Here both
are errors. Every worker of an engine has the same adapters and writes the same files.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from vllm.lora.utils import parse_fine_tuned_lora_name

from services.generator.worker.staged_weights import Spec


class AdapterFiles:
    """One push of a model's adapters.

    Args:
        model: The worker's shard of the model.
        directory: Directory from which vLLM will load them; the same for all workers, and created if missing.
        config: PEFT's adapter_config.json.
    """

    def __init__(self, model: Any, *, directory: str, config: dict[str, Any]) -> None:
        self._model = model
        self._directory = Path(directory)
        self._config = config

    def check(self, specs: Iterable[Spec]) -> None:
        """Return if the adapters are complete, and match this model and the run's rank.

        Raises:
            ValueError: They do not.
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
        """Write the adapters to the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)
        # Workers on one machine write the same bytes to the same place, so each file is replaced atomically.
        aside = self._directory / f".{os.getpid()}"
        cast(Any, safetensors.torch).save_file(dict(tensors), aside)
        aside.replace(self._directory / "adapter_model.safetensors")
        aside.write_text(json.dumps(self._config))
        aside.replace(self._directory / "adapter_config.json")
