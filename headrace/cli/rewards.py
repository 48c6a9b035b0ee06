"""`headrace rewards`: checks a reward function on real rows, or lists the functions that a running rewarder knows."""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from headrace import service_finder, terminal
from headrace.reward_check.function_name import named_function
from shared.errors import UserError
from shared.run_options.reward_kwargs import check_reward_kwargs
from shared.service.exiting import exit_at_once, has_other_threads

SCORED, FAILED, WRONG_ARGUMENTS = 0, 1, 2
_PIPE_WIDTH = 160


def check(arguments: argparse.Namespace) -> int:
    """Run one reward function on rows of a data set, and print its outcomes.

    Return the exit status: 1 if the function failed on a completion, 2 if the arguments are wrong, otherwise 0.
    """
    try:
        return _check(arguments)
    except UserError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return WRONG_ARGUMENTS


def list_known(arguments: argparse.Namespace) -> int:
    """List the reward functions that a running rewarder knows by name."""
    from headrace.cli import reward_list

    url, key, ca_file = _rewarder(arguments)
    _console().print(reward_list.table(reward_list.known_rewards(url, key, ca_file=ca_file)))
    return SCORED


def _check(arguments: argparse.Namespace) -> int:
    named = named_function(arguments.function)
    from headrace.reward_check import report
    from headrace.reward_check.row_groups import read_row_groups
    from headrace.reward_check.trial import try_function

    read = read_row_groups(
        _data_settings(arguments), num_rows=arguments.num_rows, completion_column=arguments.completion_column
    )
    kwargs = _kwargs(named.name, arguments.kwargs)
    runner = asyncio.Runner()
    try:
        trial = runner.run(
            try_function(
                named.name,
                read.groups,
                places=named.places,
                timeout_s=arguments.timeout_s,
                kwargs=kwargs,
                say=terminal.note,
            )
        )
    except Exception:
        runner.close()
        raise
    if trial.is_ended:
        runner.close()  # waits without a limit for tasks still on the event loop
    _console().print(report.table(read.groups, trial))
    for line in report.summary(named.name, read, trial):
        terminal.say(line)
    for said in trial.said:
        terminal.say(f"\n{said}")
    status = FAILED if report.has_failed(trial) else SCORED
    if not trial.is_ended:
        terminal.say(
            "\nthe function still runs although it was cancelled: "
            "an async function must neither block nor swallow CancelledError"
        )
    if not trial.is_ended or has_other_threads():
        exit_at_once(status)
    return status


def _kwargs(name: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        kwargs: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--kwargs is not JSON: {error or type(error).__name__}") from error
    if not isinstance(kwargs, dict):
        raise UserError('--kwargs: write a table of arguments and values, such as {"tolerance": 0.01}')
    checked = cast("dict[str, Any]", kwargs)
    try:
        check_reward_kwargs({name: checked}, [name])
    except ValueError as error:
        raise UserError(f"--kwargs: {error}") from error
    return checked


def _data_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    renamed: dict[str, str] = {}
    for pair in arguments.rename:
        old, is_pair, new = pair.partition("=")
        if not (is_pair and old and new):
            raise UserError(f"--rename {pair}: write OLD=NEW")
        renamed[old] = new
    return {
        "dataset_name": arguments.dataset,
        "dataset_config": arguments.config,
        "dataset_train_split": arguments.split,
        "prompt_column": arguments.prompt_column,
        "rename_columns": renamed or None,
        "system_prompt": arguments.system_prompt,
        "prompt_as_message": arguments.prompt_as_message,
    }


def _rewarder(arguments: argparse.Namespace) -> tuple[str, str, Path | None]:
    elsewhere = "" if arguments.state_dir else os.environ.get("HEADRACE_REWARDER_URL", "")
    if url := arguments.rewarder_url or elsewhere:
        arguments.rewarder_url = url  # an error names it
        return url, service_finder.key_elsewhere(url), service_finder.ca_file_elsewhere()
    if not arguments.state_dir and os.environ.get("HEADRACE_URL"):
        raise UserError(
            "HEADRACE_URL names the run API, and the rewarder lists the reward functions: set HEADRACE_REWARDER_URL, "
            "or give --rewarder-url"
        )
    state, endpoint = service_finder.local_service(arguments)
    return endpoint.rewarder_url, state.keys().api_key, endpoint.ca_file


def _console() -> Console:
    return terminal.console(pipe_width=_PIPE_WIDTH)
