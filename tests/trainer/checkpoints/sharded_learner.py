"""A small sharded learner, and the program of its ranks in tests of sharded checkpoints: ``ROOT RESUME``.

Its dimensions are not divisible by 2 or 4, a tensor has fewer rows than there are ranks, and two tensors are tied.
"""

import os
import resource
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from services.trainer.checkpoints.checkpoint import load_into, newest_valid
from services.trainer.checkpoints.checkpoint_writer import CheckpointError, CheckpointWriter
from services.trainer.checkpoints.core_state import CoreState

VOCAB_SIZE, WIDTH = 11, 10
BATCH_SIZE = 8
TOTAL_STEPS = 6


class Layer(nn.Module):
    """A residual layer with a vector of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.ones(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.mix[0] * x_BTD + self.mix[1] * torch.tanh(self.projection(x_BTD))


class Model(nn.Module):
    """Predicts the next token of sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))  # a scalar, which is never sharded
        self.scale: Tensor

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(ids_BT) * self.scale
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return cast(Tensor, self.head(x_BTD))


class Learner:
    """A core with the interface for checkpoints. Its numbers do not depend on the number of ranks, up to rounding."""

    def __init__(self, *, rank: int = 0, num_ranks: int = 1) -> None:
        torch.manual_seed(0)
        self._rank, self._num_ranks = rank, num_ranks
        self.model = Model()
        if num_ranks > 1:
            modules: list[Any] = [*self.model.layers, self.model]
            for module in modules:
                sharded: Any = cast(Any, fully_shard)(module)
                sharded.set_gradient_divide_factor(1.0)
                # gloo does not support reductions that also multiply.
                sharded.set_force_sum_reduction_for_comms(True)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-2, eps=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / TOTAL_STEPS)
        self.policy_version = 0
        self._state = CoreState(
            weights={"model": {**self.parameters, "scale": self.model.scale}},
            parameters=self.parameters,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            rank=rank,
            num_ranks=num_ranks,
        )

    def step(self) -> None:
        """Train on this rank's part of the step's batch."""
        generator = torch.Generator().manual_seed(self.policy_version)
        ids_BT = torch.randint(VOCAB_SIZE, (BATCH_SIZE, 5), generator=generator)[self._rank :: self._num_ranks]
        logits_BTV = self.model(ids_BT[:, :-1])
        loss = (
            nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum") / BATCH_SIZE
        )
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.policy_version += 1

    def train(self, num_steps: int) -> "Learner":
        """Make several steps."""
        for _ in range(num_steps):
            self.step()
        return self

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Implements SavableCore."""
        del tokenizer
        return self._state.begin_save(directory, numbers={"policy_version": self.policy_version})

    def load_state(self, directory: Path) -> None:
        """Implements SavableCore."""
        self.policy_version = int(self._state.load(directory)["policy_version"])


def save(learner: Learner, root: Path, *, rank: int, train_on: int = 0) -> None:
    """Save on all ranks, and train while the checkpoint is written."""
    step = learner.policy_version
    if rank == 0:
        writer = CheckpointWriter(root, keep=3)
        pending = writer.begin(_Led(learner), {}, step=step)
        learner.train(train_on)
        writer.wait(pending)
        writer.publish(pending)
    else:
        written = learner.begin_save(_follow(), None)
        learner.train(train_on)
        written.result(timeout=120)


class _Led:
    """Sends the directory to the other ranks, as the first rank of a run does."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        _lead(directory)
        return self._learner.begin_save(directory, tokenizer)

    def load_state(self, directory: Path) -> None:
        self._learner.load_state(directory)


def _lead(directory: Path) -> None:
    dist.broadcast(torch.frombuffer(bytearray(str(directory).encode().ljust(1024)), dtype=torch.uint8), 0)


def _follow() -> Path:
    received = torch.empty(1024, dtype=torch.uint8)
    dist.broadcast(received, 0)
    return Path(received.numpy().tobytes().decode().rstrip())


def _main(root: Path, resume: Path) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    learner = Learner(rank=rank, num_ranks=num_ranks)
    assert any(isinstance(p, DTensor) and p.to_local().numel() == 0 for p in learner.parameters.values()) or rank < 2
    checkpoint = newest_valid(resume)
    assert checkpoint is not None
    load_into(learner, checkpoint)
    save(learner, root / "unchanged", rank=rank, train_on=2)
    save(learner, root / "trained", rank=rank)
    _fail(learner, root, rank=rank)
    dist.destroy_process_group()


def _fail(learner: Learner, root: Path, *, rank: int) -> None:
    """Save to a place where rank 1 writes to another directory, and then where rank 1 may write at most 100 bytes."""
    said: list[str] = []
    for name in ("elsewhere", "full"):
        if rank == 0:
            writer = CheckpointWriter(root / name, keep=1)
            pending = writer.begin(_Led(learner), {}, step=learner.policy_version)
            try:
                writer.wait(pending)
            except CheckpointError as error:
                said.append(str(error))
            continue
        directory = _follow()
        if name == "elsewhere" and rank == 1:
            directory = root / "another machine"
            directory.mkdir()
        if name == "full" and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        problem = learner.begin_save(directory, None).exception(timeout=60)
        assert isinstance(problem, OSError | None)
    if rank == 0:
        (root / "said.txt").write_text("\n".join(said))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
