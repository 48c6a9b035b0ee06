"""What a policy's core must remember besides its weights, as safetensors and JSON; never as a pickle.

optimizer.safetensors    AdamW's moments and step counts by parameter name, and the states of the random generators
core_state.json          policy version and learning-rate schedule
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shared.errors import HeadraceError

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "core_state.json"

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_CPU_RNG = "rng/cpu"


def save_core_state(
    directory: Path,
    *,
    parameters: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    policy_version: int,
) -> None:
    """Write both files.

    Raises:
        OSError: They could not be written.
    """
    import safetensors.torch

    tensors = {_CPU_RNG: torch.get_rng_state()}
    for index in range(torch.cuda.device_count()):
        tensors[_cuda_rng(index)] = torch.cuda.get_rng_state(index)
    for name, parameter in parameters.items():
        for moment in _MOMENTS:
            if moment in optimizer.state[parameter]:
                tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].contiguous()
    schedule = {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}
    try:
        cast(Any, safetensors.torch).save_file(tensors, directory / OPTIMIZER_FILE)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    state = {"policy_version": policy_version, "schedule": schedule}
    (directory / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")


def load_core_state(
    directory: Path, *, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, scheduler: Any
) -> int:
    """Put optimizer, schedule and random generators back as they were, and return the policy version.

    Raises:
        HeadraceError: The files are of another model.
    """
    import safetensors.torch

    tensors: dict[str, Tensor] = cast(Any, safetensors.torch).load_file(directory / OPTIMIZER_FILE)
    state = json.loads((directory / STATE_FILE).read_text())
    policy_version = int(state["policy_version"])
    optimizer.state.clear()
    for name, parameter in parameters.items():
        moments = {moment: tensors[key] for moment in _MOMENTS if (key := f"{moment}/{name}") in tensors}
        if not moments and policy_version == 0:
            continue
        if len(moments) != len(_MOMENTS) or moments["exp_avg"].shape != parameter.shape:
            raise HeadraceError(f"{directory / OPTIMIZER_FILE} does not fit this model: see parameter {name}")
        # The step count stays on the CPU, where AdamW keeps it.
        optimizer.state[parameter] = {
            moment: tensor if moment == "step" else tensor.to(parameter.device) for moment, tensor in moments.items()
        }
    schedule = state["schedule"]
    scheduler.load_state_dict({**schedule, "lr_lambdas": [None] * len(schedule["base_lrs"])})
    for group, learning_rate in zip(optimizer.param_groups, schedule["_last_lr"], strict=True):
        group["lr"] = learning_rate
    torch.set_rng_state(tensors[_CPU_RNG])
    for index in range(torch.cuda.device_count()):
        # A run may resume on a machine with another number of devices; those it did not know begin afresh.
        if _cuda_rng(index) in tensors:
            torch.cuda.set_rng_state(tensors[_cuda_rng(index)], index)
    return policy_version


def _cuda_rng(index: int) -> str:
    return f"rng/cuda:{index}"
