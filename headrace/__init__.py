"""The user-facing parts: Python interface, command line, HTTP client, local launcher.

``from headrace import GRPOTrainer, GRPOConfig`` is TRL's interface; ``HeadraceClient`` is that of a deployment. They
are imported when they are asked for, so that the command line starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client import HeadraceClient as Client
    from headrace.grpo.grpo_trainer import GRPOTrainer
    from shared.run_options.grpo_config import GRPOConfig

__all__ = ["Client", "GRPOConfig", "GRPOTrainer"]

_HOMES = {
    "Client": ("headrace.client", "HeadraceClient"),
    "GRPOConfig": ("shared.run_options.grpo_config", "GRPOConfig"),
    "GRPOTrainer": ("headrace.grpo.grpo_trainer", "GRPOTrainer"),
}


def __getattr__(name: str) -> Any:
    """Import one of the names above."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """Return the names above too, for completion."""
    return sorted({*globals(), *__all__})
