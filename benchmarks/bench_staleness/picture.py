"""Draws the runs' rewards over their steps: one colour for each bound, dashed without correction."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.demo_runs import DemoResult

CORRECTION = "vllm_importance_sampling_correction"
_SMOOTH = 10


def draw(results: Sequence[DemoResult], png: Path) -> None:
    """Write the picture. Needs matplotlib, which the demo extra installs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = cast("tuple[Any, Any]", pyplot.subplots(figsize=(8, 4.5), layout="constrained"))
    bounds = sorted({int(result.settings["max_staleness"]) for result in results})
    for result in results:
        bound, is_corrected = int(result.settings["max_staleness"]), result.settings[CORRECTION]
        label = f"max_staleness {bound}" + ("" if is_corrected else ", no correction")
        rewards = _smooth(result.rewards)
        axis.plot(
            range(1, len(rewards) + 1),
            rewards,
            color=f"C{bounds.index(bound)}",
            linestyle="-" if is_corrected else "--",
            linewidth=1.3,
            label=label,
        )
    axis.set_xlabel("optimizer step")
    axis.set_ylabel(f"mean reward of the last {_SMOOTH} steps")
    axis.set_ylim(0, 1.02)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def _smooth(rewards: Sequence[float]) -> list[float]:
    return [
        sum(rewards[max(0, step - _SMOOTH) : step]) / (step - max(0, step - _SMOOTH))
        for step in range(1, len(rewards) + 1)
    ]
