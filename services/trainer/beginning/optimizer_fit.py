"""Checks by tensor names that the optimizer state in a checkpoint fits the run's optimizer.

    checkpoint's optimizer/ --read names--> exp_avg, exp_avg_sq --find optimizers--> AdamW --compare--> the run's optim

Some optimizers of bitsandbytes keep tensors of the same names. If the settings of the checkpoint's run are known, its
``optim`` tells such optimizers apart.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from services.trainer.checkpoints.tensor_headers import tensor_headers
from shared.run_options.optimizers import FACTS, Optimizer
from shared.run_options.run_config import RunConfig

_DIRECTORY = "optimizer"
_OF_ADAM, _ONE, _TWO = frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"state1"}), frozenset({"state1", "state2"})
_OF_8_BITS = frozenset({"qmap1", "absmax1", "qmap2", "absmax2"})
_ALWAYS: Final[Mapping[Optimizer, frozenset[str]]] = {
    "adamw_torch_fused": _OF_ADAM,
    "adamw_torch": _OF_ADAM,
    "adafactor": frozenset({"exp_avg_sq_row", "exp_avg_sq_col"}),
    "muon": frozenset({"momentum_buffer"}),
    "sgd": frozenset(),
    "rmsprop": frozenset({"square_avg"}),
    "adagrad": frozenset({"sum"}),
    "adamw_8bit": _TWO,
    "adamw_bnb_8bit": _TWO,
    "paged_adamw_8bit": _TWO,
    "paged_adamw_32bit": _TWO,
    "lion_8bit": _ONE,
    "lion_32bit": _ONE,
    "paged_lion_8bit": _ONE,
    "paged_lion_32bit": _ONE,
    "ademamix": _TWO,
    "ademamix_8bit": _TWO,
    "paged_ademamix_8bit": _TWO,
    "paged_ademamix_32bit": _TWO,
    "rmsprop_bnb": _ONE,
    "rmsprop_bnb_8bit": _ONE,
    "rmsprop_bnb_32bit": _ONE,
}
"""Tensors that an optimizer keeps for some weights of every model, whatever its arguments are."""
_SOMETIMES: Final[Mapping[str, frozenset[str]]] = {
    "adafactor": frozenset({"exp_avg_sq"}),
    "muon": _OF_ADAM,
    "sgd": frozenset({"momentum_buffer"}),
    "rmsprop": frozenset({"momentum_buffer", "grad_avg"}),
    **{optim: _OF_8_BITS for optim in FACTS if optim.endswith("8bit")},
}
"""Tensors that depend on the model and on the arguments."""


def optimizer_misfit(
    config: RunConfig, checkpoint: Path, *, theirs: Mapping[str, Any], steps_before: int
) -> Iterator[str]:
    """Yield an error message if the optimizer state in a checkpoint does not fit the run's optimizer.

    Args:
        config: The run's config.
        checkpoint: The checkpoint's directory.
        theirs: The settings of the run that wrote the checkpoint; empty if they are unknown.
        steps_before: Optimizer steps that the checkpoint's learning-rate schedule has counted.
    """
    there = frozenset(name.split("/", 1)[0] for name in tensor_headers(checkpoint / _DIRECTORY))
    if not there and not steps_before:
        return  # most optimizers have no state before the first step
    ours, known = config.optim, theirs.get("optim")
    kinds: list[Optimizer] = [
        optim for optim in FACTS if _ALWAYS[optim] <= there <= _ALWAYS[optim] | _SOMETIMES.get(optim, frozenset())
    ]
    if known in kinds:
        kinds = [optim for optim in kinds if optim == known]
    if not any(FACTS[optim] == FACTS[ours] for optim in kinds):
        of = f"that of optim: {' or '.join(kinds)}" if kinds else f"another optimizer ({', '.join(sorted(there))})"
        yield f"the optimizer state in {checkpoint} is {of}, and this run has optim: {ours}"
    elif missing := _needed(config) - there:
        yield (
            f"the optimizer state in {checkpoint} does not have {', '.join(sorted(missing))}, which optim: {ours} "
            "needs with this run's settings"
        )


def _needed(config: RunConfig) -> frozenset[str]:
    """Return the names of the state tensors that must be in the checkpoint for the run's optimizer to continue."""
    needed = set(_ALWAYS[config.optim])
    arguments = config.optimizer_arguments()
    if config.optim == "rmsprop" and arguments.get("momentum"):
        needed.add("momentum_buffer")
    if config.optim == "rmsprop" and arguments.get("centered"):
        needed.add("grad_avg")
    # Adapters may be so small that nothing has 8 bits, and Muon leaves none of them to AdamW.
    if config.optim == "muon" and not config.use_peft:
        needed |= _OF_ADAM
    if config.optim.endswith("8bit") and not config.use_peft:
        needed.add("qmap1")
    return frozenset(needed)
