"""A whole run that takes over from another, through the real trainer on a real Redis, with generators played."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.beginning.fit import beginning_of
from services.trainer.beginning.held_files import hold
from services.trainer.beginning.source import find_source
from services.trainer.loop.training_loop import Ending, TrainingLoop
from shared.beginning import Beginning
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.messages import decode_prompt_group
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.trainer.incarnations import create, newest_ledger, small_config, train
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices
from tests.trainer.tensor_files import load_file

pytestmark = pytest.mark.timeout(600)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return weights and moments."""
    files = [*sorted((checkpoint / "model").glob("*.safetensors")), *sorted((checkpoint / "optimizer").glob("*"))]
    return {
        f"{path.parent.name}/{name}": tensor
        for path in files
        if path.suffix == ".safetensors"
        for name, tensor in load_file(path).items()
    }


class Fork:
    """A run that takes over from a source of six steps, in a directory of its own."""

    def __init__(self, redis: Redis, directory: Path, model: Path) -> None:
        self.redis, self.directory, self.model = redis, directory, model
        self.run_dir = directory / "forked"
        self.at_start: dict[str, torch.Tensor] = {}
        self.prompts: list[str] = []
        self.crashes = False

    @property
    def source(self) -> Path:
        """Directory of the source's checkpoint of step 4."""
        return self.directory / "run" / "checkpoints" / "step_00000004"

    async def train_source(self) -> None:
        """Train the source to its end, without staleness, so that nothing is in flight between its steps."""
        await create(self.redis, small_config(self.directory, self.model, max_staleness=0), self.directory)
        await train(self.redis, played=PlayedServices(self.redis), sender=FakeSender(self.redis))
        await self.redis.flushdb()

    async def submit(self, **settings: Any) -> Beginning:
        """Create the fork as the run API does."""
        chosen: dict[str, Any] = {"max_staleness": 0, "resume_from_checkpoint": str(self.source)} | settings
        config = small_config(self.directory, self.model, **chosen)
        roots = FileRoots((str(self.directory),), "HEADRACE_DATA_ROOTS")
        beginning, _ = beginning_of(config, find_source(str(self.source), runs=[], roots=roots))
        beginning = hold(beginning, self.run_dir)
        await self.create(config, beginning)
        return beginning

    async def create(self, config: RunConfig, beginning: Beginning) -> None:
        await RunStore(self.redis).create(RUN_ID, config, run_dir=str(self.run_dir), beginning=beginning)

    async def train(self, *, sender: FakeSender | None = None) -> tuple[Ending, TrainingLoop]:
        played = NotingServices(self.redis, self.prompts)
        return await train(self.redis, played=played, sender=sender or FakeSender(self.redis), meddle=self._note_start)

    def _note_start(self, loop: TrainingLoop) -> None:
        directory = self.directory / "at start"
        directory.mkdir(exist_ok=True)
        loop.core.begin_save(directory, None).result(timeout=120)
        self.at_start = tensors(directory)
        if self.crashes:
            raise RuntimeError("crash")


class NotingServices(PlayedServices):
    """Notes the prompts in the order of their groups."""

    def __init__(self, redis: Redis, prompts: list[str]) -> None:
        super().__init__(redis)
        self._noted = prompts

    async def _complete(self, delivery: Any) -> None:
        self._noted.append(str(decode_prompt_group(delivery.payload).prompt))
        await super()._complete(delivery)


@pytest.fixture
async def fork(redis: Redis, tmp_path: Path, tiny_model: Path) -> Fork:
    fork = Fork(redis, tmp_path, tiny_model)
    await fork.train_source()
    return fork


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


async def test_a_run_continues_from_the_checkpoint_of_another(fork: Fork, tiny_model: Path) -> None:
    await fork.submit()
    sender = FakeSender(fork.redis)
    ending, loop = await fork.train(sender=sender)
    assert ending == "finished"
    assert same(fork.at_start, tensors(fork.source)), "weights and optimizer state, bit by bit"
    assert sender.versions == [0, 1, 2], "the beginning is pushed before the first step, and two steps are left of six"
    assert loop.core.policy_version == 2
    record = await RunStore(fork.redis).get(RUN_ID)
    assert record is not None
    assert (record.progress.step, record.progress.epoch) == (2, 0.6), "12 of 20 rows, with those of the source"
    ledger = newest_ledger(fork.run_dir)
    assert (ledger["admitted"], ledger["trained"]) == (4, [[0, 3]]), "the ledger is the new run's own"
    # Both ended with the same six steps: the same rows in the same order, rewards that depend on the branch only.
    ends = [directory / "checkpoints" for directory in (fork.directory / "run", fork.run_dir)]
    assert same(tensors(ends[0] / "step_00000006"), tensors(ends[1] / "step_00000002"))


async def test_the_data_go_on_where_the_source_left_them(fork: Fork) -> None:
    await fork.submit(max_steps=14)
    await fork.train()
    first_pass = fork.prompts[: 20 - 8]
    await fork.redis.flushdb()
    shutil.rmtree(fork.run_dir)
    fork.prompts.clear()
    await fork.submit(max_steps=14, ignore_data_skip=True)
    await fork.train()
    assert fork.prompts[8:20] == first_pass, "the source has used the first 8 of 20 rows"
    assert fork.prompts[:12] != first_pass


async def test_with_only_the_model_the_run_is_fresh_but_for_its_weights(fork: Fork) -> None:
    await fork.submit(resume_only_model=True, max_steps=2)
    _, loop = await fork.train()
    of_model = {name: tensor for name, tensor in tensors(fork.source).items() if name.startswith("model/")}
    assert same(fork.at_start, of_model), "the checkpoint at the start has no moments"
    assert loop.core.policy_version == 2


async def test_a_fork_that_crashes_before_its_first_checkpoint_begins_again_from_the_source(fork: Fork) -> None:
    """The source's checkpoint may be pruned meanwhile: the run holds its files until it has a checkpoint of its own."""
    beginning = await fork.submit()
    held = fork.run_dir / "beginning"
    assert beginning.directory == str(held)
    expected = tensors(fork.source)
    shutil.rmtree(fork.source)
    fork.crashes = True
    with pytest.raises(RuntimeError, match="crash"):
        await fork.train()
    fork.crashes = False
    ending, _ = await fork.train()
    assert ending == "finished"
    assert same(fork.at_start, expected)
    assert not is_there(held), "it has a checkpoint of its own"


def is_there(path: Path) -> bool:
    return path.exists()


def delete(directory: Path) -> None:
    shutil.rmtree(directory)


def damage(directory: Path) -> None:
    (directory / "core_state.json").write_text("{}")


@pytest.mark.parametrize(
    ("meddle", "sentence"),
    [
        (delete, "was deleted before the run had read it. Submit the run again from another checkpoint"),
        (damage, r"which is damaged: .*core_state\.json has 2 bytes"),
    ],
)
async def test_a_source_that_is_lost_before_it_was_read_ends_the_run_with_a_sentence(
    fork: Fork, meddle: Callable[[Path], None], sentence: str
) -> None:
    beginning = await fork.submit()
    meddle(Path(beginning.directory))
    with pytest.raises(UserError, match=f"this run was to begin from .*{sentence}"):
        await fork.train()


async def test_a_fork_whose_own_checkpoints_are_all_damaged_says_so(fork: Fork) -> None:
    await fork.submit()
    await fork.train()
    for checkpoint in (fork.run_dir / "checkpoints").iterdir():
        damage(checkpoint)
    with pytest.raises(UserError, match="every checkpoint of this run is damaged, and it did not keep the files"):
        await fork.train()


async def test_a_run_that_has_nothing_left_to_train_is_refused(fork: Fork) -> None:
    await fork.submit(max_steps=4)
    with pytest.raises(UserError, match="has made 4 optimizer steps, and max_steps ends the run at 4: nothing is left"):
        await fork.train()


async def test_a_record_keeps_the_beginning(fork: Fork) -> None:
    beginning = await fork.submit()
    record = await RunStore(fork.redis).get(RUN_ID)
    assert record is not None
    assert record.beginning == beginning
    assert await fork.redis.exists(RunKeys(RUN_ID).run)
