"""Loads pushed weights into a vLLM model, and checks that they are the whole model.

    CheckedReload -> load, load, ... -> check_complete -> finish

vLLM's layerwise reload does the loading. It leaves three problems to its caller, which are solved here. A reload that
was interrupted leaves half-filled layers, which the next reload would complete with a mixture. A parameter, or a shard
of a fused parameter, that never arrives is not an error. On CPU, the prepacked head of a model with tied embeddings
keeps the old weights.

Adapters are written to files, from which receiving_engine.py has vLLM load them.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing, get_layerwise_info

from services.generator.worker.model_check import is_tied, require_all


class CheckedReload:
    """Replaces the weights of one worker's shard of a model, and checks that none is missing.

    The constructor prepares every layer for loading, and first finishes an interrupted reload. ``model_config`` is
    vLLM's ModelConfig of the model.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._loaded: set[str] = set()
        self._can_tell = model_config.quantization is None
        if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
            finalize_layerwise_processing(model, model_config)
        initialize_layerwise_reload(model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some of the checkpoint's parameters, by their Hugging Face names."""
        loaded: set[str] | None = self._model.load_weights(weights)
        if loaded is None:
            self._can_tell = False
        else:
            self._loaded |= loaded

    def check_complete(self) -> None:
        """Raise ValueError if a parameter of this worker's model was not loaded, or only partly."""
        if self._can_tell:
            require_all(
                self._model,
                self._model_config,
                self._loaded,
                is_filled=lambda layer: not get_layerwise_info(layer).can_load(),
            )

    def finish(self) -> None:
        """Finish the reload, so that the model computes with the loaded layers."""
        finalize_layerwise_processing(self._model, self._model_config)
        if is_tied(self._model_config) and next(self._model.parameters()).device.type == "cpu":
            prepack_tied_head(self._model)


def prepack_tied_head(model: Any) -> None:
    """Make the head of a model with tied embeddings compute with the current embeddings.

    On a CPU, the head's prepacked copy of the embeddings would keep the old weights.
    """
    modules: list[Any] = list(model.modules())
    heads = [module for module in modules if isinstance(module, ParallelLMHead)]
    embeddings = [
        module
        for module in modules
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(heads) == 1 and len(embeddings) == 1:
        heads[0].weight = embeddings[0].weight
        heads[0].quant_method.process_weights_after_loading(heads[0])


def write_adapters(tensors: Mapping[str, torch.Tensor], *, directory: Path, config: dict[str, Any]) -> None:
    """Write received adapters as files for vLLM.

    Args:
        tensors: The adapters by name. Every worker of an engine has the same ones, and writes the same files.
        directory: Directory from which vLLM will load them; the same for all workers, and created if missing.
        config: PEFT's adapter_config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Workers on one machine write the same bytes to the same place, so each file is replaced atomically.
    aside = directory / f".{os.getpid()}"
    cast(Any, safetensors.torch).save_file(dict(tensors), aside)
    aside.replace(directory / "adapter_model.safetensors")
    aside.write_text(json.dumps(config))
    aside.replace(directory / "adapter_config.json")
