"""Creates a run's models: the policy, the reference for a KL term, and the set of weights that checkpoints keep.

    config --> policy --packing tested--> reference, if there is a KL term --> contents of a checkpoint

Every training rank makes the same calls in the same order, because ranks communicate while weights are distributed and
while packing is tested.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.policy.compiled_layers import compile_layers
from services.trainer.policy.lora import BaseReference, add_adapters, base_hashes
from services.trainer.policy.model_options import run_dtype, use_liger_kernel
from services.trainer.policy.packing_check import settle_packing
from services.trainer.policy.policy_model import unique_tensors
from services.trainer.policy.policy_module import PolicyModule
from services.trainer.policy.ranks import Ranks
from services.trainer.policy.reference_policy import FrozenReference, Reference
from services.trainer.policy.sharding import load_policy_on, shard
from services.trainer.policy.trained_weights import AdapterWeights, AllWeights, TrainedWeights
from shared.errors import UserError
from shared.install_commands import install_packages
from shared.run_options.run_config import RunConfig


@dataclass(frozen=True, eq=False)
class RunModels:
    """The models of a run on one rank: the policy and, if the loss has a KL term, the reference."""

    policy: PolicyModule
    reference: Reference | None
    """None in a run without a KL term."""
    trained: TrainedWeights
    """The policy's weights that are pushed, saved and exported."""
    saved: Mapping[str, Mapping[str, Tensor]]
    """The live tensors that a checkpoint contains, by collection and name."""
    dtype: torch.dtype
    """Dtype of the weights when they are pushed and exported."""


def load_models(config: RunConfig, model_dir_or_id: str, *, device: torch.device, ranks: Ranks) -> RunModels:
    """Load the models that a run needs, ready to compute. Every rank calls this.

    Args:
        config: The run's config.
        model_dir_or_id: Directory or hub id of the initial weights.
        device: Device to compute on.
        ranks: The group of training ranks, over which the models are sharded.

    Raises:
        UserError: The model cannot be used; the message says why.
        RankLostError: A rank is gone.
    """
    dtype = run_dtype(config)
    policy, base = _load_module(config, model_dir_or_id, device=device, ranks=ranks)
    settle_packing(
        policy,
        device=device,
        # sharding.py gathers weights in the run's dtype, and the frozen base is stored in it.
        is_rounded=dtype == torch.bfloat16 and (ranks.mesh is not None or config.use_peft),
        packing=config.packing,
    )
    if config.torch_compile:
        compile_layers(policy.lm, config, device=device)
    trained = _trained_weights(policy, config, base=base, ranks=ranks)
    saved: dict[str, Mapping[str, Tensor]] = {"model": trained.live()}
    reference: Reference | None = None
    if config.beta != 0 and config.use_peft:
        reference = BaseReference(policy)
    elif config.beta != 0:
        frozen, _ = _load_module(config, model_dir_or_id, device=device, ranks=ranks, is_frozen=True)
        frozen.attend_like(policy)
        if config.torch_compile:
            compile_layers(frozen.lm, config, device=device)
        reference = FrozenReference(frozen, config)
        if config.sync_ref_model:
            saved["reference"] = unique_tensors(frozen.lm)
    return RunModels(policy=policy, reference=reference, trained=trained, saved=saved, dtype=dtype)


def _load_module(
    config: RunConfig, model: str, *, device: torch.device, ranks: Ranks, is_frozen: bool = False
) -> tuple[PolicyModule, dict[str, int]]:
    """Load one model, and shard it if there are several ranks. Return it with the hashes of its frozen base.

    The hashes are empty without LoRA, and 0 on ranks that read no weights.
    """
    revision = config.model_revision if model == config.model else None
    lm = load_policy_on(ranks, model, revision=revision, device=device, **_frozen_base(config, device=device))
    if config.use_liger_kernel:
        use_liger_kernel(lm, device=device)
    base: dict[str, int] = {}
    if config.use_peft:
        base = base_hashes(lm)
        add_adapters(lm, config)
    module = PolicyModule(lm, config, device=device, is_frozen=is_frozen, is_alone=ranks.mesh is None)
    if ranks.mesh is not None:
        shard(module, config, ranks=ranks, device=device)
    return module, base


def _trained_weights(policy: PolicyModule, config: RunConfig, *, base: dict[str, int], ranks: Ranks) -> TrainedWeights:
    if not config.use_peft:
        return AllWeights(policy.lm)
    # Only the first rank has read the base. Integers of 48 bits are exact in float64.
    base_of_first, *_ = ranks.gather(np.array(list(base.values()), dtype=np.float64))
    hashes = dict(zip(base, map(int, base_of_first), strict=True))
    return AdapterWeights(policy.lm, base=hashes, model=config.model)


def _frozen_base(config: RunConfig, *, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `policy_model.load_policy` for a frozen base; empty if all weights are trained.

    The base never changes, so it needs no float32 master copy. It is stored in the run's dtype, or in 4 bits (QLoRA,
    arXiv 2305.14314): bitsandbytes stores it as NF4 with double quantisation, and converts matrices back to bfloat16
    for products. The generator stores it in the same way (engine_spec.py), or its logprobs would belong to another
    model.

    Raises:
        UserError: This device cannot hold the base in 4 bits.
    """
    if not config.use_peft:
        return {}
    dtype = run_dtype(config)
    if not config.load_in_4bit:
        return {"dtype": dtype}
    if device.type != "cuda":
        raise UserError("load_in_4bit needs a GPU, and the trainer has none; leave it out", field="load_in_4bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"load_in_4bit needs bitsandbytes; install it with {install_packages('bitsandbytes')}",
            field="load_in_4bit",
        )
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "quantization": quantization}
