"""The part of headrace that users touch: Python interface, command line, HTTP client and local launcher.

``GRPOTrainer`` and ``GRPOConfig`` have TRL's interface. ``Client`` talks to a running deployment over HTTP. All
three are imported only when they are accessed, so that the command line starts at once.
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
    """Import ``Client``, ``GRPOConfig`` or ``GRPOTrainer`` when it is accessed (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """Return the module's names with ``Client``, ``GRPOConfig`` and ``GRPOTrainer``, for tab completion."""
    return sorted({*globals(), *__all__})
