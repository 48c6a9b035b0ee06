"""Curves of several runs, one picture a metric."""

import importlib.util
import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from headrace.watch.braille_plot import braille_curve, merged
from headrace.watch.run_plot import draw_image, drawn, labels_of, metrics_to_draw, title_of
from headrace.watch.run_watch import RunWatch
from shared.errors import UserError

pytestmark = pytest.mark.unit


def run(run_id: str, name: str | None = None, *, rewards: tuple[float, ...] = (0.25, 0.5), **more: float) -> RunWatch:
    watch = RunWatch({"run_id": run_id, "name": name, "status": "finished", "progress": {}})
    for step, reward in enumerate(rewards, 1):
        watch.take_metrics({"step": step, "reward": reward, **more})
    return watch


def printed(runs: dict[str, RunWatch], *metrics: str, width: int = 60) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as picture:
        console.print(drawn(runs, metrics, width=width))
    return picture.get().rstrip().splitlines()


def test_runs_are_labelled_by_name_and_by_their_id_where_names_are_equal_or_missing() -> None:
    runs = [run("run-a", "first"), run("run-b"), run("run-c", "twice"), run("run-d", "twice")]
    assert list(labels_of(runs)) == ["first", "run-b", "twice (run-c)", "twice (run-d)"]


def test_by_default_the_metrics_are_drawn_that_a_run_has() -> None:
    first, second = run("run-a", kl=0.1), run("run-b")
    second.take_metrics({"step": 3, "completions/mean_length": 5.0})
    assert metrics_to_draw({"a": first, "b": second}, []) == ["reward", "completions/mean_length", "kl"]
    second.take_evaluation({"step": 1, "eval_reward": 0.5})
    assert "eval_reward" in metrics_to_draw({"a": first, "b": second}, [])
    with pytest.raises(UserError, match="there is nothing to draw: no step was trained"):
        metrics_to_draw({"a": run("run-a", rewards=())}, [])


def test_a_metric_that_no_run_has_is_refused_with_the_nearest() -> None:
    runs = {"a": run("run-a", kl=0.1)}
    assert metrics_to_draw(runs, ["kl", "reward", "kl"]) == ["kl", "reward"]
    with pytest.raises(UserError, match=r"the metric rewards has no value; did you mean reward\?"):
        metrics_to_draw(runs, ["rewards"])


def test_only_a_run_that_has_not_ended_has_no_value_yet() -> None:
    trains = run("run-a", rewards=())
    trains.run["status"] = "running"
    with pytest.raises(UserError, match=r"the metric kl has no value yet; docs/metrics\.md lists the metrics"):
        metrics_to_draw({"a": trains, "b": run("run-b")}, ["kl"])
    with pytest.raises(UserError, match="there is nothing to draw yet"):
        metrics_to_draw({"a": trains}, [])
    assert printed({"a": trains, "b": run("run-b")}, "reward")[0] == "reward  A a no number yet  B b 0.5"


def test_a_title_has_the_unit_of_the_metric() -> None:
    assert title_of("completions/mean_length") == "completions/mean_length (tokens)"
    assert title_of("reward") == "reward"
    assert title_of("my_own") == "my_own"


def test_curves_share_their_cells_and_a_cell_belongs_to_the_last_curve_in_it() -> None:
    # Two characters of 2 x 4 dots. One curve is along the lowest dots, the other along the highest of the first half.
    low = braille_curve([(1, 0.0), (4, 0.0)], width=2, height=1, low=0.0, high=1.0, first=1, last=4)
    high = braille_curve([(1, 1.0), (2, 1.0)], width=2, height=1, low=0.0, high=1.0, first=1, last=4)
    first, second = chr(0x2800 + 0x40 + 0x80 + 0x01 + 0x08), chr(0x2800 + 0x40 + 0x80)
    assert merged([low, high]) == [[(first, 1), (second, 0)]]


def test_letters_say_which_curve_is_whose_without_colours() -> None:
    level, below = ([(1, value), (80, value)] for value in (1.0, 0.0))
    curves = [braille_curve(its, width=40, height=2, low=0.0, high=1.0, first=1, last=80) for its in (level, below)]
    top, bottom = ("".join(cell for cell, _ in line) for line in merged(curves, "AB"))
    assert (set(top) - {top[0]}, set(bottom) - {bottom[0]}) == ({"A"}, {"B"})
    assert (top.count("A"), bottom.count("B")) == (4, 3)
    assert [number for _, number in merged(curves, "AB")[0]] == [0] * 40


def test_curves_that_are_equal_show_the_letters_of_both() -> None:
    curve = braille_curve([(1, 0.0), (4, 0.0)], width=2, height=1, low=0.0, high=1.0, first=1, last=4)
    assert merged([curve, curve], "AB") == [[("A", 0), ("B", 1)]]


def test_in_the_terminal_each_metric_has_a_picture_with_all_runs_and_their_newest_values() -> None:
    runs = {"first": run("run-a", kl=0.1), "second": run("run-b", rewards=(0.125,) * 40)}
    lines = printed(runs, "reward", "kl")
    assert lines[0].split() == ["reward", "A", "first", "0.5", "B", "second", "0.125"]
    assert max(len(line) for line in lines) <= 60
    axes = [line.split() for before, line in itertools.pairwise(lines) if "└" in before]
    assert axes == [["1", "optimizer", "step", "40"], ["1", "optimizer", "step", "2"]]
    assert "kl (nats)  A first 0.1  B second no number" in lines


def test_in_the_terminal_evaluations_lie_at_their_steps() -> None:
    watch = run("run-a")
    for step in (0, 20, 40, 60):
        watch.take_evaluation({"step": step, "eval_reward": 1.0 if step == 20 else 0.0})
    lines = printed({"first": watch}, "eval_reward", width=71)  # 60 columns for the steps
    (top,) = [line[11:] for line in lines if line.lstrip().startswith("1 ┤")]
    peak = [column for column, cell in enumerate(top) if cell != chr(0x2800)]
    assert sum(peak) / len(peak) == pytest.approx(20, abs=1)
    assert lines[-1].split() == ["0", "optimizer", "step", "60"]


def continued(run_id: str, *, steps_before: int, rewards: tuple[float, ...]) -> RunWatch:
    watch = run(run_id, rewards=rewards)
    watch.run["beginning"] = {"run_id": "run-a", "step": steps_before, "steps_before": steps_before, "says": "there"}
    return watch


def test_a_run_that_continues_another_is_drawn_from_where_it_continues() -> None:
    first = run("run-a", rewards=(0.0,) * 21)
    second = continued("run-b", steps_before=20, rewards=(1.0,) * 21)
    lines = printed({"first": first, "second": second}, "reward", width=52)  # 41 columns for the steps 1 to 41
    (top,), (bottom,) = ([line[11:] for line in lines if line.lstrip().startswith(f"{low} ┤")] for low in (1, 0))
    empty = chr(0x2800)
    assert len(bottom.rstrip(empty)) == 21
    assert len(top) - len(top.lstrip(empty)) == 20
    assert lines[-1].split() == ["1", "step,", "earlier", "runs", "included", "41"]


def test_an_image_shows_a_run_that_continues_another_from_where_it_continues(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {"first": run("run-a"), "second": continued("run-b", steps_before=60, rewards=(0.5, 1.0))}
    draw_image(runs, ["reward"], tmp_path / "curves.svg")
    image = (tmp_path / "curves.svg").read_text()
    assert "<!-- step, earlier runs included -->" in image
    assert "<!-- 60 -->" in image


def test_an_image_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    runs = {"first": run("run-a")}
    with pytest.raises(UserError, match=r"curves\.gif does not end in \.png, \.svg or \.pdf"):
        draw_image(runs, ["reward"], tmp_path / "curves.gif")
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(UserError, match="drawing an image needs matplotlib"):
            draw_image(runs, ["reward"], tmp_path / "curves.png")
        return
    draw_image(runs, ["reward"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        draw_image(runs, ["reward"], tmp_path / "none" / "curves.png")
