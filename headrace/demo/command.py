"""`headrace demo`: makes a small model, then improves it with GRPO exactly as a user would.

    launcher (a separate process): Redis, run API, rewarder, sessions service, generator
        ^ started                ^ HTTP: submit, watch
    warm-up  ----------------->  run file  ---> ... --->  accuracy before and after, curves, one line of JSON

This process is only a client: it reads the run's state from the public API and the run's directory.
"""

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.client import HeadraceClient
from headrace.demo import task
from headrace.demo.curves import draw_curves
from headrace.demo.demo_task import TASKS, ReverseTask
from headrace.demo.outcome import Outcome, make_outcome, read_trained
from headrace.local.detached import start_detached, wait_until_up
from headrace.local.service_specs import UpSettings
from headrace.local.state_dir import DEFAULT_STATE_DIR, StateDir
from headrace.run_file import parse_settings
from headrace.terminal import say
from headrace.watch.run_watch import RunWatch
from headrace.watch.watch import follow
from services.trainer.run_outputs import read_metrics
from shared.errors import HeadraceError, UserError
from shared.install_commands import install_extras

REWARD = "headrace.demo.reward:exact_answer"
_STALL_S = 240.0
_STOP_PATIENCE_S = 75.0
_NUM_SHOWN = 8
_PIPE_WIDTH = 110
_CALLS = "tools/call_frequency"
_EXTRAS = ("generator-cpu", "rewarder", "sessions", "trainer", "demo")


@dataclass(frozen=True)
class Prepared:
    """The data, model and run file that are made before the run is submitted, and the seconds that this took."""

    chosen: ReverseTask
    splits: task.Splits
    model_dir: Path
    run_file: Path
    seconds: float


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo, and return the exit status: 0 if the result meets all criteria of ``Outcome.problems``, else 1."""
    began_at = time.monotonic()
    overrides = parse_settings(arguments.settings)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    chosen = TASKS[arguments.task]
    directory = _directory(arguments.state_dir, arguments.seed)
    settings = UpSettings(state_dir=directory)
    console.print(f"[bold]headrace demo[/]  seed {arguments.seed}, no GPU needed; everything is kept in {directory}")
    with _services(settings, chosen, keep=arguments.keep, console=console) as process:
        prepared = _prepare(
            directory, chosen, overrides, warmed_up=arguments.model, seed=arguments.seed, console=console
        )
        endpoint = wait_until_up(settings, process)
        key = StateDir(directory).keys().api_key
        with HeadraceClient(endpoint.api_url, key, ca_file=endpoint.ca_file) as client:
            run_id = _submit(client, prepared, console)
            before = _evaluate(prepared.model_dir, prepared)
            console.print(
                f"greedy accuracy on {len(prepared.splits.test)} held-out prompts before: [bold]{before[0]:.3f}[/]"
            )
            watch = follow(client, run_id, console=console, stall_s=_STALL_S)
    if watch.status != "finished":
        raise HeadraceError(f"the run {watch.status}: {watch.run.get('reason') or 'no reason was given'}")
    after = _evaluate(Path(str(watch.run["run_dir"])) / "model", prepared)
    return _report(watch, prepared, before, after, seed=arguments.seed, began_at=began_at, console=console)


def _directory(named: str | None, seed: int) -> Path:
    """Return the directory ``named`` or, if None, the path of a new one, so that no earlier demo's run is continued."""
    if named:
        return Path(named).expanduser().absolute()
    now = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return (Path(DEFAULT_STATE_DIR) / f"demo-{now}-seed-{seed}").absolute()


@contextlib.contextmanager
def _services(
    settings: UpSettings, chosen: ReverseTask, *, keep: bool, console: Console
) -> "Generator[subprocess.Popen[bytes]]":
    """Start headrace's services, and end them after the block; with `keep`, only if the block raised an error."""
    # A user's functions would be in the working directory. The demo's are in a package, which has to be allowed.
    process = start_detached(settings, outlives_us=keep, variables=chosen.allowed_modules)
    try:
        yield process
    except BaseException:
        _end(process)
        console.print(f"everything was stopped; the logs are in {settings.state_dir / 'logs'}", highlight=False)
        raise
    if keep:
        console.print(f"the services keep running: end them with `headrace down --state-dir {settings.state_dir}`")
    else:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _prepare(
    directory: Path,
    chosen: ReverseTask,
    overrides: Mapping[str, Any],
    *,
    warmed_up: Path | None,
    seed: int,
    console: Console,
) -> Prepared:
    """Make the data, a tokenizer, a warmed-up model and the run file while the services start."""
    started = time.monotonic()
    model_dir, run_file, train_file = (directory / "demo" / name for name in ("model", "run.json", "train.jsonl"))
    model_dir.mkdir(parents=True, exist_ok=True)
    splits = task.make_splits(seed)
    task.write_jsonl(train_file, splits.train, row_of=chosen.row)
    console.print(f"the task: [cyan]{splits.test[0].prompt}[/]  ->  [cyan]{splits.test[0].answer}[/]", highlight=False)
    with console.status("warm-up: loading torch"):
        torch, transformers_logging = _quiet_torch()
        # A model this small does not train faster on two threads, and five times slower if the other core is busy.
        torch.set_num_threads(1)
    if warmed_up is None:
        num_steps = _warm_up(model_dir, chosen, splits, transformers_logging, seed=seed, console=console)
    else:
        _copy_model(warmed_up, model_dir)
        num_steps = 0
    own: dict[str, Any] = {
        **chosen.run_options,
        "name": f"demo-{chosen.name}-seed-{seed}",
        "model": str(model_dir),
        "dataset_name": str(train_file),
        "reward_funcs": [REWARD],
        "seed": seed,
    }
    config = {name: value for name, value in {**own, **overrides}.items() if value is not None}
    run_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    seconds = time.monotonic() - started
    if warmed_up is None:
        console.print(f"warm-up: {num_steps} steps of imitation in {seconds:.0f} s, then it is stopped on purpose")
    else:
        console.print(f"warm-up: taken from {warmed_up}", highlight=False)
    return Prepared(chosen, splits, model_dir, run_file, seconds)


def _warm_up(
    model_dir: Path,
    chosen: ReverseTask,
    splits: task.Splits,
    transformers_logging: Any,
    *,
    seed: int,
    console: Console,
) -> int:
    """Make a model that answers some prompts right, and return the number of imitation steps."""
    from headrace.demo.warmup import WarmupProgress, warm_up

    with console.status("warm-up: imitating a careless teacher") as status:

        def show(progress: WarmupProgress) -> None:
            status.update(
                f"warm-up: imitating a careless teacher, step {progress.step}, loss {progress.loss:.2f}, "
                f"accuracy {progress.validation_accuracy:.2f}"
            )

        transformers_logging.disable_progress_bar()
        try:
            last = warm_up(model_dir, splits, seed=seed, task=chosen, on_progress=show)
        except RuntimeError as error:
            raise UserError(f"the warm-up failed: {error}") from error
    return last.step


def _copy_model(source: Path, target: Path) -> None:
    """Copy the warmed-up model of an earlier demo with the same seed. Raises UserError if ``source`` has no model."""
    if not (source / "config.json").is_file():
        raise UserError(f"{source} holds no model; an earlier demo keeps its own in STATE_DIR/demo/model")
    shutil.copytree(source, target, dirs_exist_ok=True)


def _quiet_torch() -> tuple[Any, Any]:
    """Import torch and the logging module of transformers, which takes seconds, and return both.

    Raises:
        UserError: torch or transformers is not installed.
    """
    try:
        import torch
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise UserError(
            f"the demo trains and serves on this machine and needs all of headrace ({error}): in a checkout, `make "
            f"demo` installs it; elsewhere, install with {install_extras(*_EXTRAS)}"
        ) from error
    return torch, transformers_logging


def _submit(client: HeadraceClient, prepared: Prepared, console: Console) -> str:
    submission = client.submit(json.loads(prepared.run_file.read_text(encoding="utf-8")))
    for warning in submission.warnings:
        console.print(f"note: {warning}", markup=False, highlight=False)
    console.print(f"submitted {submission.run_id} over HTTP; the run file is {prepared.run_file}", highlight=False)
    return submission.run_id


def _evaluate(model_dir: Path, prepared: Prepared) -> tuple[float, list[str]]:
    from headrace.demo.evaluate import greedy_accuracy

    asked = prepared.splits.test
    return greedy_accuracy(
        model_dir, [example.prompt for example in asked], [example.answer for example in asked], task=prepared.chosen
    )


def _report(
    watch: RunWatch,
    prepared: Prepared,
    before: tuple[float, list[str]],
    after: tuple[float, list[str]],
    *,
    seed: int,
    began_at: float,
    console: Console,
) -> int:
    """Print the demo's results with one line of JSON at the end, and return the exit status: 0, or 1 with problems."""
    run_dir = Path(str(watch.run["run_dir"]))
    metrics = read_metrics(run_dir, after_step=-1, limit=sys.maxsize)[0]
    png = run_dir / "curves.png"
    accuracy = (before[0], after[0])
    draw_curves(metrics, png, title=f"headrace demo, seed {seed}: {prepared.chosen.title}", accuracy=accuracy)
    console.print(_comparison(prepared.splits, before[1], after[1]))
    console.print(
        f"greedy accuracy on {len(prepared.splits.test)} held-out prompts: "
        f"[bold]{before[0]:.3f}[/] before, [bold green]{after[0]:.3f}[/] after"
    )
    if calls := [float(row[_CALLS]) for row in metrics if _CALLS in row]:
        console.print(f"tool calls a rollout: [bold]{calls[0]:.2f}[/] in the first step, {calls[-1]:.2f} in the last")
    for label, path in (("model", run_dir / "model"), ("checkpoints", run_dir / "checkpoints"), ("curves", png)):
        console.print(f"{label:<12}{path}", markup=False, highlight=False, soft_wrap=True)
    outcome: Outcome = make_outcome(
        watch.run,
        metrics,
        trained=read_trained(run_dir),
        seed=seed,
        accuracy=accuracy,
        seconds=time.monotonic() - began_at,
        warmup_seconds=prepared.seconds,
    )
    problems = outcome.problems()
    for problem in problems:
        console.print(f"[bold red]not good enough:[/] {problem}", highlight=False)
    say(outcome.to_json())
    return 1 if problems else 0


def _comparison(splits: task.Splits, before: list[str], after: list[str]) -> Table:
    """Return a table of completions before and after the run for 8 prompts, preferably ones where they differ."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("held-out prompt", "before", "after"):
        table.add_column(column)
    rows = sorted(zip(splits.test, before, after, strict=True), key=lambda row: row[1] == row[2])
    for example, old, new in rows[:_NUM_SHOWN]:
        cells = [Text(text or "(nothing)", style="green" if text == example.answer else "red") for text in (old, new)]
        for cell, text in zip(cells, (old, new), strict=True):
            cell.append(" ✓" if text == example.answer else " ✗")
        table.add_row(example.prompt, *cells)
    return table
