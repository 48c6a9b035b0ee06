"""Takes pushed adapters, notices when they are not what the model and the run expect, and writes them for vLLM to load.

    start -> load chunk, load chunk, ... -> check_complete: in the directory --receiving_engine.py--> add_lora

vLLM leaves out, without a word, an adapter for a layer it does not have, and takes one half of a pair for a pair; both
are errors here. Every worker of an engine has the same adapters and writes the same files.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from vllm.lora.utils import parse_fine_tuned_lora_name


class AdapterReload:
    """One reload of a model's adapters, with the interface of checked_reload.CheckedReload.

    Args:
        model: The worker's shard of the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._directory = Path()
        self._config: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Forget what an earlier push left."""
        self._tensors = {}

    def announce(self, *, directory: str, config: dict[str, Any]) -> None:
        """Take note of where the adapters go, and what they are.

        Args:
            directory: Where vLLM will load them from; the same for all workers, and made if it is not there.
            config: PEFT's adapter_config.json.
        """
        self._directory, self._config = Path(directory), config

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep a copy of some of the adapters, by the names of PEFT's files."""
        for name, tensor in weights:
            self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def check_complete(self) -> None:
        """Write the adapters, if they are whole.

        Raises:
            ValueError: They are not, or are of another model or rank.
        """
        manager = self._model.lora_manager
        known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        pairs: dict[str, set[bool]] = {}
        for name, tensor in self._tensors.items():
            layer, is_a = parse_fine_tuned_lora_name(name, mapper)
            pairs.setdefault(layer, set()).add(is_a)
            rank = tensor.shape[0 if is_a else 1]
            if rank != self._config["r"]:
                raise ValueError(f"the pushed adapter {name} has rank {rank}, the run has {self._config['r']}")
        if unknown := sorted(pairs.keys() - known):
            raise ValueError(
                f"vLLM's model has no layer for {len(unknown)} of the pushed adapters, among them {unknown[:3]}; leave "
                "these layers out of lora_target_modules"
            )
        if halves := sorted(layer for layer, found in pairs.items() if len(found) < 2):
            raise ValueError(f"the push lacks one half of {len(halves)} adapters, among them {halves[:3]}")
        self._write()

    def finish(self) -> None:
        """Nothing is put to use here: vLLM drops its adapters when an update ends, and is told then to load these."""
        self._tensors = {}

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        # Workers of one machine write the same bytes to the same place, each file at once.
        aside = self._directory / f".{os.getpid()}"
        cast(Any, safetensors.torch).save_file(self._tensors, aside)
        aside.replace(self._directory / "adapter_model.safetensors")
        aside.write_text(json.dumps(self._config))
        aside.replace(self._directory / "adapter_config.json")
