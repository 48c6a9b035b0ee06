"""The part of a model's weights that is trained, and therefore saved, pushed and exported: all weights, or adapters.

AllWeights        the whole model, with the names of checkpoints on the hub
AdapterWeights    only LoRA's matrices, with the names of PEFT's files (lora.py)
LiveWeights       either of these, in the form that is pushed
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from services.trainer.policy.lora import BASE_HASH, OLDER_BASE_HASH, adapters, describe_adapters, pushed_adapters
from services.trainer.policy.policy_model import hub_tensors, in_dtype, on_hub, save_description, unique_tensors
from shared.errors import HeadraceError


class TrainedWeights(Protocol):
    """The trained part of a model, as the core saves, pushes and checks it."""

    def live(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint contains, detached; sharded tensors are DTensors."""
        ...

    def pushed(self) -> dict[str, Tensor]:
        """Return the tensors to push, with the names that generators load them by."""
        ...

    def described(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return meta tensors with the names and shapes of `pushed`, in the dtypes that a run with ``dtype`` pushes."""
        ...

    def describe(self, tokenizer: Any | None, directory: Path) -> None:
        """Write the files that are needed to load the saved weights: the config and, if given, the tokenizer."""
        ...

    def numbers(self) -> dict[str, Any]:
        """Return the JSON values that a checkpoint stores to recognise the frozen weights; empty without any."""
        ...

    def check(self, numbers: dict[str, Any], checkpoint: Path) -> None:
        """Raise HeadraceError if a checkpoint with these numbers was trained on other frozen weights."""
        ...


class AllWeights:
    """The trained weights of a run without LoRA: the whole model."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm

    def live(self) -> dict[str, Tensor]:  # noqa: D102
        return unique_tensors(self._lm)

    def pushed(self) -> dict[str, Tensor]:  # noqa: D102
        return hub_tensors(self._lm)

    def described(self, dtype: torch.dtype) -> dict[str, Tensor]:  # noqa: D102
        return on_hub(self._lm, in_dtype(self._lm, dtype))

    def describe(self, tokenizer: Any | None, directory: Path) -> None:  # noqa: D102
        save_description(self._lm, tokenizer, directory)

    def numbers(self) -> dict[str, Any]:  # noqa: D102
        return {}

    def check(self, numbers: dict[str, Any], checkpoint: Path) -> None:
        """Do nothing: no weights are frozen."""


class AdapterWeights:
    """The trained weights of a LoRA run: only the adapters.

    Args:
        lm: A model with adapters.
        base: `lora.base_hashes` of the frozen weights, the same on all ranks.
        model: The run's ``model``, for error messages.
    """

    def __init__(self, lm: Any, *, base: dict[str, int], model: str) -> None:
        self._lm = lm
        self._base = base
        self._model = model

    def live(self) -> dict[str, Tensor]:  # noqa: D102
        return {name: tensor.detach() for name, tensor in adapters(self._lm).items()}

    def pushed(self) -> dict[str, Tensor]:  # noqa: D102
        return pushed_adapters(self._lm, {name: tensor.detach() for name, tensor in self._lm.named_parameters()})

    def described(self, dtype: torch.dtype) -> dict[str, Tensor]:  # noqa: D102
        return {name: torch.empty(one.shape, dtype=dtype, device="meta") for name, one in self.pushed().items()}

    def describe(self, tokenizer: Any | None, directory: Path) -> None:  # noqa: D102
        describe_adapters(self._lm, tokenizer, directory)

    def numbers(self) -> dict[str, Any]:  # noqa: D102
        return dict(self._base)

    def check(self, numbers: dict[str, Any], checkpoint: Path) -> None:  # noqa: D102
        name = BASE_HASH if BASE_HASH in numbers else OLDER_BASE_HASH
        if numbers.get(name) != self._base[name]:
            raise HeadraceError(
                f"the checkpoint {checkpoint} contains adapters of another base: the weights of {self._model} have "
                "changed since they were trained, or they were trained on another model. Restore the original model, "
                "or submit a run with the model that they belong to"
            )


class LiveWeights:
    """Iterates over the weights to push, on a rank that has all of them. Each call starts a new iteration.

    Names are those by which generators load the weights: names of checkpoints on the hub or, for the adapters of a LoRA
    run, names of PEFT's files. Tied weights appear once, and the order is fixed. Floats have the run's dtype, with the
    exceptions of `policy_model.exact_weights`. In float32 the tensors are the weights themselves, detached: use them
    before the next step.

    Args:
        trained: Selects the weights: the whole model, or only the adapters of a LoRA run.
        dtype: The run's dtype.
    """

    def __init__(self, trained: TrainedWeights, *, dtype: torch.dtype) -> None:
        self._trained = trained
        self._dtype = dtype

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of each weight, in the dtype in which it is pushed."""
        described = self._trained.described(self._dtype)
        for name, tensor in self._trained.pushed().items():
            yield name, tensor.to(described[name].dtype)

    def described(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of the weights with meta tensors of their dtypes and shapes, without converting anything."""
        yield from self._trained.described(self._dtype).items()
