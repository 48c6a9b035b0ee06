"""Checks at submit that a run's training ranks will find the GPUs, packages, tokens and permissions that they need.

    nnodes              several machines need an address at which their ranks meet
    nproc_per_node      each rank needs its own GPU, if there are any
    push_to_hub         needs a token, or the trained model would not be uploaded
    report_to           needs the libraries of the trackers, which are not imported here
    use_liger_kernel    and other options need a GPU, found without torch, or a package: _needs
    torch_compile       needs a compiler
    weight_dir          must be writable

Tokens are looked for, but not tested. A store of weights is written to, read and cleaned up, which tests package,
credentials, bucket and permissions. A local directory is not written to, so that a run that is only validated leaves
nothing behind.
"""

import importlib.util
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.trainer.settings import TrainerSettings
from services.trainer.supervision.rank_command import rank_command
from shared.errors import PushError, UserError
from shared.gpus import num_gpus
from shared.install_commands import install_extras, install_packages
from shared.run_options.optimizers import FACTS
from shared.run_options.run_config import RunConfig
from shared.run_options.training import INDUCTOR
from shared.weights.weight_store import WeightStore

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")
_PROBE = b"headrace tried whether it can write here; this may be removed"


@dataclass(frozen=True)
class _Need:
    """A GPU or a package that one option needs where the training ranks run.

    Attributes:
        option: The option.
        is_asked: Whether the run sets it to a value with this need.
        gpu: Whether it needs a GPU.
        package: The package that it needs, by the name that is imported; empty if it needs none.
        without_gpu: What to do without a GPU.
    """

    option: str
    is_asked: bool
    gpu: bool = False
    package: str = ""
    without_gpu: str = "leave it out"


_EXTRAS = {"bitsandbytes": "trainer-8bit", "liger_kernel": "trainer-gpu"}
"""The extra that installs a package."""


def check_surroundings(config: RunConfig, settings: TrainerSettings) -> list[tuple[str, str]]:
    """Return (setting, message) for each requirement of the run that is missing where its training ranks run."""
    environment = settings.rank_environment()
    errors = check_environment(config, environment)
    try:
        rank_command("", config, settings)
    except UserError as error:
        errors.append((error.field or "nnodes", str(error)))
    return errors


def check_environment(config: RunConfig, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (setting, message) for each requirement that a training rank with this environment would miss."""
    gpus = num_gpus(environment)
    errors: list[tuple[str, str]] = []
    for need in _needs(config):
        value: object = getattr(config, need.option)
        asked = need.option if value is True else f"{need.option}: {value}"
        if need.is_asked and need.gpu and not gpus:
            errors.append((need.option, f"{asked} needs a GPU, and the trainer has none; {need.without_gpu}"))
        elif need.is_asked and need.package and not is_installed(need.package):
            how = install_extras(_EXTRAS[need.package])
            errors.append((need.option, f"{asked} needs {need.package} where the trainer runs; install with {how}"))
    if config.nproc_per_node != "auto" and 0 < gpus < config.nproc_per_node:
        errors.append(
            (
                "nproc_per_node",
                f"{config.nproc_per_node} training ranks need a GPU each, and the trainer has {gpus}; set "
                f"nproc_per_node to at most {gpus}, or to auto",
            )
        )
    if config.push_to_hub and not has_hub_token(environment):
        errors.append(
            (
                "push_to_hub",
                "the trainer has no token for the Hugging Face Hub, so the model could not be uploaded: set HF_TOKEN "
                "in its environment, or log in with `hf auth login` there, or leave push_to_hub out",
            )
        )
    return [*errors, *_check_compilers(config, environment, has_gpu=gpus > 0), *_check_reports(config.report_to)]


def _needs(config: RunConfig) -> list[_Need]:
    unpaged = config.optim.removeprefix("paged_")
    return [
        _Need("attn_implementation", config.attn_implementation not in ("auto", "sdpa", "eager"), gpu=True),
        _Need("weight_transport", config.weight_transport in ("nccl", "ipc"), gpu=True),
        _Need("vllm_enable_sleep_mode", config.vllm_enable_sleep_mode, gpu=True),
        _Need("use_liger_kernel", config.use_liger_kernel, gpu=True, package="liger_kernel"),
        _Need("load_in_4bit", config.load_in_4bit, gpu=True, package="bitsandbytes"),
        _Need(
            "optim",
            True,
            gpu=unpaged != config.optim,
            package=FACTS[config.optim].package,
            without_gpu=f"{unpaged if unpaged in FACTS else 'adamw_torch_fused'} does not",
        ),
    ]


def has_hub_token(environment: Mapping[str, str]) -> bool:
    """Return whether huggingface_hub finds a token in this environment or in the file that `hf auth login` writes."""
    if any(environment.get(name, "").strip() for name in _TOKENS):
        return True
    home = Path(environment.get("HOME", "~")).expanduser()
    cache = environment.get("XDG_CACHE_HOME") or home / ".cache"
    directory = environment.get("HF_HOME") or Path(cache) / "huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or Path(directory) / "token").expanduser()
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False


def _check_compilers(config: RunConfig, environment: Mapping[str, str], *, has_gpu: bool) -> list[tuple[str, str]]:
    """Return (setting, message) if torch.compile is to use its default backend, inductor, and a compiler is missing."""
    if not config.torch_compile or config.compile_backend != INDUCTOR:
        return []
    instead = "or set torch_compile_backend: aot_eager, which needs no compiler"
    path = environment.get("PATH")
    if not has_gpu:
        compilers = [environment["CXX"]] if environment.get("CXX") else ["g++", "clang++"]
        if not any(shutil.which(compiler, path=path) for compiler in compilers):
            return [("torch_compile", f"it needs a C++ compiler where the trainer runs: install g++, {instead}")]
    elif not is_installed("triton"):
        how = install_packages("triton")
        return [("torch_compile", f"it needs triton where the trainer runs: install with {how}, {instead}")]
    elif not any(shutil.which(compiler, path=path) for compiler in (environment.get("CC") or "gcc", "clang")):
        return [("torch_compile", f"Triton needs a C compiler where the trainer runs: install gcc, {instead}")]
    return []


_NOT_IN_THE_EXTRA = ("mlflow", "swanlab", "comet_ml")
"""Trackers that the extra `report` does not install. Their packages have the same names."""


def _check_reports(report_to: Sequence[str]) -> list[tuple[str, str]]:
    missing = [name for name in report_to if not is_installed(name)]
    if not missing:
        return []
    others = [name for name in missing if name in _NOT_IN_THE_EXTRA]
    how = [install_extras("report")] * (len(missing) > len(others)) + [install_packages(*others)] * bool(others)
    return [
        (
            "report_to",
            f"{' and '.join(missing)} cannot be used: not installed where the trainer runs. Install with "
            f"{' and '.join(how)} there, or leave it out",
        )
    ]


def is_installed(name: str) -> bool:
    """Return whether ``import name`` finds a library."""
    spec = importlib.util.find_spec(name)
    # A plain folder, such as the `wandb` that wandb leaves behind, can be imported too, but has no file.
    return spec is not None and spec.origin is not None


def check_weight_dir(weight_dir: str) -> list[tuple[str, str]]:
    """Check that weights can be written to ``weight_dir``, and return (setting, message) for each error. Blocks.

    A store is written to, read and cleaned up; a local directory is only looked at.
    """
    path = weight_dir.removeprefix("file://")
    if "://" not in path:
        there = next(parent for parent in (Path(path), *Path(path).parents) if os.path.exists(parent))
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return []
        return [
            ("weight_dir", f"the trainer cannot write to {there}: fix its permissions, or choose another directory")
        ]
    name = f"check-{secrets.token_hex(8)}"
    try:
        store = WeightStore(weight_dir)
        store.write(f"{name}/probe", _PROBE)
        content = store.read(f"{name}/probe")
        store.remove(name)
    except UserError as error:
        return [("weight_dir", str(error))]
    except PushError as error:
        return [("weight_dir", f"{error}. The trainer must be able to write, read and remove weights there")]
    if content != _PROBE:
        return [("weight_dir", f"{weight_dir} returned other content than was written to it")]
    return []
