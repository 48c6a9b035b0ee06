"""A worker's part in a push, on a machine without a GPU and without a model."""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import safetensors.torch
import torch
from torch import Tensor

from services.generator.worker.staged_weights import StagedWeights, StagingMemory, staging_bytes
from services.generator.worker.worker_reports import FAILURE
from shared.weights.parameter_spec import Spec

if TYPE_CHECKING:
    from services.generator.worker.worker_transfer import WorkerTransfer

NAMED = {"embed": torch.arange(10, dtype=torch.float32).view(2, 5), "norm": torch.ones(3)}


class NamedWire:
    """Sends one chunk; if it is damaged, with its last byte changed."""

    device = torch.device("cpu")
    is_damaged = False

    def receive(self, chunk: Tensor, *, deadline: float) -> None:
        del deadline
        chunk.copy_(torch.cat([tensor.view(-1).view(torch.uint8) for tensor in NAMED.values()]))
        chunk[-1] ^= self.is_damaged

    def leave(self) -> None:
        pass


class Reload:
    """Replaces CheckedReload; records what was loaded but is not used."""

    def __init__(self, *_: Any) -> None:
        self.loaded: dict[str, Tensor] = {}

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded |= dict(named)

    def check_complete(self) -> None:
        assert self.loaded.keys() == NAMED.keys()

    def finish(self) -> None:
        pass


class CountedCuda:
    """Replaces torch.cuda."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.num_emptied = 0

    def empty_cache(self) -> None:
        self.num_emptied += 1

    def Stream(self, _: torch.device) -> Any:
        self.num_streams += 1
        return SimpleNamespace(synchronize=lambda: None)

    def stream(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, _: torch.device) -> None:
        pass


def giving(value: object) -> Callable[..., object]:
    """Return a function that returns ``value`` for all arguments."""

    def function(*_: object, **__: object) -> object:
        return value

    return function


@pytest.fixture(autouse=True)
def vllm_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep vLLM from compiling when it is imported, which would cause a warning."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> NamedWire:
    """Return the wire that every worker gets."""
    from services.generator.worker import worker_transfer

    wire = NamedWire()
    monkeypatch.setattr(worker_transfer, "open_wire", giving(wire))
    monkeypatch.setattr(worker_transfer, "CheckedReload", Reload)
    monkeypatch.setattr(worker_transfer, "FullSet", giving(SimpleNamespace(check=giving(None))))
    monkeypatch.setattr(worker_transfer, "set_current_vllm_config", giving(nullcontext()))
    return wire


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all blocks that workers allocate, of which only one may exist at a time."""
    from services.generator.worker import worker_transfer

    sizes: list[int] = []
    blocks: list[weakref.ref[StagingMemory]] = []

    def allocate(num_bytes: int, *, largest: int, device: torch.device, shares_gpu: bool) -> StagingMemory:
        assert all(block() is None for block in blocks), "the old block still takes memory"
        memory = StagingMemory(num_bytes, largest=largest, device=device, shares_gpu=shares_gpu)
        sizes.append(num_bytes)
        blocks.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(worker_transfer, "StagingMemory", allocate)
    return sizes


def a_worker(
    device: str = "cpu", *, checkpoint: Path | str = "nowhere/at-all", download_dir: Path | None = None
) -> "WorkerTransfer":
    from services.generator.worker.worker_transfer import WorkerTransfer

    text_config = SimpleNamespace(tie_word_embeddings=True)
    model_config = SimpleNamespace(
        model=str(checkpoint), revision=None, dtype=torch.float32, hf_text_config=text_config, quantization=None
    )
    load_config = SimpleNamespace(download_dir=download_dir)
    config: Any = SimpleNamespace(model_config=model_config, load_config=load_config)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    worker = SimpleNamespace(
        get_model=lambda: None, vllm_config=config, device=torch.device(device), parallel_config=parallel
    )
    return WorkerTransfer(worker)


def until_idle(worker: "WorkerTransfer") -> None:
    for thread in threading.enumerate():
        if thread.name == "weight push":
            thread.join(timeout=120)
    assert worker.progress().phase == "idle"
    assert worker.progress().failure is None


def receive(worker: "WorkerTransfer", *, staging: bool = False, **more: object) -> str | None:
    worker.enter({"buffer_bytes": 1000})
    until_idle(worker)
    worker.receive(
        {
            "names": list(NAMED),
            "dtype_names": ["float32", "float32"],
            "shapes": [list(tensor.shape) for tensor in NAMED.values()],
            "adapter": None,
            "staging": staging,
            "timeout_s": 5.0,
        }
        | more
    )
    until_idle(worker)
    return worker.progress().checksum


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_only_a_complete_version_that_was_not_forgotten_is_the_base_of_a_delta(
    wire: NamedWire, is_forgotten: bool
) -> None:
    del wire
    worker = a_worker()
    base = receive(worker, staging=True)
    if is_forgotten:
        worker.forget()
    for is_base in (not is_forgotten, False):  # this wire sends no delta, so the first one fails and leaves no base
        with pytest.raises(AssertionError, match="The size of tensor" if is_base else "starts from other weights"):
            receive(worker, staging=True, sizes=[1, 1], base_checksum=base)


def test_bytes_received_directly_into_the_model_have_the_right_checksum(wire: NamedWire) -> None:
    staged = StagedWeights([Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in NAMED.items()])
    for name, tensor in NAMED.items():
        staged.put(name, tensor)
    worker = a_worker()
    assert receive(worker) == staged.checksum()
    worker.load()
    wire.is_damaged = True
    assert receive(worker) not in (None, staged.checksum())
    worker.forget()
    with pytest.raises(RuntimeError, match="no complete weights"):
        worker.load()


def test_a_move_that_fails_is_answered_and_not_raised() -> None:
    """Otherwise vLLM's executor takes the other workers' answers for those to the next call."""
    from services.generator.worker.worker_transfer import WorkerExtension

    def load() -> None:
        raise RuntimeError("no memory")

    worker: Any = WorkerExtension()
    worker._headrace_transfer = SimpleNamespace(load=load)
    assert worker.headrace_push("load", {}) == {FAILURE: "no memory"}
    assert worker.headrace_push("vanish", {}) == {FAILURE: "a push has no move vanish"}


def test_staging_memory_is_allocated_once_and_before_the_first_push(
    wire: NamedWire, allocated: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.generator.worker import worker_transfer

    loaded: list[Reload] = []

    def reload(*_: Any) -> Reload:
        loaded.append(Reload())
        return loaded[-1]

    monkeypatch.setattr(worker_transfer, "CheckedReload", reload)
    # Saved in another dtype, and with the tied head that a push leaves out.
    saved = {name: tensor.to(torch.bfloat16) for name, tensor in NAMED.items()}
    saved["lm_head.weight"] = torch.zeros(1000)
    # Downloaded from the hub, with a second copy under other names.
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("abc")
    cast("Any", safetensors.torch).save_file(saved, snapshot / "model.safetensors", metadata={"format": "pt"})
    cast("Any", safetensors.torch).save_file({"tok_embeddings": torch.zeros(9)}, snapshot / "consolidated.safetensors")
    worker = a_worker(checkpoint="org/model", download_dir=tmp_path)
    worker.reserve()
    wanted = [staging_bytes([Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in NAMED.items()])]
    assert allocated == wanted
    for is_damaged in (False, True, False):
        wire.is_damaged = is_damaged
        assert receive(worker, staging=True) is not None
        if is_damaged:
            worker.forget()
            continue
        worker.load()
        assert loaded[-1].loaded.keys() == NAMED.keys()
        assert all(torch.equal(loaded[-1].loaded[name], tensor) for name, tensor in NAMED.items())
    worker.reserve()
    assert allocated == wanted


def test_weights_of_another_size_than_the_checkpoint_get_memory_of_their_size(
    wire: NamedWire, allocated: list[int], tmp_path: Path
) -> None:
    del wire
    for has_no_files in (a_worker(checkpoint=tmp_path), a_worker(checkpoint="nobody/has-downloaded-this")):
        has_no_files.reserve()
    assert allocated == []
    worker = a_worker(checkpoint=tmp_path)
    cast("Any", safetensors.torch).save_file({"embed": torch.zeros(500)}, tmp_path / "model.safetensors")
    worker.reserve()
    assert receive(worker, staging=True) is not None
    wanted = staging_bytes([Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in NAMED.items()])
    reserved = staging_bytes([Spec("embed", torch.float32, (500,))])
    assert allocated == [reserved + reserved // 500, wanted], "some weights may be pushed in float32"


def test_a_run_that_stages_nothing_frees_the_memory_of_an_earlier_run(wire: NamedWire, allocated: list[int]) -> None:
    del wire
    worker = a_worker()
    assert receive(worker, staging=True) is not None
    assert receive(worker) is not None
    assert receive(worker, staging=True) is not None
    assert len(allocated) == 2


def test_weights_are_not_staged_on_a_gpu_whose_rest_is_the_trainers(
    wire: NamedWire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first push over ipc shows that the trainer is on this GPU, where it takes more with its first step."""
    from services.generator.worker import worker_transfer

    del wire
    cuda = CountedCuda()
    shared: list[bool] = []

    def allocate(num_bytes: int, *, largest: int, device: torch.device, shares_gpu: bool) -> Any:
        del largest, device
        shared.append(shares_gpu)
        if shares_gpu:
            return StagingMemory(num_bytes, largest=0, device=torch.device("cpu"))
        return SimpleNamespace(block=SimpleNamespace(device=torch.device("cuda", 0)), suits=giving(True))

    monkeypatch.setattr(worker_transfer, "StagingMemory", allocate)
    monkeypatch.setattr(worker_transfer, "IpcWire", NamedWire)
    monkeypatch.setattr(worker_transfer, "cuda", cuda)
    cast("Any", safetensors.torch).save_file(NAMED, tmp_path / "model.safetensors")
    worker = a_worker(checkpoint=tmp_path)
    worker.reserve()
    for _ in range(2):
        assert receive(worker, staging=True) is not None
    assert shared == [False, True]
    assert cuda.num_emptied == 1


def test_a_trainer_on_this_gpu_is_known_by_its_uuid_over_any_transport(
    wire: NamedWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.generator.worker import worker_transfer

    del wire
    monkeypatch.setattr(worker_transfer, "cuda", CountedCuda())
    monkeypatch.setattr(worker_transfer, "device_uuid", giving("here"))
    worker = a_worker("cuda:0")
    for uuid, is_here in (("here", True), ("there", False), (None, False)):
        worker.enter({"buffer_bytes": 1000, "trainer_device_uuid": uuid})
        until_idle(worker)
        assert worker._shares_gpu == is_here  # pyright: ignore[reportPrivateUsage]


def test_every_job_of_a_worker_runs_on_one_stream(wire: NamedWire, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.generator.worker import worker_transfer

    del wire
    cuda = CountedCuda()
    monkeypatch.setattr(worker_transfer, "cuda", cuda)
    worker = a_worker("cuda:0")
    for _ in range(3):
        worker.enter({"buffer_bytes": 1000})
        until_idle(worker)
    assert cuda.num_streams == 1
