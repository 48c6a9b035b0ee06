"""Loads pushed weights into a vLLM model, and notices when they are not the whole model.

    start -> load chunk, load chunk, ... -> check_complete -> finish

vLLM's layerwise reload does the loading. It leaves three things to its caller, which are done here: a reload that broke
off leaves half-filled layers, which the next one would complete with a mixture; a parameter, or a shard of a fused one,
that never arrives is no error; and on CPU the prepacked head of a model with tied embeddings keeps the old weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing, get_layerwise_info

from services.generator.adapter_reload import AdapterReload


def start_reload(vllm_config: Any, model: Any) -> "CheckedReload | AdapterReload":
    """Return a reload that has started: of the adapters, if the engine serves some, else of the model."""
    reload = CheckedReload(model, vllm_config.model_config) if vllm_config.lora_config is None else AdapterReload(model)
    reload.start()
    return reload


class CheckedReload:
    """One reload of one model.

    Args:
        model: The worker's shard of the model.
        model_config: vLLM's ModelConfig.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._loaded: set[str] = set()
        self._can_tell = model_config.quantization is None

    def start(self) -> None:
        """Prepare every layer to be loaded; what a broken reload left behind is closed first."""
        if any(get_layerwise_info(layer).can_load() for layer in self._model.modules()):
            finalize_layerwise_processing(self._model, self._model_config)
        initialize_layerwise_reload(self._model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some of the checkpoint's parameters, by their Hugging Face names."""
        loaded: set[str] | None = self._model.load_weights(weights)
        if loaded is None:
            self._can_tell = False
        else:
            self._loaded |= loaded

    def check_complete(self) -> None:
        """Raise ValueError if some parameter of this worker's model did not arrive, whole.

        The first question is the one vLLM's own loader asks of a checkpoint; it cannot see a missing shard of a fused
        layer (``k_proj`` of ``qkv_proj``), the second can.
        """
        if not self._can_tell:
            return
        modules: dict[str, Any] = dict(self._model.named_modules())
        heads = {name for name, module in modules.items() if self._is_tied and isinstance(module, ParallelLMHead)}
        expected = {name for name, _ in self._model.named_parameters() if name.rpartition(".")[0] not in heads}
        missing = expected - self._loaded
        for name, module in modules.items():
            is_plain = isinstance(module, LinearBase) and isinstance(module.quant_method, UnquantizedLinearMethod)
            if is_plain and name not in heads and get_layerwise_info(module).can_load():
                missing.add(f"{name} (a part of it)")
        if missing:
            raise ValueError(f"the push lacks {len(missing)} parameters of the model, among them {sorted(missing)[:3]}")

    def finish(self) -> None:
        """Put the loaded layers to use."""
        finalize_layerwise_processing(self._model, self._model_config)
        if self._is_tied and next(self._model.parameters()).device.type == "cpu":
            self._prepack_tied_head()

    @property
    def _is_tied(self) -> bool:
        return bool(getattr(self._model_config.hf_text_config, "tie_word_embeddings", False))

    def _prepack_tied_head(self) -> None:
        modules: list[Any] = list(self._model.modules())
        heads = [module for module in modules if isinstance(module, ParallelLMHead)]
        embeddings = [
            module
            for module in modules
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        ]
        if len(heads) == 1 and len(embeddings) == 1:
            heads[0].weight = embeddings[0].weight
            heads[0].quant_method.process_weights_after_loading(heads[0])
