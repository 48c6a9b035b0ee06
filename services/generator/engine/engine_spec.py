"""Defines how an engine is started, and which runs may share an engine. Does not import vLLM."""

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from services.generator.engine.adapter import AdapterSpec, check_can_serve
from shared.errors import UserError
from shared.run_options.engine_args import why_not_at_all
from shared.run_options.run_config import RunConfig

_WORKER_EXTENSION = "services.generator.worker.worker_transfer.WorkerExtension"
_FILES_NOT_PUSHED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
"""Files of a model's directory that an engine reads only at its start."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


@dataclass(frozen=True)
class EngineSpec:
    """Start parameters of an engine. Runs with equal specs are served by the same engine, one after the other."""

    model: str
    revision: str | None
    dtype: str
    max_model_len: int | None
    adapter: AdapterSpec | None = None
    of_run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The run's ``vllm:`` section."""
    sleeps: bool = False
    """Whether the engine releases its GPU memory between two batches."""
    files: tuple[tuple[str, int, int], ...] = ()
    """Name, size in bytes and modification time in ns of the files in the model's directory that are not pushed. They
    differ if a file has changed. Empty for a model of the hub.
    """

    def engine_args(self, of_replica: Mapping[str, Any], *, has_cuda: bool) -> dict[str, Any]:
        """Return the arguments of vLLM's AsyncEngineArgs.

        The replica's arguments override the run's, and the run's arguments override headrace's.

        Raises:
            UserError: The combined arguments would sample from something other than the policy, or cannot serve the
                run's adapters.
        """
        args: dict[str, Any] = {
            "model": self.model,
            "revision": self.revision,
            "tokenizer_revision": self.revision,
            "dtype": self.dtype,
            # -1 means as much as the model and the cache allow.
            "max_model_len": -1 if self.max_model_len is None else self.max_model_len,
            "trust_remote_code": False,
            # Text only: a chat request could make a multimodal model fetch any URL.
            "language_model_only": True,
            # By default vLLM returns logprobs before temperature, and silently applies the model's own sampling
            # defaults.
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            # vLLM's default is 0, and replicas with one seed sample equal prompts alike.
            "seed": secrets.randbits(31),
            # No weights are transferred this way (see worker_transfer.py). The setting tells vLLM that weights will
            # change while the engine runs, so that it leaves out kernels that do not support this.
            "weight_transfer_config": {"backend": "ipc"},
            "worker_extension_cls": _WORKER_EXTENSION,
            # All requests have the same priority, except the probe after a push, which must not wait.
            "scheduling_policy": "priority",
            "disable_log_stats": True,
            # Compilation on CPU needs a C++ compiler and makes the first requests take seconds.
            "enforce_eager": not has_cuda,
        }
        if self.sleeps:
            args["enable_sleep_mode"] = True
        if self.adapter is not None:
            args |= self.adapter.engine_args()
        args |= dict(self.of_run) | dict(of_replica)
        kept: Any = args.get("sleep_preserve_parameter_names", [])
        if self.sleeps and isinstance(kept, list):  # vLLM refuses other values
            # A push brings the weights that sleep discards, except those of a draft model.
            args["sleep_preserve_parameter_names"] = [*kept, "draft.*"]
        if not has_cuda and any(args.get(name) is not None for name in _SPECULATION):
            # vLLM 0.32's fallback for Triton's expand_kernel writes into a copy, so temperatures stay uninitialised.
            raise UserError(
                "speculative decoding needs a GPU: vLLM's CPU build divides the logits by uninitialised memory, so it "
                "does not sample from the policy. Leave speculative_config out",
                field="vllm",
            )
        num_stages = args.get("pipeline_parallel_size")
        if self.adapter is not None and isinstance(num_stages, int) and num_stages > 1:  # vLLM refuses other values
            # Each stage has only its own layers, and all of the run's adapters are loaded into each.
            raise UserError(
                f"adapters cannot be pushed to an engine with pipeline_parallel_size={num_stages}: use "
                "tensor_parallel_size, or train all weights (use_peft: false)",
                field="vllm",
            )
        return args

    def overruled(self, of_replica: Mapping[str, Any]) -> list[str]:
        """Return the names of the run's engine arguments for which the replica sets another value."""
        return sorted(name for name in self.of_run if of_replica.get(name, self.of_run[name]) != self.of_run[name])


def spec_for(config: RunConfig, *, has_cuda: bool) -> EngineSpec:
    """Return the engine spec of a run. Looks at the files in the model's directory.

    Raises:
        UserError: The run needs a GPU and this replica has none, or this replica cannot serve the run's adapters.
    """
    if config.weight_transport in ("nccl", "ipc") and not has_cuda:
        raise UserError(
            f"weight_transport is {config.weight_transport}, but this generator runs on CPU; use auto, gloo or disk",
            field="weight_transport",
        )
    if config.vllm_enable_sleep_mode and not has_cuda:
        raise UserError(
            "vllm_enable_sleep_mode releases GPU memory, but this generator runs on CPU; leave it out",
            field="vllm_enable_sleep_mode",
        )
    check_can_serve(config, has_cuda=has_cuda)
    return EngineSpec(
        model=config.model,
        revision=config.model_revision,
        dtype=config.dtype,
        max_model_len=config.longest_rollout(),
        adapter=AdapterSpec.of(config),
        of_run=config.vllm,
        sleeps=config.vllm_enable_sleep_mode,
        files=_fingerprint(Path(config.model), has_pushed_weights=not config.use_peft),
    )


def _fingerprint(directory: Path, *, has_pushed_weights: bool) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and modification time of the files in a model's directory that a push does not replace.

    The result is EngineSpec.files. It is empty for a model of the hub, and if the directory cannot be read, which is
    reported when the model is loaded.
    """
    patterns = _FILES_NOT_PUSHED if has_pushed_weights else (*_FILES_NOT_PUSHED, *_WEIGHT_FILES)
    try:
        paths = sorted({path for pattern in patterns for path in directory.glob(pattern)})
        stats = [(path, path.stat()) for path in paths]
    except OSError:
        return ()
    return tuple((str(path.relative_to(directory)), stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def check_engine_args(of_replica: Mapping[str, Mapping[str, Any]], known: set[str]) -> None:
    """Raise UserError if vLLM does not know an argument that an operator has set, or if only headrace may set it.

    ``of_replica`` has the arguments by environment variable, and ``known`` the names that vLLM knows.
    """
    for variable, args in of_replica.items():
        if unknown := unknown_args(args, known):
            raise UserError(f"{variable}: {unknown}")
        for name in sorted(args):
            if why := why_not_at_all(name, args):
                raise UserError(f"{variable}: {name} cannot be set: {why}")


def unknown_args(args: Mapping[str, Any], known: set[str]) -> str | None:
    """Return a sentence about the arguments that vLLM does not have, or None if it has them all."""
    unknown = sorted(set(args) - known)
    if not unknown:
        return None
    near = [f"{name}?" for wrong in unknown for name in difflib.get_close_matches(wrong, known, n=1)]
    hint = f"did you mean {' '.join(near)}" if near else "use names of AsyncEngineArgs, such as max_num_seqs"
    return f"vLLM has no engine argument {', '.join(unknown)}; {hint}"


def refuse_auto_map(content: Any, *, where: str) -> None:
    """Raise UserError if a parsed config has ``auto_map`` at any depth. Such a model would run its own Python code."""
    unvisited: list[Any] = [content]
    while unvisited:
        node = unvisited.pop()
        if isinstance(node, dict):
            if "auto_map" in node:
                raise UserError(
                    f"{where} has auto_map: the model would run Python code from its own directory, which headrace "
                    "refuses. Use a model whose architecture vLLM and transformers know.",
                    field="model",
                )
            unvisited.extend(cast("dict[str, Any]", node).values())
        elif isinstance(node, list):
            unvisited.extend(cast("Sequence[Any]", node))
