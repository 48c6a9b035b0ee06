"""Failures in the push of a LoRA run, with the real wire and HTTP, and engines without a model."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from services.generator.engine import adapter as adapter_module
from services.generator.engine.adapter import AdapterSpec, adapter_directory, remove_left_adapters
from services.trainer.push.packing import Weights
from services.trainer.push.weight_sender import WeightSender
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.fake_engine import is_there
from tests.weights.senders import make_sender
from tests.weights.served_receiver import ServedReceiver
from tests.weights.uncommitted import abort, attempt_on, begin

ADAPTER = AdapterSpec(rank=2, alpha=6, target_modules=("q_proj",))
MOVES = ("receive", "pause", "load_adapter", "name_version", "read_version", "resume")


def adapters(value: float) -> Weights:
    named = {"q.lora_A.weight": torch.full((2, 5), value), "q.lora_B.weight": torch.full((3, 2), value)}
    return lambda: named.items()


@pytest.fixture
def adapter() -> AdapterSpec:
    return ADAPTER


async def test_adapters_are_loaded_while_decoding_is_held_and_nothing_of_them_stays_on_disk(
    sender: WeightSender, one: ServedReceiver
) -> None:
    assert (await sender.push(adapters(0.5), policy_version=4)).is_confirmed
    assert tuple(call for call in one.engine.calls if call in MOVES) == MOVES
    assert one.engine.version.endswith(":4")
    assert one.engine.announced["adapter"]["config"] == {
        "peft_type": "LORA", "r": 2, "lora_alpha": 6, "use_rslora": False,
        "target_modules": ["q_proj"], "bias": "none",
    }  # fmt: skip
    assert not is_there(one.engine.announced["adapter"]["directory"])


async def test_adapters_that_are_not_loaded_keep_the_replica_held_and_the_others_go_on(
    redis: Redis, run_keys: RunKeys, incarnation: int, sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    await sender.push(adapters(0.0), policy_version=0)
    two.engine.failing = {"load_adapter"}
    result = await sender.push(adapters(1.0), policy_version=1)
    assert result.members == ("generator-1",)
    assert "loading the adapter failed" in result.failed["generator-2"]
    assert [served.engine.version[-2:] for served in (one, two)] == [":1", ":0"]
    assert two.receiver.decoding_is_paused
    assert two.receiver.held_version.policy_version == -1
    assert two.engine.is_paused
    assert not two.receiver.fatal.is_set()
    two.engine.failing = set()
    await redis.set(run_keys.epoch, incarnation + 1)
    heir = make_sender(redis, incarnation + 1)
    healed = await heir.push(adapters(2.0), policy_version=2)
    await heir.close()
    assert healed.members == ("generator-1", "generator-2")
    assert two.engine.version.endswith(":2")
    assert not two.engine.is_paused


async def test_adapters_that_all_came_but_were_never_confirmed_are_not_served(
    sender: WeightSender, one: ServedReceiver
) -> None:
    assert (await sender.push(adapters(0.0), policy_version=0)).is_confirmed
    async with attempt_on(one) as attempt:
        await attempt.broadcast(await begin(attempt, adapters(0.5)))
        assert is_there(one.engine.announced["adapter"]["directory"])
        info = await abort(attempt)
    assert one.engine.calls.count("load_adapter") == 1
    assert one.engine.version.endswith(":0")
    assert not one.engine.is_paused
    assert not is_there(one.engine.announced["adapter"]["directory"])
    assert (info.epoch, info.policy_version, info.is_held) == (0, 0, False)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return directories that stand for the one in memory and the one on disk."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for place in (memory, disk):
        place.mkdir()
    monkeypatch.setattr(adapter_module, "_MEMORY", str(memory))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    return memory, disk


def test_adapters_that_a_killed_generator_left_in_memory_are_removed_and_others_are_not(
    places: tuple[Path, Path],
) -> None:
    with adapter_directory([[1]]) as living:
        left = [place / f"{living.name[:-4]}left" for place in places]
        for directory in left:
            directory.mkdir()
            (directory / "adapter_model.safetensors").write_bytes(b"x")
        (places[0] / "of-somebody-else").mkdir()
        remove_left_adapters()
        assert living.is_dir()
        assert not any(directory.exists() for directory in left)
        assert (places[0] / "of-somebody-else").is_dir()
    assert not living.exists()


def test_adapters_are_in_memory_only_if_it_has_room(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    room = shutil.disk_usage(places[0])

    def little_room(_: object) -> object:
        return room._replace(free=64 * 2**20)

    monkeypatch.setattr(shutil, "disk_usage", little_room)
    for num_numbers, place in ((8 * 2**20, places[0]), (32 * 2**20, places[1])):
        with adapter_directory([[num_numbers]]) as directory:
            assert directory.parent == place


async def test_a_push_says_how_much_room_its_adapters_need(
    sender: WeightSender, one: ServedReceiver, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = shutil.disk_usage(places[0])

    def little_room(_: object) -> object:
        return room._replace(free=60)

    monkeypatch.setattr(shutil, "disk_usage", little_room)
    assert (await sender.push(adapters(0.5), policy_version=4)).is_confirmed
    assert Path(one.engine.announced["adapter"]["directory"]).parent == places[1], "16 numbers of 4 bytes do not fit"
