"""Checks, before anything is transferred, that the announced parameters fit this worker's model exactly.

    model --shadow: the same modules, tensors without content--> load_weights(announced, without content) --> missing

Only the model's own loader knows which checkpoint names make up which parameters of vLLM's model. So that loader runs
over a shadow of the model, in the thread that will receive, while the model itself continues to decode. A missing shard
of a fused layer (``k_proj`` of ``qkv_proj``) shows up as a layer that was not filled.

Quantised models are not checked, because their loaders look at the content.

Adapters are checked too: vLLM silently skips an adapter for a layer that it does not have, and accepts one half of a
pair as a pair.
"""

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize, utils

from shared.weights.parameter_spec import Spec

log = logging.getLogger(__name__)

reloading: Any = layerwise  # partly untyped, as are the next
metas: Any = meta
references: Any = sanitize
sizes: Any = utils
hub: Any = huggingface_hub
weight_files: Any = safetensors


class FullSet:
    """Checks whether announced parameters are the full set of a model, of which a worker has a shard.

    ``model_config`` is vLLM's ModelConfig of the model.
    """

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._known: tuple[Any, ...] | None = None

    def check(self, announced: tuple[Spec, ...]) -> None:
        """Check that every parameter of the model is announced, complete, and in the model's dtype or float32.

        Quantised models are not checked. A model whose loader reads the content of parameters is checked only for
        dtypes.

        Raises:
            ValueError: Parameters are missing, incomplete or of another dtype; the message names some of them.
        """
        if announced == self._known or self._model_config.quantization is not None:
            return
        wanted: torch.dtype = self._model_config.dtype
        known = {wanted, torch.float32}  # the biases of some routers are always in float32
        strange = sorted(name for name, dtype, _ in announced if dtype.is_floating_point and dtype not in known)
        if strange:
            raise ValueError(
                f"{len(strange)} parameters do not have the engine's dtype {wanted}, among them {strange[:3]}"
            )
        shadow = _Shadow(self._model)
        if not shadow.is_whole:
            return
        try:
            loaded: set[str] | None = shadow.load(
                (name, torch.empty(shape, dtype=dtype, device="meta")) for name, dtype, shape in announced
            )
        except (AssertionError, IndexError, KeyError, RuntimeError, ValueError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error):
                # This loader looks at the content, which a shadow does not have.
                log.info("the parameters can be checked only when they are loaded: %s", error)
                return
            what = str(error) or type(error).__name__
            raise ValueError(f"{shadow.current} does not fit the model: {what}") from error
        if loaded is not None:
            # A model may have a parameter under several names, such as a bias of a router and its experts.
            all_names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
            spare = all_names - {name for name, _ in self._model.named_parameters()}
            require_all(shadow.model, self._model_config, loaded, is_filled=shadow.is_filled, spare=spare)
        # A loader takes its part of what it gets. It does not check that the parts of all workers make up the whole.
        if too_large := shadow.not_used_up(num_shards=get_tensor_model_parallel_world_size()):
            raise ValueError(f"the model takes only a part of {len(too_large)} parameters, among them {too_large[:3]}")
        self._known = announced


def require_all(
    model: Any, model_config: Any, loaded: set[str], *, is_filled: Callable[[Any], bool], spare: Iterable[str] = ()
) -> None:
    """Raise ValueError if a load left out parameters of vLLM's model, or filled them only partly.

    The first check, which vLLM's own loader also makes for a checkpoint, cannot see a missing shard of a fused layer.
    The second check can.

    Args:
        model: The model, or a shadow of it.
        model_config: vLLM's ModelConfig.
        loaded: The names that ``load_weights`` returned.
        is_filled: Returns whether a linear layer received as many numbers as it has.
        spare: Names that a load may leave out.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    heads = {name for name, module in modules.items() if is_tied(model_config) and isinstance(module, ParallelLMHead)}
    expected = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in heads}
    missing = expected - loaded
    for name, module in modules.items():
        is_plain = isinstance(module, LinearBase) and isinstance(module.quant_method, UnquantizedLinearMethod)
        is_known = any(parameter.rpartition(".")[0] == name for parameter in missing)
        if is_plain and name not in heads and not is_known and not is_filled(module):
            missing.add(f"{name} (a part of it)")
    if lacking := sorted(missing.difference(spare)):
        raise ValueError(f"the push lacks {len(lacking)} parameters of the model, among them {lacking[:3]}")


def is_tied(model_config: Any) -> bool:
    """Return whether the model's input embeddings and output head share one parameter."""
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))


def checkpoint_specs(vllm_config: Any) -> list[Spec]:
    """Return the parameters of the model's checkpoint as a push has them: in the engine's dtype, tied ones once.

    Only the headers of its safetensors files are read. The list is empty if this machine does not have such files.
    """
    model_config = vllm_config.model_config
    directory = Path(model_config.model)
    if not directory.is_dir():
        cache = vllm_config.load_config.download_dir
        try:
            directory = Path(
                hub.snapshot_download(
                    model_config.model, revision=model_config.revision, cache_dir=cache, local_files_only=True
                )
            )
        except (LocalEntryNotFoundError, HFValidationError):
            return []
    specs: dict[str, Spec] = {}
    for file in directory.glob("*.safetensors"):
        if file.name.startswith("consolidated"):  # Mistral's second copy of all weights, under other names
            continue
        with weight_files.safe_open(file, framework="pt") as header:
            for name in header.keys():  # noqa: SIM118  it is not a dictionary
                specs[name] = Spec(name, model_config.dtype, tuple(header.get_slice(name).get_shape()))
    if is_tied(model_config):
        specs.pop("lm_head.weight", None)
    return list(specs.values())


def check_adapters(model: Any, specs: Iterable[Spec], *, rank: int) -> None:
    """Check that the announced adapters are complete, and match the layers of this model and the run's ``rank``.

    Raises:
        ValueError: An adapter has another rank, belongs to an unknown layer, or lacks one of its two matrices.
    """
    manager = model.lora_manager
    known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    pairs: dict[str, set[bool]] = {}
    for name, _, shape in specs:
        layer, is_a = parse_fine_tuned_lora_name(name, mapper)
        pairs.setdefault(layer, set()).add(is_a)
        pushed_rank = shape[0 if is_a else 1]
        if pushed_rank != rank:
            raise ValueError(f"the pushed adapter {name} has rank {pushed_rank}, the run has {rank}")
    if unknown := sorted(pairs.keys() - known):
        raise ValueError(
            f"vLLM's model has no layer for {len(unknown)} of the pushed adapters, among them {unknown[:3]}; leave "
            "these layers out of lora_target_modules"
        )
    if halves := sorted(layer for layer, found in pairs.items() if len(found) < 2):
        raise ValueError(f"the push lacks one half of {len(halves)} adapters, among them {halves[:3]}")


class _Shadow:
    """A copy of a model whose tensors have no content. Loading into it counts elements, and does not change the model.

    Attributes:
        model: The shadow.
        is_whole: Whether vLLM recorded the original form of every parameter when it loaded the model.
        current: Name of the parameter that is being loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.is_whole = True
        self.current = ""
        self._numbers: dict[int, int] = {}
        self._pushed: dict[int, tuple[str, torch.Tensor]] = {}
        self._taken: dict[str, int] = {}
        self._copies: dict[int, nn.Module] = {}
        self.model: Any = self._copy(model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load the announced parameters, and return the names that the model's loader filled; None if unknown."""

        def named() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self.current = name
                self._pushed[id(tensor)] = name, tensor
                yield name, tensor

        loaded: set[str] | None = self.model.load_weights(named())
        return loaded

    def is_filled(self, layer: Any) -> bool:
        """Return whether a layer of the shadow received as many elements as it has."""
        return self._numbers.get(id(layer), 0) >= int(sizes.get_layer_size(layer))

    def not_used_up(self, *, num_shards: int) -> list[str]:
        """Return the names of parameters with more elements than ``num_shards`` workers can have taken together."""
        sizes_of = {name: tensor.numel() for name, tensor in self._pushed.values()}
        return sorted(name for name, number in self._taken.items() if 0 < number * num_shards < sizes_of[name])

    def _copy(self, module: nn.Module) -> nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        copy: Any = object.__new__(type(module))
        self._copies[id(module)] = copy
        copy.__dict__.update(module.__dict__)
        parameters, buffers = reloading.get_layerwise_info(module).restore_metadata
        now_parameters, now_buffers = sizes.get_layer_params_buffers(module)
        if now_parameters and not parameters and not all(name in metas.SKIP_TENSORS for name in now_parameters):
            self.is_whole = False
        # vLLM never moves these to the meta device: biases, and tables that loaders read but never load.
        parameters = parameters | {name: now_parameters[name] for name in now_parameters if name in metas.SKIP_TENSORS}
        tables = {name: now_buffers[name] for name in now_buffers if name in metas.SKIP_TENSORS}
        copy.__dict__ |= {
            "_parameters": {name: self._counting(tensor, module, copy) for name, tensor in parameters.items()},
            "_buffers": tables | {name: self._counting(tensor, module, copy) for name, tensor in buffers.items()},
            # Not named_children, which leaves out a second name of the same module, such as a tied head.
            "_modules": {
                name: None if child is None else self._copy(child)
                for name, child in module.__dict__["_modules"].items()
            },
        }
        shadow: nn.Module = copy
        return shadow

    def _counting(self, tensor: torch.Tensor, layer: nn.Module, copy: nn.Module) -> torch.Tensor:
        empty: Any = metas.to_meta_tensor(tensor)
        references.restore_layer_refs(references.sanitize_layer_refs(empty, layer), copy)
        load: Any = reloading._get_original_loader(empty)  # noqa: SLF001  without the wrapper that a reload adds
        signature = inspect.signature(load)

        @wraps(load, assigned=("__doc__", "__annotations__"))
        def counted(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            number, result = metas.get_numel_loaded(load, bound)
            self._numbers[id(copy)] = self._numbers.get(id(copy), 0) + number
            for value in bound.arguments.values():
                # Only the pushed tensor itself: the model may have made tensors of other sizes from it.
                if id(value) in self._pushed:
                    name, _ = self._pushed[id(value)]
                    self._taken[name] = self._taken.get(name, 0) + number
            return result

        empty.weight_loader = counted
        result: torch.Tensor = empty
        return result
