"""What an engine is started with, and which runs may share one: pure, no vLLM in sight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from services.generator.adapter import AdapterSpec, check_can_serve
from services.generator.vllm_plugin import backend_for
from shared.errors import UserError
from shared.run_config import RunConfig

RESERVED_ENGINE_ARGS = frozenset(
    {
        "model",
        "tokenizer",
        "dtype",
        "trust_remote_code",
        "logprobs_mode",
        "generation_config",
        "weight_transfer_config",
        "enable_lora",
        "max_lora_rank",
        "max_loras",
        "max_cpu_loras",
        "seed",
    }
)
"""The run decides them, or what is recorded of a rollout would no longer be true."""


@dataclass(frozen=True)
class EngineSpec:
    """Two runs with equal specs are served by the same engine, one after the other."""

    model: str
    revision: str | None
    dtype: str
    max_model_len: int | None
    weight_backend: str
    adapter: AdapterSpec | None = None

    def engine_args(self, extra: Mapping[str, Any], *, has_cuda: bool) -> dict[str, Any]:
        """Return the arguments of vLLM's AsyncEngineArgs; ``extra`` wins."""
        args: dict[str, Any] = {
            "model": self.model,
            "revision": self.revision,
            "tokenizer_revision": self.revision,
            "dtype": self.dtype,
            # -1 is as much as the model and the cache allow.
            "max_model_len": -1 if self.max_model_len is None else self.max_model_len,
            "trust_remote_code": False,
            # Text alone: a chat request could make a multimodal model fetch any URL.
            "language_model_only": True,
            # vLLM's defaults are logprobs before temperature, and the model's own sampling defaults behind our back.
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "weight_transfer_config": {"backend": self.weight_backend},
            "disable_log_stats": True,
            # Compilation on CPU needs a C++ compiler and makes the first requests take seconds.
            "enforce_eager": not has_cuda,
        }
        if self.adapter is not None:
            args |= self.adapter.engine_args()
        return args | dict(extra)


def spec_for(config: RunConfig, *, has_cuda: bool) -> EngineSpec:
    """Return what the run needs.

    Raises:
        UserError: This replica has no GPU, and the run insists on one; or it has, and cannot serve the run there.
    """
    if config.weight_transport == "nccl" and not has_cuda:
        raise UserError(
            "weight_transport is nccl, but this generator runs on CPU; use auto or gloo", field="weight_transport"
        )
    check_can_serve(config, has_cuda=has_cuda)
    longest = None if config.max_prompt_length is None else config.max_prompt_length + config.max_completion_length
    return EngineSpec(
        model=config.model,
        revision=config.model_revision,
        dtype=config.dtype,
        max_model_len=longest,
        weight_backend=backend_for(config.weight_transport, has_cuda=has_cuda),
        adapter=AdapterSpec.of(config),
    )


def check_engine_args(extra: Mapping[str, Any], known: set[str]) -> None:
    """Raise UserError unless every key of HEADRACE_ENGINE_ARGS is known to vLLM and not headrace's to decide."""
    unknown = sorted(set(extra) - known)
    if unknown:
        raise UserError(
            f"HEADRACE_ENGINE_ARGS: vLLM has no engine argument {', '.join(unknown)}; use names of AsyncEngineArgs, "
            "such as max_num_seqs or gpu_memory_utilization"
        )
    reserved = sorted(set(extra) & RESERVED_ENGINE_ARGS)
    if reserved:
        raise UserError(f"HEADRACE_ENGINE_ARGS: {', '.join(reserved)} cannot be set; the run decides it")


def refuse_auto_map(content: Any, *, where: str) -> None:
    """Raise UserError if a parsed config has ``auto_map`` at any depth."""
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
