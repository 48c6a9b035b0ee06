"""Translates every ``GRPOConfig`` of TRL's own tests into a run, without training: what is refused, and what is noted.

    python -m tests.headrace.grpo.trl_suite.configs TRL        TRL: a checkout of huggingface/trl, or its test file

Prints a line for each refusal, and at the end each note once.
Needs neither torch nor TRL. Returns 0 if none is refused.
"""

import argparse
import ast
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.run_options.grpo_config import GRPOConfig
from shared.run_options.run_config import parse_run_config
from shared.run_options.trl.run_config_of_trl import run_config_of
from tests.headrace.grpo.trl_suite.not_applicable import reason_of

_REST = {"model_name_or_path": "org/model", "dataset_name": "org/data", "reward_funcs": ["accuracy_reward"]}


def main() -> int:
    """Check the configurations."""
    parser = argparse.ArgumentParser(prog="configs")
    parser.add_argument("trl", type=Path, help="a checkout of github.com/huggingface/trl, or its test_grpo_trainer.py")
    given: Path = parser.parse_args().trl
    file = given / "tests" / "test_grpo_trainer.py" if given.is_dir() else given
    num_refused, num_checked = 0, 0
    notes: Counter[str] = Counter()
    for test, options in configs(ast.parse(file.read_text(encoding="utf-8"))):
        if reason_of(test) is not None:
            continue
        num_checked += 1
        try:
            notes.update(note_names(options))
        except (UserError, TypeError, ValueError) as error:
            num_refused += 1
            sys.stdout.write(f"{test} | {options} | {error}\n")
    sys.stdout.writelines(f"{count} x {note}\n" for note, count in notes.most_common())
    sys.stdout.write(f"{num_refused} of {num_checked} configurations are refused\n")
    return 1 if num_refused else 0


def note_names(options: dict[str, Any]) -> list[str]:
    """Return the notes of a configuration. Raises UserError if it is refused."""
    default, args = GRPOConfig(), GRPOConfig(**options)
    chosen = {field.name: getattr(args, field.name) for field in fields(args) if not args.is_derived(field.name)}
    chosen = {name: value for name, value in chosen.items() if value != getattr(default, name)}
    num_rewards = len(chosen.get("reward_weights") or [1])
    rewards = ["accuracy_reward", *(f"rewards:f{number}" for number in range(1, num_rewards))]
    config, notes = run_config_of({**_REST, "reward_funcs": rewards, **chosen})
    if chosen.get("eval_strategy", "no") == "no":  # the trainer leaves these out, as there is nothing to evaluate on
        config = {name: value for name, value in config.items() if not name.startswith("eval_")}
    parse_run_config(config)
    return notes


def configs(tree: ast.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each test and the options of its configuration, for each value of its parameters."""
    for group in tree.body:
        for test in group.body if isinstance(group, ast.ClassDef) else ():
            if not isinstance(test, ast.FunctionDef):
                continue
            for values in itertools.product(*_parameters(test)):
                known = {name: value for of_one in values for name, value in of_one.items()}
                for call in ast.walk(test):
                    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "GRPOConfig":
                        options = {word.arg: _value(word.value, known) for word in call.keywords if word.arg}
                        yield f"{getattr(group, 'name', '')}::{test.name}", options


def _parameters(test: ast.FunctionDef) -> Iterator[list[dict[str, Any]]]:
    for mark in test.decorator_list:
        if not isinstance(mark, ast.Call) or not ast.unparse(mark.func).endswith("parametrize"):
            continue
        names = [name.strip() for name in str(ast.literal_eval(mark.args[0])).split(",")]
        try:
            values: list[Any] = ast.literal_eval(mark.args[1])
        except ValueError:  # pytest.param and the like
            continue
        yield [dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values]


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.IfExp):
        test = node.test
        is_true = isinstance(test, ast.Compare) and _value(test.left, known) == _value(test.comparators[0], known)
        return _value(node.body if is_true else node.orelse, known)
    return "out" if ast.unparse(node) == "self.tmp_dir" else None


if __name__ == "__main__":
    sys.exit(main())
