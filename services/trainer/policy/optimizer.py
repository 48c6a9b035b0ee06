"""The optimizer and its learning-rate schedule, with the parameter groups and defaults of the Hugging Face trainer."""

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from shared.run_options.run_config import RunConfig

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters without weight decay: transformers' Trainer.get_decay_parameter_names."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter with this name."""
    return _NO_DECAY.search(name.lower()) is None


def make_optimizer(parameters: dict[str, Tensor], config: RunConfig) -> torch.optim.Optimizer:
    """Return the run's optimizer over the parameters: one group with weight decay, one without.

    AdamW (arXiv 1711.05101) by default, with the fused kernel, which needs no temporaries. The unfused one holds two as
    large as the embedding at its peak.
    """
    decayed = [parameter for name, parameter in parameters.items() if decays(name)]
    spared = [parameter for name, parameter in parameters.items() if not decays(name)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    filled: Any = [group for group in groups if group["params"]]
    match config.optim:
        case "sgd":
            return torch.optim.SGD(filled, lr=config.learning_rate)
        case "rmsprop":
            return torch.optim.RMSprop(filled, lr=config.learning_rate)
        case "adagrad":
            return torch.optim.Adagrad(filled, lr=config.learning_rate)
        case "adamw_torch" | "adamw_torch_fused":
            return torch.optim.AdamW(
                filled,
                lr=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon,
                fused=config.optim == "adamw_torch_fused",
            )


def make_scheduler(optimizer: torch.optim.Optimizer, config: RunConfig, *, total_steps: int) -> Any:
    """Return transformers' schedule of that name, to be stepped after each optimizer step."""
    import transformers

    schedule = config.lr_schedule()
    total_steps = max(1, total_steps)  # a run of 0 steps only evaluates
    # transformers takes either the length of the stable stage or the length of the run, and warns if given both.
    is_length_told = "num_stable_steps" in schedule.kwargs
    return cast(Any, transformers).get_scheduler(
        schedule.type,
        optimizer,
        num_warmup_steps=schedule.num_warmup_steps(total_steps),
        num_training_steps=None if is_length_told else total_steps,
        scheduler_specific_kwargs=dict(schedule.kwargs),
    )


def lr_factor(config: RunConfig, *, total_steps: int) -> Callable[[int], float]:
    """Return that schedule as a function: from the optimizer steps made to the share of ``learning_rate``."""
    unused = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    factor: Callable[[int], float] = make_scheduler(unused, config, total_steps=total_steps).lr_lambdas[0]
    return factor
