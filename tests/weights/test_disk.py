"""Weights on disk: the read weights are the written ones, and damaged, missing or incomplete ones are not read."""

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from services.generator.worker.disk_wire import DiskWire
from services.generator.worker.staged_weights import StagedWeights
from services.trainer.push import disk_writer
from services.trainer.push.disk_writer import DiskWriter
from services.trainer.push.packing import Parcel, announce
from services.trainer.push.sent_weights import SentWeights
from shared.errors import PushError, UserError
from shared.weights import weight_manifest
from shared.weights.parameter_spec import Spec
from shared.weights.weight_manifest import MANIFEST
from shared.weights.weight_store import WeightStore

pytestmark = pytest.mark.unit

Named = list[tuple[str, torch.Tensor]]
SHAPE = (64, 33)
_NUMBERS = itertools.count()


class Trainer:
    """The trainer's end: weights that change a little from version to version."""

    def __init__(self, root: str, *, incarnation: int = 1) -> None:
        self.sent = SentWeights()
        self.store = WeightStore(root)
        self.writer = DiskWriter(self.store, run_id="run", incarnation=incarnation)
        torch.manual_seed(0)
        self.weights: Named = [(f"layer.{index}", torch.randn(SHAPE).to(torch.bfloat16)) for index in range(3)]
        self.announced: tuple[Spec, ...] = announce(self.weights)

    def parcel(self, version: int) -> Parcel:
        self.weights = [(name, tensor.clone()) for name, tensor in self.weights]
        self.weights[version % 3][1][version % 7] *= 1.5
        parcel = self.sent.update(self.weights, self.announced, policy_version=version)
        return self.sent.full() if self.writer.wants_full(parcel) else parcel

    def staging(self) -> StagedWeights:
        return StagedWeights(self.announced)

    def holds(self, staged: StagedWeights) -> bool:
        return all(torch.equal(staged.tensors[name], tensor) for name, tensor in self.weights)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "FILE_BYTES", 6_000)


@pytest.fixture(params=["local", "memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a directory, an object store of fsspec, and a directory through fsspec."""
    roots = {
        "local": str(tmp_path / "weights"),
        "memory": f"memory://bucket-{next(_NUMBERS)}/weights",
        "file": f"file://{tmp_path}/weights",
    }
    return roots[request.param]


def test_a_replica_that_follows_reads_deltas_and_a_late_one_all_of_the_chain(root: str) -> None:
    trainer = Trainer(root)
    follower = trainer.staging()
    encodings: list[str] = []
    for version in range(4):
        parcel = trainer.parcel(version)
        encodings.append(parcel.encoding)
        place = trainer.writer.publish(parcel)
        DiskWire(root).receive_into(follower, place, timeout_s=30)
        assert trainer.holds(follower)
        assert follower.complete == follower.checksum() == parcel.checksum
        late = trainer.staging()
        DiskWire(root).receive_into(late, place, timeout_s=30)
        assert trainer.holds(late)
    assert encodings == ["full", "delta", "delta", "delta"]


def test_an_existing_version_is_not_written_again(root: str) -> None:
    trainer = Trainer(root)
    assert trainer.writer.place_of(0) is None
    place = trainer.writer.publish(trainer.parcel(0))
    assert trainer.writer.place_of(0) == place
    trainer.writer.publish(trainer.parcel(1))
    assert trainer.writer.place_of(0) is None


def test_a_chain_ends_with_a_full_version_before_it_is_too_long(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "MAX_CHAIN", 2)
    trainer = Trainer(root)
    encodings: list[str] = []
    for version in range(7):
        parcel = trainer.parcel(version)
        encodings.append(parcel.encoding)
        trainer.writer.publish(parcel)
    assert encodings == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def test_a_chain_ends_when_its_deltas_are_as_large_as_the_weights(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path))
    trainer.writer.publish(trainer.parcel(0))
    torch.manual_seed(9)
    trainer.weights = [(name, torch.randn(SHAPE).to(torch.bfloat16)) for name, _ in trainer.weights]
    assert trainer.parcel(1).encoding == "full"


def test_files_that_the_two_newest_versions_do_not_need_are_removed(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "MAX_CHAIN", 1)
    trainer = Trainer(root)
    places = [trainer.writer.publish(trainer.parcel(version)) for version in range(5)]
    trainer.writer.remove_old()
    # full 0, delta 1, full 2, delta 3, full 4: version 3 needs 2
    assert trainer.store.names() == [place.name for place in places[2:]]
    staged = trainer.staging()
    DiskWire(root).receive_into(staged, places[4], timeout_s=30)
    assert trainer.holds(staged)


def test_the_next_trainer_removes_what_the_last_left_and_nothing_that_is_not_ours(tmp_path: Path) -> None:
    first = Trainer(str(tmp_path))
    first.writer.publish(first.parcel(0))
    # After a crash in the middle of a version, there are files but no manifest.
    WeightStore(str(tmp_path)).write("00000001-00000002-v1/weights-00001-of-00002.safetensors", b"half")
    WeightStore(str(tmp_path)).write("00000003-00000001-v1/manifest.json", b"of a newer trainer")
    (tmp_path / "photographs").mkdir()
    heir = Trainer(str(tmp_path), incarnation=2)
    place = heir.writer.publish(heir.parcel(7))
    heir.writer.remove_old()
    assert sorted(path.name for path in tmp_path.iterdir()) == [place.name, "00000003-00000001-v1", "photographs"]


def test_a_trainer_that_dies_while_it_writes_leaves_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(str(tmp_path))
    trainer.writer.publish(trainer.parcel(0))
    num_written = 0

    def dies(path: Path, target: Path) -> Path:
        nonlocal num_written
        num_written += 1
        if num_written == 2:
            raise OSError(28, "No space left on device")
        path.rename(target)
        return target

    parcel = trainer.parcel(1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dies)
        with pytest.raises(PushError, match=r"cannot be written to .*: No space left on device"):
            trainer.writer.publish(parcel)
    (half,) = (path for path in tmp_path.iterdir() if path.name.endswith("-v1"))
    assert [path.name for path in half.iterdir()] == ["weights-00001-of-00001.safetensors"]
    # The published versions are still there, so the same delta can be tried again.
    place = trainer.writer.publish(parcel)
    staged = trainer.staging()
    DiskWire(str(tmp_path)).receive_into(staged, place, timeout_s=30)
    assert trainer.holds(staged)


def first_file(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)


def lose_a_file(directory: Path) -> None:
    first_file(directory).unlink()


def flip_a_bit(directory: Path) -> None:
    flip(first_file(directory))


def cut_a_file(directory: Path) -> None:
    first_file(directory).write_bytes(first_file(directory).read_bytes()[:-10])


def lose_the_manifest(directory: Path) -> None:
    (directory / MANIFEST).unlink()


def flip_a_bit_of_the_manifest(directory: Path) -> None:
    flip(directory / MANIFEST)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lose_a_file, "cannot be read .*: No such file"),
        (flip_a_bit, "is damaged: its checksum differs from the manifest's"),
        (cut_a_file, r"has \d+ bytes and should have \d+"),
        (lose_the_manifest, "cannot be read .*: No such file"),
        (flip_a_bit_of_the_manifest, "is not the file that the trainer wrote"),
    ],
)
def test_damaged_or_missing_files_are_refused_and_a_full_version_heals(
    tmp_path: Path, damage: Callable[[Path], None], complaint: str
) -> None:
    trainer = Trainer(str(tmp_path))
    staged = trainer.staging()
    DiskWire(str(tmp_path)).receive_into(staged, trainer.writer.publish(trainer.parcel(0)), timeout_s=30)
    place = trainer.writer.publish(trainer.parcel(1))
    damage(tmp_path / place.name)
    with pytest.raises(PushError, match=complaint):
        DiskWire(str(tmp_path)).receive_into(staged, place, timeout_s=30)
    assert staged.complete is None
    trainer.writer.distrust()
    assert trainer.writer.place_of(1) is None
    parcel = trainer.parcel(2)
    assert parcel.encoding == "full"
    place = trainer.writer.publish(parcel)
    DiskWire(str(tmp_path)).receive_into(staged, place, timeout_s=30)
    assert trainer.holds(staged)


def test_a_delta_to_weights_that_are_not_staged_after_all_is_found_by_the_checksum(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path))
    staged = trainer.staging()
    DiskWire(str(tmp_path)).receive_into(staged, trainer.writer.publish(trainer.parcel(0)), timeout_s=30)
    staged.tensors["layer.0"].view(torch.int16)[0, 0] += 1
    staged.changed("layer.0")
    place = trainer.writer.publish(trainer.parcel(1))
    with pytest.raises(PushError, match="differ from the trainer's"):
        DiskWire(str(tmp_path)).receive_into(staged, place, timeout_s=30)


def test_a_reader_stops_when_the_push_is_given_up_and_at_its_deadline(tmp_path: Path) -> None:
    trainer = Trainer(str(tmp_path))
    place = trainer.writer.publish(trainer.parcel(0))
    reader = DiskWire(str(tmp_path))
    with pytest.raises(PushError, match="took longer than 0 s"):
        reader.receive_into(trainer.staging(), place, timeout_s=0)
    reader.leave()
    with pytest.raises(PushError, match="gave up the push"):
        reader.receive_into(trainer.staging(), place, timeout_s=30)


def test_a_push_is_given_up_in_the_middle_of_a_file(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "FILE_BYTES", 1 << 20)
    trainer = Trainer(root)
    place = trainer.writer.publish(trainer.parcel(0))
    monkeypatch.setattr(weight_manifest, "RANGE_BYTES", 1000)
    staged = trainer.staging()
    DiskWire(root).receive_into(staged, place, timeout_s=30)
    assert trainer.holds(staged)
    reader = DiskWire(root)
    read, num_read = WeightStore.read, 0

    def give_up_at_the_third(*args: Any) -> bytes:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            reader.leave()
        return read(*args)

    monkeypatch.setattr(WeightStore, "read", give_up_at_the_third)
    with pytest.raises(PushError, match="gave up the push"):
        reader.receive_into(trainer.staging(), place, timeout_s=30)
    assert num_read == 3


@pytest.mark.parametrize("stalls_at", [1, 3], ids=["the manifest", "a file"])
def test_a_push_is_given_up_while_the_store_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalls_at: int
) -> None:
    trainer = Trainer(str(tmp_path))
    place = trainer.writer.publish(trainer.parcel(0))
    reader, staged = DiskWire(str(tmp_path)), trainer.staging()
    read, num_reads, goes_on = WeightStore.read, itertools.count(1), threading.Event()

    def stall(*args: Any) -> bytes:
        if next(num_reads) == stalls_at:
            reader.leave()
            assert goes_on.wait(120)
        return read(*args)

    monkeypatch.setattr(WeightStore, "read", stall)
    with pytest.raises(PushError, match="gave up the push"):
        reader.receive_into(staged, place, timeout_s=600)
    goes_on.set()
    assert staged.complete is None


def test_a_push_is_given_up_between_two_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "FILE_BYTES", 1 << 20)
    trainer = Trainer(str(tmp_path))
    place = trainer.writer.publish(trainer.parcel(0))
    reader, staged = DiskWire(str(tmp_path)), trainer.staging()
    put: list[str] = []

    def give_up(name: str, _: torch.Tensor) -> None:
        put.append(name)
        reader.leave()

    monkeypatch.setattr(staged, "put", give_up)
    with pytest.raises(PushError, match="gave up the push"):
        reader.receive_into(staged, place, timeout_s=30)
    assert len(put) == 1


@pytest.mark.parametrize("num_more", [-2500, -2000, -1, 1, 1000])
def test_a_file_that_is_not_as_long_as_it_should_be_is_refused_however_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_more: int
) -> None:
    monkeypatch.setattr(disk_writer, "FILE_BYTES", 1 << 20)
    trainer = Trainer(str(tmp_path))
    place = trainer.writer.publish(trainer.parcel(0))
    path = first_file(tmp_path / place.name)
    data = path.read_bytes()
    monkeypatch.setattr(weight_manifest, "RANGE_BYTES", 1000)
    path.write_bytes(data[:num_more] if num_more < 0 else data + bytes(num_more))
    with pytest.raises(PushError, match=rf"should have {len(data)}"):
        DiskWire(str(tmp_path)).receive_into(trainer.staging(), place, timeout_s=30)


def test_a_store_whose_package_is_missing_says_which_setting_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(UserError, match=r"weight_dir abfs://bucket/weights cannot be opened: .*adlfs"):
        WeightStore("abfs://bucket/weights")
