"""Draws the metrics of the demo's run as a PNG with four plots: reward, staleness, throughput and weight push times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.install_commands import install_extras

_BLUE, _ORANGE, _GREY = "#2a6f97", "#e07a2f", "#8a8a8a"


def draw_curves(
    rows: Sequence[dict[str, Any]],
    png: Path,
    *,
    title: str,
    accuracy: tuple[float, float] | None = None,
) -> None:
    """Draw reward, staleness, throughput and push times over the optimizer steps, and write the plots to a PNG file.

    Args:
        rows: The metrics of the run's steps.
        png: Path of the file.
        title: Title above all plots.
        accuracy: Held-out accuracy (0 to 1) before and after the run, drawn at step 0 and the last step.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise UserError(f"drawing curves needs matplotlib; install it with {install_extras('demo')}") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    _draw_reward(axes[0][0], rows, accuracy)
    _draw_staleness(axes[0][1], rows)
    _draw_throughput(axes[1][0], rows)
    _draw_pushes(axes[1][1], rows)
    for axis in axes.flat:
        axis.set_xlabel("optimizer step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def _draw_reward(axis: Any, rows: Sequence[dict[str, Any]], accuracy: tuple[float, float] | None) -> None:
    steps, rewards = _series(rows, "reward")
    axis.set_title("reward of sampled completions")
    axis.plot(steps, rewards, color=_BLUE, linewidth=1.4, label="mean reward")
    if accuracy is not None and steps:
        ends = [0.0, steps[-1]]
        axis.plot(
            ends, accuracy, "o", color=_ORANGE, clip_on=False, zorder=3, label="greedy accuracy, held-out prompts"
        )
        for step, value in zip(ends, accuracy, strict=True):
            axis.annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 8), ha="center")
    if rewards and min(rewards) >= 0 and max(rewards) <= 1:
        axis.set_ylim(-0.02, 1.08)


def _draw_staleness(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    axis.set_title("staleness of trained groups (steps)")
    steps, means = _series(rows, "staleness/mean")
    axis.plot(steps, means, color=_BLUE, linewidth=1.4, label="mean")
    steps, largest = _series(rows, "staleness/max")
    axis.step(steps, largest, where="mid", color=_GREY, linewidth=0.9, label="largest")
    axis.set_ylim(bottom=-0.05)


def _draw_throughput(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    axis.set_title("tokens per second")
    for name, color in (("generated", _BLUE), ("trained", _ORANGE)):
        steps, values = _series(rows, f"throughput/{name}_tokens_per_s")
        axis.plot(steps, values, color=color, linewidth=1.1, label=name)
    axis.set_ylim(bottom=0)


def _draw_pushes(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    axis.set_title("weight push (ms)")
    for name, label, color in (
        ("push/total_s", "whole push", _BLUE),
        ("push/standstill_s", "generation standstill", _ORANGE),
    ):
        steps, values = _series(rows, name)
        axis.plot(steps, [1000 * value for value in values], color=color, linewidth=1.1, label=label)
    axis.set_ylim(bottom=0)


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a number for this metric, and the numbers."""
    known = [row for row in rows if isinstance(row.get(name), int | float)]
    return [float(row["step"]) for row in known], [float(row[name]) for row in known]
