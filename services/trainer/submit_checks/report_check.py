"""Checks whether the libraries of a run's trackers are installed, without importing them."""

import importlib.util
from collections.abc import Sequence


def check_reports(report_to: Sequence[str]) -> list[tuple[str, str]]:
    """Return field and sentence for each error."""
    missing = [name for name in report_to if not is_installed(name)]
    if not missing:
        return []
    return [
        (
            "report_to",
            f"{' and '.join(missing)} cannot be used: not installed where the trainer runs. Install with "
            '`pip install "headrace[report]"` there, or leave it out',
        )
    ]


def is_installed(name: str) -> bool:
    """Whether ``import name`` finds a library."""
    spec = importlib.util.find_spec(name)
    # A plain folder, such as the `wandb` that wandb leaves behind, can be imported too, but has no file.
    return spec is not None and spec.origin is not None
