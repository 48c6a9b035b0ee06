"""The options of `headrace plan`: the run as in a run file, mean lengths, machines, measured rates."""

import argparse
from collections.abc import Callable
from typing import Any

from headrace.argument_checks import above_zero, positive, whole

_RUN_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "--model": (str, "DIR|ID", "directory, config.json or Hugging Face id; only its config.json is read"),
    "--num-generations": (whole, "N", "completions a prompt"),
    "--groups-per-step": (whole, "N", "prompt groups an optimizer step"),
    "--max-staleness": (whole, "N", "in optimizer steps"),
    "--max-prompt-length": (whole, "TOKENS", "longest prompt"),
    "--max-completion-length": (whole, "TOKENS", "longest completion"),
    "--dtype": (str, "DTYPE", "bfloat16 or float32"),
}


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a run file; options override its settings")
    parser.add_argument("--from-run", metavar="RUN", help="take settings and measured rates from a run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    run = parser.add_argument_group("the run (as in a run file; --set for every other setting)")
    for name, (kind, metavar, text) in _RUN_OPTIONS.items():
        run.add_argument(name, type=kind, metavar=metavar, help=text)
    run.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="another setting"
    )
    shape = parser.add_argument_group("mean lengths, and the model's size")
    _number(shape, "--prompt-tokens", "TOKENS", "mean length of prompts")
    _number(shape, "--completion-tokens", "TOKENS", "mean length of completions (completions/mean_length)")
    _number(
        shape,
        "--parameters",
        "N",
        "number of weights, such as 8e9: if it cannot be counted, or without --model",
    )
    machines = parser.add_argument_group("machines")
    _number(machines, "--gpu-gib", "GIB", "memory of one GPU; without it the plan does not show what fits")
    _number(machines, "--trainer-gpus", "N", "training ranks, one a GPU (nproc_per_node x nnodes, or 1)", positive)
    _number(machines, "--generator-gpus", "N", "GPUs of one generator replica (by its parallel sizes, or 1)", positive)
    _number(machines, "--engine-gib", "GIB", "memory that vLLM needs beside weights and KV cache; see its log at start")
    rates = parser.add_argument_group("measured rates; a missing rate is never assumed")
    _number(rates, "--trainer-tokens-per-s", "RATE", "sampled tokens that the trainer trains a second while it trains")
    _number(rates, "--generator-tokens-per-s", "RATE", "sampled tokens of one generator replica a second")
    _number(rates, "--push-standstill-s", "S", "how long a weight push stops decoding (push/standstill_s)")
    _number(
        rates, "--drop-share", "D", "share of groups that are dropped: dropped / (dropped + trained) of a run; else 0"
    )
    _number(rates, "--reward-s", "S", "time of a reward function for one group (headrace_reward_seconds)")


def _number(group: Any, name: str, metavar: str, text: str, kind: Callable[[str], float] = above_zero) -> None:
    group.add_argument(name, type=kind, metavar=metavar, help=text)
