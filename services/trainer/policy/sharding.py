"""Shards a policy over the training ranks with FSDP2: each decoder layer, then the rest.

    rank 0   reads the weights to the CPU --+
    rank 1   builds it without weights     -+-- layer: fully_shard --> DTensors, 1/N of every weight on each rank
    rank 2   builds it without weights     -+-- one weight at a time: broadcast, each rank keeps its part

Only the first rank ever holds the whole model, on the CPU, until its weights are distributed. The shards are float32
master weights. If the run computes in bfloat16, layers are gathered in bfloat16, rounded as autocast would round them
(policy_module.py). Embeddings and the last projection are gathered in float32: ``cast_lm_head_to_fp32`` may need it.
Gradients are summed in float32 over the ranks, not averaged: the losses are already normalised (loss.py).
"""

import contextlib
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.policy.policy_model import load_policy
from services.trainer.policy.ranks import Ranks
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

c10d: Any = torch.distributed  # a binding to C++ without complete types

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_policy_on(
    ranks: Ranks,
    model: str,
    *,
    revision: str | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    quantization: Any | None = None,
) -> Any:
    """Load a model. With several ranks, only rank 0 gets weights, and `shard` distributes them.

    Raises:
        UserError: The model cannot be used; the message says why.
    """
    if ranks.size == 1:
        return load_policy(model, revision=revision, device=device, dtype=dtype, quantization=quantization)
    if ranks.rank == 0:
        return load_policy(model, revision=revision, device=torch.device("cpu"), dtype=dtype)
    return _without_weights(model, revision, dtype)


def fetch(model: str, *, revision: str | None) -> None:
    """Download a hub model to this machine, so that reading it takes minutes at most. Does nothing for a directory.

    Errors are ignored: they occur again when the model is read, and are reported there.
    """
    import huggingface_hub

    from services.trainer.data.prompt_encoder import unreadable

    if Path(model).exists():
        return
    with contextlib.suppress(*unreadable()):
        cast(Any, huggingface_hub).snapshot_download(
            model,
            revision=revision,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            ignore_patterns=["original/*", "consolidated*"],
        )


def shard(module: nn.Module, config: RunConfig, *, ranks: Ranks, device: torch.device) -> None:
    """Shard a module in place over the ranks. Its ``lm`` comes from `load_policy_on`. Call it on every rank.

    Args:
        module: A module whose forward runs the whole model.
        config: The run's settings.
        ranks: Two or more ranks.
        device: The device of this rank.

    Raises:
        UserError: The model's decoder layers cannot be identified.
        RankLostError: Not every rank came in time.
        RuntimeError: A rank is gone.
    """
    lm: Any = cast(Any, module).lm
    set_dtypes_of_first_rank(module, ranks)
    full = {name: parameter.detach() for name, parameter in module.named_parameters()} if ranks.rank == 0 else {}
    options: Any = {"mesh": ranks.mesh, "reshard_after_forward": config.fsdp_reshard_after_forward}
    for _, layer in decoder_layers(lm):
        _materialise(layer, device)
        _fully_shard(layer, {**options, "mp_policy": _layer_precision(config)})
    _materialise(module, device)
    lm.tie_weights()
    _fully_shard(module, options)
    _hand_out(module, full, device)
    # Weights gathered for a pass without gradient would be outdated after the next step.
    module.register_forward_hook(_reshard_without_grad)


def decoder_layers(lm: Any) -> list[tuple[str, nn.Module]]:
    """Return the decoder layers with their names, in order: the modules that transformers never splits over devices.

    Raises:
        UserError: The model does not name such layers.
    """
    unsplit = set(getattr(lm, "_no_split_modules", None) or ())
    found: list[tuple[str, nn.Module]] = []
    for name, module in lm.named_modules():
        inside_one = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not inside_one and unsplit.intersection(kind.__name__ for kind in type(module).__mro__):
            found.append((name, module))
    if not found:
        raise UserError(
            f"{type(lm).__name__} does not name its decoder layers, so it cannot be sharded over several "
            "ranks. Set nproc_per_node: 1 and nnodes: 1",
            field="nproc_per_node",
        )
    return found


def set_dtypes_of_first_rank(module: nn.Module, ranks: Ranks) -> None:
    """Convert weights and buffers to rank 0's dtypes, so that broadcasts have one size. Call it on every rank.

    A few architectures have other dtypes when they are built from a config than when their weights are loaded. Integers
    and dtypes below 16 bits stay.

    Raises:
        RankLostError: Not every rank came in time.
    """
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    own = [_FLOATS.index(tensor.dtype) if tensor.dtype in _FLOATS else -1 for _, tensor in named]
    for (_, tensor), number in zip(named, ranks.gather(np.array(own, dtype=np.float64))[0], strict=True):
        if number >= 0:
            tensor.data = tensor.data.to(_FLOATS[int(number)])


def as_float(tensor: Tensor) -> float:
    """Return the number in a tensor of one element, which may be sharded. Call it on every rank."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def _layer_precision(config: RunConfig) -> MixedPrecisionPolicy:
    """Return FSDP's mixed precision for a layer: weights gathered in the run's dtype, gradients summed in float32.

    A layer's inputs are not cast, or the residual stream would lose its float32.
    """
    if config.dtype != "bfloat16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _fully_shard(module: nn.Module, options: Any) -> None:
    sharded: Any = fully_shard(module, **options)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(enable=True)  # gloo only has sums, and sums are needed


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate memory for parts on the meta device. Parts that are sharded already have memory."""
    for part in module.modules():
        if any(tensor.is_meta for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            part.to_empty(device=device, recurse=False)


@torch.no_grad()
def _hand_out(module: nn.Module, full: dict[str, Tensor], device: torch.device) -> None:
    """Broadcast every weight and buffer from rank 0, in the same order on all ranks. Each rank keeps its shards."""
    for name, parameter in module.named_parameters():
        read = full.pop(name, None)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device) if read is None else read.to(device)
        c10d.broadcast(whole, src=0)
        own: Any = parameter
        own.copy_(distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None))
    for buffer in module.buffers():
        c10d.broadcast(buffer, src=0)


def _reshard_without_grad(module: nn.Module, arguments: Any, output: Any) -> None:
    del arguments, output
    if not torch.is_grad_enabled():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _without_weights(model: str, revision: str | None, dtype: torch.dtype) -> Any:
    """Create the model from its config on the meta device, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from services.trainer.data.prompt_encoder import refuse_own_code, unreadable

    refuse_own_code(model, revision)
    try:
        config: Any = cast(Any, AutoConfig).from_pretrained(model, revision=revision, trust_remote_code=False)
        with torch.device("meta"):
            lm: Any = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype, trust_remote_code=False)
    except unreadable() as error:
        raise UserError(f"the model {model!r} could not be loaded: {error}", field="model") from error
    lm.eval()
    return lm
