"""Copies the state of model and optimizer while training stands still, and writes it while training continues.

    weights, optimizer state --copy--> buffers --write--> model/, optimizer/           shards of every rank (shards.py)
    random generators                          --write--> rng/rank-00001.safetensors   one file per rank
    schedule, step counts, the core's numbers  --write--> core_state.json              by rank 0
    config, tokenizer                          --write--> model/                       by rank 0

Every rank has one ``CoreState`` and makes the same calls in the same order. A save is complete when all ranks have
reported to each other. They report over a separate process group, so that these messages never mix with
training's. No file is a pickle.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.checkpoints.copy_memory import CopyMemory
from services.trainer.checkpoints.manifest import part_file, write_part
from services.trainer.checkpoints.saving_group import SavingGroup
from services.trainer.checkpoints.shards import (
    Part,
    ShardError,
    local_part,
    read_shards,
    saved_dtypes,
    saved_shapes,
    write_shards,
)
from services.trainer.checkpoints.tensor_file import write_tensors
from shared.errors import HeadraceError

log = logging.getLogger(__name__)

STATE_FILE = "core_state.json"
OPTIMIZER = "optimizer"

_WAIT_FOR_WRITING_S = 3600.0


class CoreState:
    """Saves and restores one rank's share of weights, optimizer, schedule and random generators.

    With several ranks, create it on all of them, after ``torch.distributed`` was initialised.

    Args:
        weights: The live tensors by collection (model first, then reference) and name. Each collection becomes a
            directory. Sharded tensors are DTensors.
        parameters: The parameters with optimizer state, by name.
        optimizer: Optimizer of these parameters.
        scheduler: Scheduler of the learning rate.
        rank: Number of this rank, from 0 to ``num_ranks - 1``.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, Mapping[str, Tensor]],
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._weights = weights
        self._parameters = parameters
        self._optimizer: Any = optimizer
        self._scheduler = scheduler
        self._rank = rank
        self._num_ranks = num_ranks
        self._group = SavingGroup(num_ranks)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._memory = CopyMemory()
        self._writing: Future[None] | None = None

    def begin_save(
        self, directory: Path, *, numbers: Mapping[str, Any], write_files: Callable[[Path], None] | None = None
    ) -> "Future[None]":
        """Copy this rank's state, and return a future that is done when all ranks have written their states to disk.

        Training may continue as soon as this returns, because only the copy is written.

        Args:
            directory: An existing directory, the same for all ranks.
            numbers: Further state of the core, as JSON; the same on all ranks.
            write_files: Adds the files that make the first collection of weights loadable (config, tokenizer). Runs on
                rank 0, in the writing thread.

        Raises:
            OSError: From the future, if a rank could not write.
        """
        self._wait_for_the_last()
        collections = self._copied()
        rng = _random_states()
        state = {
            **numbers,
            "schedule": {key: value for key, value in self._scheduler.state_dict().items() if key != "lr_lambdas"},
            "adam_steps": self._step_counts(),
            "num_ranks": self._num_ranks,
        }
        text = json.dumps(state, indent=2) + "\n"

        def describe() -> None:
            if self._rank == 0:
                (directory / STATE_FILE).write_text(text)
                if write_files is not None:
                    write_files(directory / next(iter(self._weights)))

        self._writing = self._thread.submit(self._write, directory, collections, rng, describe)
        return self._writing

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore the state that any number of ranks wrote, and return `begin_save`'s ``numbers`` and ``num_ranks``.

        With the same number of ranks the restored state is identical bit by bit.

        Raises:
            HeadraceError: The directory belongs to another model.
        """
        state: dict[str, Any] = json.loads((directory / STATE_FILE).read_text())
        try:
            for name, tensors in self._weights.items():
                read_shards(directory / name, tensors)
        except ShardError as error:
            raise HeadraceError(f"the checkpoint {directory} belongs to another model: {error}") from error
        try:
            self._load_moments(directory / OPTIMIZER, state.pop("adam_steps"))
        except ShardError as error:
            raise HeadraceError(f"{directory / OPTIMIZER} does not fit this model: {error}") from error
        schedule = state.pop("schedule")
        for name in ("base_lrs", "_last_lr"):  # one rate for all groups, of which an older release may have had fewer
            schedule[name] = schedule[name][:1] * len(self._optimizer.param_groups)
        self._scheduler.load_state_dict({**schedule, "lr_lambdas": [None] * len(schedule["base_lrs"])})
        for group, learning_rate in zip(self._optimizer.param_groups, schedule["_last_lr"], strict=True):
            group["lr"] = learning_rate
        _restore_random_states(directory / _rng_file(self._rank))
        return state

    def load_weights(self, directory: Path, *, aliases: Collection[str] = ()) -> dict[str, Any]:
        """Restore only the first collection of weights (the model), from a directory of safetensors files.

        Returns the contents of the checkpoint's core_state.json; empty if the directory is not in a checkpoint.

        Args:
            directory: Files of a checkpoint, of ``save_pretrained``, or of PEFT.
            aliases: Names of tied tensors, which the files may have beside the tensors that they are tied to.

        Raises:
            HeadraceError: The files belong to another model.
        """
        from safetensors import SafetensorError

        weights = next(iter(self._weights.values()))
        try:
            read_shards(directory, weights, unread=frozenset(aliases) - weights.keys())
        except ShardError as error:
            raise HeadraceError(f"the weights in {directory} belong to another model: {error}") from error
        except SafetensorError as error:
            raise HeadraceError(f"the weights in {directory} cannot be read: {error}") from error
        state_file = directory.parent / STATE_FILE
        numbers: dict[str, Any] = json.loads(state_file.read_text()) if state_file.is_file() else {}
        return numbers

    def _collections(self) -> dict[str, Mapping[str, Tensor]]:
        moments = {
            f"{moment}/{name}": tensor
            for name, parameter in self._parameters.items()
            for moment, tensor in self._optimizer.state.get(parameter, {}).items()
            if isinstance(tensor, Tensor) and tensor.dim()
        }
        return {**self._weights, OPTIMIZER: moments}

    def _step_counts(self) -> dict[str, float | int | None]:
        """Return the step count of each parameter with optimizer state: a float (from a tensor), an int, or None."""
        counts: dict[str, float | int | None] = {}
        for name, parameter in self._parameters.items():
            if parameter in self._optimizer.state:
                count = self._optimizer.state[parameter].get("step")
                counts[name] = float(count) if isinstance(count, Tensor) else count
        return counts

    def _copied(self) -> dict[str, dict[str, Part]]:
        """Copy this rank's parts of all tensors, and return the copies by collection and name."""
        live = {
            (collection, name): part
            for collection, tensors in self._collections().items()
            for name, tensor in tensors.items()
            if (part := local_part(tensor, is_first_rank=self._rank == 0)) is not None
        }
        tensors = [part.tensor for part in live.values()]
        copies = self._memory.copy(tensors, locks=any(tensor.is_cuda for tensor in tensors))
        copied: dict[str, dict[str, Part]] = {collection: {} for collection in self._collections()}
        for ((collection, name), part), copy in zip(live.items(), copies, strict=True):
            copied[collection][name] = Part(copy, part.offsets)
        return copied

    def _write(
        self,
        directory: Path,
        collections: Mapping[str, Mapping[str, Part]],
        rng: dict[str, Tensor],
        describe: Callable[[], None],
    ) -> None:
        problem: OSError | None = None
        try:
            files = [
                file
                for name, parts in collections.items()
                for file in write_shards(directory / name, parts, rank=self._rank, num_ranks=self._num_ranks)
            ]
            files.append(_write_rng(directory / _rng_file(self._rank), rng))
            describe()
            write_part(directory, files, number=self._rank)
        except OSError as error:
            problem = error
        except Exception as error:  # noqa: BLE001  tokenizers raises a plain Exception, also for a full disk
            # For every kind of failure: the other ranks, and training behind them, wait for this rank's report.
            problem = OSError(f"{type(error).__name__}: {error}")
            problem.__cause__ = error
        for rank, said in enumerate(self._group.exchange("" if problem is None else str(problem))):
            if said and problem is None:
                problem = OSError(f"training rank {rank}: {said}")
        if problem is not None:
            raise problem
        for rank in range(self._num_ranks):
            if self._rank == 0 and not part_file(directory, rank).exists():
                raise OSError(
                    f"{directory} contains no files of training rank {rank}: the run's directory must be on a file "
                    "system that all machines of the run share"
                )

    def _wait_for_the_last(self) -> None:
        if self._writing is None:
            return
        wait([self._writing], timeout=_WAIT_FOR_WRITING_S)
        if (error := self._writing.exception(timeout=0)) is not None:
            log.warning("the previous checkpoint could not be written: %s", error)

    def _load_moments(self, directory: Path, steps: Mapping[str, float | int | None]) -> None:
        state: dict[Tensor, dict[str, Any]] = self._optimizer.state
        state.clear()
        if not steps:
            return
        for name in sorted(steps.keys() ^ self._parameters.keys()):
            raise ShardError(f"{name} is not in {'the model' if name in steps else 'the checkpoint'}")
        saved, dtypes = saved_shapes(directory), saved_dtypes(directory)
        into: dict[str, Tensor] = {}
        for key, shape in saved.items():
            moment, _, name = key.partition("/")
            if name not in self._parameters:
                raise ShardError(f"{key} is not in the model")
            into[key] = self._moment(self._parameters[name], moment, shape, dtypes[key])
        for name, parameter in self._parameters.items():
            count = steps[name]
            if count is not None:
                state[parameter]["step"] = count if isinstance(count, int) else self._step_tensor(parameter, count)
        read_shards(directory, into)

    def _moment(self, parameter: Tensor, moment: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the optimizer's state tensor that a saved moment is read into, and create it if it does not exist."""
        state: dict[str, Any] = self._optimizer.state[parameter]
        if not state and hasattr(self._optimizer, "init_state"):
            self._init_state(parameter)
        if moment not in state:
            is_alike = shape == parameter.shape
            state[moment] = (
                torch.zeros_like(parameter, dtype=dtype)
                if is_alike
                else torch.zeros(shape, dtype=dtype, device=parameter.device)
            )
        return cast(Tensor, state[moment])

    def _init_state(self, parameter: Tensor) -> None:
        """Let an optimizer of bitsandbytes create its state, part of which may be in paged memory."""
        for number, group in enumerate(self._optimizer.param_groups):
            for place, other in enumerate(group["params"]):
                if other is parameter:
                    self._optimizer.init_state(group, parameter, number, place)

    def _step_tensor(self, parameter: Tensor, count: float) -> Tensor:
        """Return a step count on the device where this optimizer keeps it: the CPU, unless a fused kernel reads it."""
        is_on_device = any(group.get("fused") or group.get("capturable") for group in self._optimizer.param_groups)
        return torch.tensor(count, dtype=torch.float32, device=parameter.device if is_on_device else "cpu")


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(file: Path) -> None:
    import safetensors.torch

    if not file.exists():
        return  # this rank did not exist when the checkpoint was written
    states: dict[str, Tensor] = cast(Any, safetensors.torch).load_file(file)
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _write_rng(file: Path, states: dict[str, Tensor]) -> Path:
    file.parent.mkdir(exist_ok=True)
    write_tensors(file, states)
    return file


def _rng_file(rank: int) -> str:
    return f"rng/rank-{rank + 1:05d}.safetensors"
