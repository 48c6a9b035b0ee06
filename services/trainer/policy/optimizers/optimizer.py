"""The optimizer and its learning-rate schedule, with the parameter groups and defaults of the Hugging Face trainer."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.policy.optimizers.muon import MuonWithAdamW
from shared.errors import UserError
from shared.install_commands import install_extras
from shared.run_options.run_config import RunConfig

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters without weight decay, with all of layer norms: Trainer.get_decay_parameter_names."""
_MATRIX = 2
_BETA3, _ALPHA = 0.9999, 5.0
"""transformers' defaults for AdEMAMix (arXiv 2409.03137)."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter with this name."""
    return _NO_DECAY.search(name.lower()) is None


def make_optimizer(
    parameters: Mapping[str, Tensor], config: RunConfig, *, ends: Sequence[Tensor] = (), spared: Sequence[Tensor] = ()
) -> torch.optim.Optimizer:
    """Return the run's optimizer over the parameters: one group with weight decay, one without.

    AdamW (arXiv 1711.05101) by default, with the fused kernel, which needs no temporaries. The unfused kernel holds two
    temporaries as large as the embedding. Each optimizer gets the arguments that transformers' Trainer gives it.

    Args:
        parameters: The trained parameters by name.
        config: The run's config.
        ends: The embeddings, then the last projection. Muon leaves them to AdamW, and embeddings get no 8-bit moments.
        spared: Parameters without weight decay whatever their name.

    Raises:
        UserError: The optimizer's package is not installed, or does not work here.
    """
    if config.optim == "muon":
        return _muon(parameters, config, ends, spared)
    groups = _groups(parameters, config, spared)
    arguments: Any = config.optimizer_arguments()
    match config.optim:
        case "adafactor":
            from transformers import optimization

            library: Any = optimization
            made: torch.optim.Optimizer = library.Adafactor(
                groups, lr=config.learning_rate, scale_parameter=False, relative_step=False
            )
            return made
        case "sgd":
            return torch.optim.SGD(groups, lr=config.learning_rate, **arguments)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=config.learning_rate, **arguments)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=config.learning_rate, **arguments)
        case "adamw_torch" | "adamw_torch_fused":
            return _adamw(groups, config, is_fused=config.optim == "adamw_torch_fused")
        case _:
            return _of_bitsandbytes(groups, config, arguments, ends)


def norms_of(lm: torch.nn.Module) -> list[Tensor]:
    """Return the parameters of all LayerNorm modules. Names such as ``ln_1`` do not show that they belong to norms."""
    kind = torch.nn.LayerNorm
    return [parameter for module in lm.modules() if isinstance(module, kind) for parameter in module.parameters()]


def _groups(parameters: Mapping[str, Tensor], config: RunConfig, spared: Sequence[Tensor]) -> Any:
    """Split the parameters into a group with weight decay and one without; leave out an empty group."""
    by_id = {id(it) for it in spared}
    decayed = [it for name, it in parameters.items() if decays(name) and id(it) not in by_id]
    others = [it for name, it in parameters.items() if not decays(name) or id(it) in by_id]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw(groups: Any, config: RunConfig, *, is_fused: bool) -> torch.optim.Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=is_fused)


def _muon(
    parameters: Mapping[str, Tensor], config: RunConfig, ends: Sequence[Tensor], spared: Sequence[Tensor]
) -> torch.optim.Optimizer:
    of_ends = {id(end) for end in ends}
    matrices = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.dim() == _MATRIX and id(parameter) not in of_ends
    }
    others = {name: parameter for name, parameter in parameters.items() if name not in matrices}
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        arguments: Any = {"adjust_lr_fn": "match_rms_adamw", **config.optimizer_arguments()}
        optimizers.append(torch.optim.Muon(_groups(matrices, config, spared), lr=config.learning_rate, **arguments))
    if others:
        optimizers.append(_adamw(_groups(others, config, spared), config, is_fused=True))
    return MuonWithAdamW(optimizers)


def _of_bitsandbytes(
    groups: Any, config: RunConfig, arguments: Mapping[str, Any], ends: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """Return an optimizer of bitsandbytes, with moments of 8 or 32 bits, and in paged memory if its name says so."""
    name = config.optim
    try:
        optim: Any = importlib.import_module("bitsandbytes.optim")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"{name} needs bitsandbytes, which cannot be used here ({error}); install with "
            f"{install_extras('trainer-8bit')}",
            field="optim",
        ) from error
    common: dict[str, Any] = {"lr": config.learning_rate, "optim_bits": 8 if "8bit" in name else 32}
    betas = (config.adam_beta1, config.adam_beta2)
    is_paged = "paged" in name
    if "adamw" in name:
        made: Any = optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, is_paged=is_paged, **common)
    elif "lion" in name:
        made = optim.Lion(groups, betas=betas, is_paged=is_paged, **common)
    elif "rmsprop" in name:
        made = optim.RMSprop(groups, **arguments, **common)
    else:
        slow = {"betas": (*betas, arguments.get("beta3", _BETA3)), "alpha": arguments.get("alpha", _ALPHA)}
        times = {key: value for key, value in arguments.items() if key.startswith("t_")}
        common |= {**slow, **times, "eps": config.adam_epsilon, "is_paged": is_paged}
        made = optim.AdEMAMix(groups, **common)
    # As in transformers, the moments of the embeddings have 32 bits. bitsandbytes keeps such exceptions for the whole
    # process by the ids of tensors, which other tensors may get later.
    made.mng = manager = object.__new__(optim.GlobalOptimManager)
    manager.initialize()
    for embeddings in ends[:1]:
        manager.override_config(embeddings, key_value_dict={"optim_bits": 32} if "8bit" in name else {})
    return cast("torch.optim.Optimizer", made)


def make_scheduler(optimizer: torch.optim.Optimizer, config: RunConfig, *, total_steps: int) -> Any:
    """Return the run's learning-rate scheduler, with transformers' rates. Step it after each optimizer step."""
    schedule = config.lr_schedule()
    total_steps = max(1, total_steps)  # a run of 0 steps only evaluates
    if schedule.type == "linear":
        rise = schedule.num_warmup_steps(total_steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_linear, rise=rise, total_steps=total_steps))
    import transformers

    # transformers takes either the length of the stable stage or the length of the run, and warns if given both.
    is_length_told = "num_stable_steps" in schedule.kwargs
    return cast(Any, transformers).get_scheduler(
        schedule.type,
        optimizer,
        num_warmup_steps=schedule.num_warmup_steps(total_steps),
        num_training_steps=None if is_length_told else total_steps,
        scheduler_specific_kwargs=dict(schedule.kwargs),
    )


def _linear(step: int, *, rise: int, total_steps: int) -> float:
    """Return the linear schedule's factor at ``step``: it grows to 1 over ``rise`` steps, then falls to 0.

    transformers' own function takes a second to import, because it imports PEFT and bitsandbytes.
    """
    return step / rise if step < rise else max(0.0, (total_steps - step) / max(1, total_steps - rise))


def lr_factor(config: RunConfig, *, total_steps: int) -> Callable[[int], float]:
    """Return the learning-rate schedule as a function: from completed steps to the factor of ``learning_rate``."""
    unused = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    factor: Callable[[int], float] = make_scheduler(unused, config, total_steps=total_steps).lr_lambdas[0]
    return factor
