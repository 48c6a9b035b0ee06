"""Describes a run's LoRA adapter to vLLM, and makes the temporary directory in which pushed adapters arrive.

    pushed adapter --written to--> a PEFT directory in memory --add_lora--> the engine's adapter, in place of the last
                                                                                   |             (directory removed)
    every request of the run --names-----------------------------------------------+

The engine has one adapter. vLLM keys cached prompts by the name and path in their requests, which pushes do not change.
The cache salt (salted_llm.py) keeps requests from reusing what an older adapter computed, as it does for whole models.
"""

import contextlib
import fcntl
import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.install_commands import install_extras
from shared.run_options.lora import served_rank
from shared.run_options.run_config import RunConfig

_NAME, _ID = "policy", 1
_NOWHERE = "/nonexistent/headrace-adapter"
"""Path in requests. vLLM reads it if the adapter is not loaded, and must find nothing there."""
_MEMORY = "/dev/shm"
_PREFIX = "headrace-adapters-"
_BESIDE_BYTES = 2**20
"""Room for everything in the directory but the numbers of the adapters."""
_MOST_BYTES_A_NUMBER = 4
"""Adapters are trained, and may be sent, in float32."""


@dataclass(frozen=True)
class AdapterSpec:
    """Shape of a run's adapters, which an engine must know at its start to serve them."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...] | None
    is_base_4bit: bool = False
    use_rslora: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> "AdapterSpec | None":
        """Return the spec of the run's adapters; None if the run trains all weights."""
        if not config.use_peft:
            return None
        targets = config.lora_target_modules
        return cls(
            config.lora_r,
            config.lora_alpha,
            None if targets is None else tuple(sorted(targets)),
            is_base_4bit=config.load_in_4bit,
            use_rslora=config.use_rslora,
        )

    def engine_args(self) -> dict[str, Any]:
        """Return the arguments for AsyncEngineArgs that enable adapters and, for a 4-bit base, its quantisation."""
        args: dict[str, Any] = {
            "enable_lora": True,
            "max_lora_rank": served_rank(self.rank),
            "max_loras": 1,
            "max_cpu_loras": 1,
        }
        if self.is_base_4bit:
            # NF4 with double quantisation, computed while loading, as in the trainer (run_models.py).
            args |= {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}
        return args

    def peft_config(self) -> dict[str, Any]:
        """Return the content of PEFT's adapter_config.json, with the fields that vLLM reads."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.use_rslora,
            "target_modules": sorted(self.target_modules or ()),
            "bias": "none",
        }


def serving_request(adapter: AdapterSpec | None) -> Any | None:
    """Return the LoRARequest that makes vLLM sample with the run's adapter; None if the run has none."""
    if adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=_NAME, lora_int_id=_ID, lora_path=_NOWHERE)


def loading_request(directory: Path) -> Any:
    """Return the LoRARequest that loads a PEFT directory in place of the current adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=_NAME, lora_int_id=_ID, lora_path=str(directory), load_inplace=True)


@contextlib.contextmanager
def adapter_directory(shapes: Iterable[Sequence[int]]) -> Generator[Path]:
    """Make a temporary directory for adapters of these shapes, in memory if that has room. The block's end removes it.

    The directory is locked while this process lives. If the process is killed before the end of the block, the next
    generator on this machine finds the directory unlocked and removes it (``remove_left_adapters``).
    """
    num_bytes = _BESIDE_BYTES + _MOST_BYTES_A_NUMBER * sum(math.prod(shape) for shape in shapes)
    has_room = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= num_bytes
    with contextlib.ExitStack() as closing:
        while True:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY if has_room else None))
            closing.enter_context(_locked(directory, waits=True))
            if directory.exists():  # a process that starts now may have removed it before it was locked
                break
        closing.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def remove_left_adapters() -> None:
    """Remove the adapter directories of generators that were killed in the middle of a push."""
    for place in (_MEMORY, tempfile.gettempdir()):
        for directory in Path(place).glob(f"{_PREFIX}*"):
            with _locked(directory, waits=False) as is_left:
                if is_left:
                    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, *, waits: bool) -> Generator[bool]:
    """Lock a directory while the block runs. Yields False if it is gone, in use, or another user's."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor, waits=waits)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, waits: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_can_serve(config: RunConfig, *, has_cuda: bool) -> None:
    """Raise UserError if this replica cannot compute the run's adapters or their base model."""
    if not config.use_peft:
        return
    if has_cuda and config.dtype == "float32":
        raise UserError(
            "vLLM computes adapters on a GPU only in bfloat16, but the run's dtype is float32; set dtype: bfloat16",
            field="dtype",
        )
    if config.load_in_4bit and not has_cuda:
        raise UserError("load_in_4bit needs a GPU, but this generator runs on CPU; leave it out", field="load_in_4bit")
    if config.load_in_4bit and importlib.util.find_spec("vllm_bnb_plugin") is None:
        raise UserError(
            "load_in_4bit needs the package vllm-bnb-plugin where the generator runs: vLLM holds the base in 4 bits "
            f"through it. Install with {install_extras('generator-4bit')}",
            field="load_in_4bit",
        )
