"""`headrace plan`: computes the machines, memory and time that a run needs, from sizes and measured rates."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace import service_finder
from headrace.byte_size import GIB
from headrace.plan.from_run import Measured, read_run
from headrace.plan.host_memory import host_rows
from headrace.plan.memory import GENERATOR, TRAINER, disk_rows, generator_rows, trainer_rows
from headrace.plan.model_source import read_shape
from headrace.plan.pace import pace_rows, reward_rows
from headrace.plan.redis_memory import redis_rows
from headrace.plan.rows import Row
from headrace.plan.sessions import session_rows
from headrace.plan.workload import Rates, Workload, spread
from headrace.run_file import parse_settings, read_run_file
from shared.errors import HeadraceError, UserError
from shared.run_options.run_config import RunConfig, parse_run_config

_DIRECT = (
    "model", "num_generations", "groups_per_step", "max_staleness", "max_prompt_length", "max_completion_length",
    "dtype",
)  # fmt: skip
_PLACEHOLDERS: dict[str, Any] = {"dataset_name": "plan", "reward_funcs": ["accuracy_reward"]}
_ANY_MODEL = "any model"
_PIPE_WIDTH = 160
FITS, DOES_NOT_FIT, WRONG_ARGUMENTS = 0, 1, 2


def plan(arguments: argparse.Namespace) -> int:
    """Print a run's plan. Return 1 if something does not fit into memory, 2 if the arguments are wrong, otherwise 0."""
    try:
        work, ran = workload(arguments)
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return WRONG_ARGUMENTS
    rows = all_rows(work, ran)
    if arguments.json:
        sys.stdout.write(as_json(work, rows) + "\n")
    else:
        _show(work, rows)
    tight = too_tight(rows)
    if tight:
        sys.stderr.write(f"headrace: this does not fit: {'; '.join(tight)}\n")
    return DOES_NOT_FIT if tight else FITS


def too_tight(rows: list[Row]) -> list[str]:
    """Return the sections (trainer, generator) with too little GPU memory. Warnings in other sections do not count."""
    return list(dict.fromkeys(row.section for row in rows if row.is_warning and row.section in (TRAINER, GENERATOR)))


def all_rows(work: Workload, ran: Measured | None = None) -> list[Row]:
    """Compute all rows of the plan. ``ran`` adds the peak memory that was measured in a run."""
    rows = trainer_rows(work)
    if ran is not None and ran.device_peak_bytes is not None:
        section = rows[0].section
        rows.append(
            Row(section, "peak of the run", ran.device_peak_bytes, "bytes", f"memory/device_peak_bytes of {ran.run_id}")
        )
    rows += [*generator_rows(work), *host_rows(work), *pace_rows(work), *reward_rows(work)]
    return [*rows, *session_rows(work), *redis_rows(work), *disk_rows(work)]


def workload(arguments: argparse.Namespace) -> tuple[Workload, Measured | None]:
    """Return the workload to plan for, and the measurements of a run if one was named.

    Raises:
        UserError: The settings or the model are wrong.
        HeadraceApiError: The named run could not be read.
    """
    ran = None
    if arguments.parameters is not None and arguments.parameters < 1:
        raise UserError(f"--parameters {arguments.parameters:g} is less than one weight; write 0.6 billion as 6e8")
    if arguments.from_run:
        with service_finder.connect(arguments) as client:
            ran = read_run(client, arguments.from_run)
    config = _config(arguments, ran)
    shape, num_parameters = None, int(arguments.parameters or 0)
    if config.model != _ANY_MODEL:
        shape = read_shape(config.model, revision=config.model_revision, num_parameters=arguments.parameters)
        num_parameters = shape.num_parameters or num_parameters
    given = ran.rates if ran is not None else Rates()
    per_node = 1 if config.nproc_per_node == "auto" else config.nproc_per_node
    work = Workload(
        config=config,
        shape=shape,
        num_parameters=num_parameters,
        prompt_tokens=arguments.prompt_tokens or (ran.prompt_tokens if ran else None),
        completion_tokens=arguments.completion_tokens or (ran.completion_tokens if ran else None),
        trainer_gpus=int(arguments.trainer_gpus or per_node * config.nnodes),
        engine=spread(config, shape, num_gpus=arguments.generator_gpus),
        gpu_bytes=arguments.gpu_gib * GIB if arguments.gpu_gib else None,
        engine_bytes=arguments.engine_gib * GIB if arguments.engine_gib else None,
        rates=_rates(arguments, given),
    )
    longest = None if shape is None else shape.max_position_embeddings
    wanted = (config.max_prompt_length or 0) + config.max_completion_length
    if longest is not None and wanted > longest:
        raise UserError(f"prompt and completion may have {wanted} tokens, but the model takes {longest}")
    if work.completion_tokens is not None and work.completion_tokens > config.max_completion_length:
        raise UserError(
            f"completions have {work.completion_tokens:g} tokens on average, more than "
            f"max_completion_length={config.max_completion_length}: raise that"
        )
    return work, ran


def as_json(work: Workload, rows: list[Row]) -> str:
    """Return the plan as one JSON object, with value, unit and derivation of each row by section and name."""
    plan_by_section: dict[str, dict[str, Any]] = {}
    for row in rows:
        section = plan_by_section.setdefault(row.section, {})
        section[row.name] = {"value": row.value, "unit": row.unit, "how": row.how, "is_warning": row.is_warning}
    body = {
        "model": None if work.shape is None else work.config.model,
        "fits": not too_tight(rows),
        "num_parameters": work.num_parameters,
        "trainer_gpus": work.trainer_gpus,
        "generator_gpus": work.engine.num_gpus,
        "missing": [f"{row.section}: {row.name}: {row.how}" for row in rows if row.value is None],
        "plan": plan_by_section,
    }
    return json.dumps(body, indent=2)


def _config(arguments: argparse.Namespace, ran: Measured | None) -> RunConfig:
    settings: dict[str, Any] = {**_PLACEHOLDERS}
    if ran is not None:
        settings |= ran.config
    if arguments.file:
        settings |= read_run_file(Path(arguments.file))
    settings |= {name: value for name in _DIRECT if (value := getattr(arguments, name)) is not None}
    settings |= parse_settings(arguments.settings)
    if "model" not in settings and arguments.parameters:
        settings["model"] = _ANY_MODEL
    if "model" not in settings:
        raise UserError("name a model with --model, a run file, or --from-run; or give its size with --parameters")
    return parse_run_config(_without_doubles(settings))


def _without_doubles(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the placeholder data set if the settings name a mixture of data sets."""
    return {
        name: value for name, value in settings.items() if not (name == "dataset_name" and settings.get("datasets"))
    }


def _rates(arguments: argparse.Namespace, of_run: Rates) -> Rates:
    rates = of_run
    if arguments.trainer_tokens_per_s:
        rates = replace(rates, trainer_tokens_per_s=arguments.trainer_tokens_per_s)
    if arguments.generator_tokens_per_s:
        rates = replace(
            rates,
            generator_tokens_per_s=arguments.generator_tokens_per_s,
            is_generator_lower_bound=False,
            holds_pushes=False,
            generator_source="given",
        )
    if arguments.push_standstill_s:
        rates = replace(rates, push_standstill_s=arguments.push_standstill_s)
    if arguments.drop_share:
        if arguments.drop_share >= 1:
            raise UserError("--drop-share is the share of all groups that are dropped, below 1")
        rates = replace(rates, drop_share=arguments.drop_share)
    given = {name: getattr(arguments, name) for name in ("reward_s", "turns", "turn_cpu_s")}
    return replace(rates, **{name: number for name, number in given.items() if number})


def _show(work: Workload, rows: list[Row]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    config = work.config
    console.print(
        f"{config.model}: {work.num_parameters:,} parameters"
        f"{'' if work.shape is None else f', {work.shape.num_layers} layers'}; "
        f"{config.groups_per_step} groups of {config.num_generations} a step, max_staleness {config.max_staleness}, "
        f"{config.dtype}{', LoRA' if config.use_peft else ''}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    for section in dict.fromkeys(row.section for row in rows):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=section, title_justify="left", title_style="bold")
        table.add_column("what", no_wrap=True)
        table.add_column("how much", justify="right", no_wrap=True)
        table.add_column("from", overflow="fold")
        for row in rows:
            if row.section == section:
                style = "bold red" if row.is_warning else "yellow" if row.value is None else ""
                table.add_row(Text(row.name), Text(row.shown, style=style), Text(row.how))
        console.print(table)
