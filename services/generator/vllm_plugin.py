"""Registers headrace's weight-transfer engines in every vLLM process.

vLLM calls ``register`` through the entry point ``vllm.general_plugins`` of pyproject.toml, in the API process, the
engine core and each worker, and sometimes twice in one.
"""

import contextlib
from typing import Literal

from services.generator import engine_failure

GLOO_BACKEND = "headrace_gloo"
NCCL_BACKEND = "headrace_nccl"

_ENGINES = {
    GLOO_BACKEND: ("services.generator.gloo_weight_transfer", "GlooWeightTransferEngine"),
    NCCL_BACKEND: ("services.generator.nccl_weight_transfer", "NcclWeightTransferEngine"),
}


def register() -> None:
    """Make both engines known to vLLM; their modules are imported only when an engine is made."""
    engine_failure.write_down_failures()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, (module, class_name) in _ENGINES.items():
        # It refuses a name it knows, and cannot be asked whether it does.
        with contextlib.suppress(ValueError):
            WeightTransferEngineFactory.register_engine(name, module, class_name)


def backend_for(transport: Literal["auto", "gloo", "nccl"], *, has_cuda: bool) -> str:
    """Return the value of ``WeightTransferConfig(backend=...)`` for a run's ``weight_transport``."""
    if transport == "auto":
        return NCCL_BACKEND if has_cuda else GLOO_BACKEND
    return NCCL_BACKEND if transport == "nccl" else GLOO_BACKEND
