"""Writes the tables of coming-from-trl.md from the settings: ``python docs/make_trl_page.py``. A test compares the two.

The text above the heading "Option by option" is written by hand.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shared.run_options.from_trl import (
    ABSENT,
    ELSEWHERE,
    INSTEAD,
    INSTEAD_IN_DATASETS,
    OF_OTHER_CONFIGS,
    OF_THE_CONSTRUCTOR,
)
from shared.run_options.run_config import RunConfig
from shared.run_options.trl.run_config_of_trl import CHANGE_WHAT_IS_LEARNED
from shared.run_options.trl.trl_defaults import TRL_DEFAULTS

PAGE = Path(__file__).with_name("coming-from-trl.md")
NUM_UNDER_TRLS_NAME = 88
"""Options of ``GRPOConfig`` that a run has too; a test in tests/conformance counts them."""
DEFAULTS_OF_TRL = {
    "save_steps": "500",
    "save_total_limit": "all are kept",
    "logging_steps": "10",
    "gradient_checkpointing": "true",
    "project": "`huggingface`",
    "steps_per_generation": "`gradient_accumulation_steps`",
}
"""TRL's defaults where they differ in what they mean."""
_DERIVED_DEFAULTS = [
    ("`dtype`", '`"float32"`', "bfloat16 (`bf16`)", "TRL's"),
    ("`max_staleness`", "`2`", "0: generation waits for training", "ours"),
    ("completions in an optimizer step", "64", "8 a training process", "TRL's"),
    ("`lora_dropout`", "`0.0`", "0.05", "TRL's"),
    ("`lora_target_modules`", "every linear layer", "a few, by architecture", "ours"),
    ("`max_eval_prompts`", "`256`", "all rows", "ours"),
]
_OF_A_FILE = {"logging_steps": "TRL's, with a tracker", "project": "TRL's, with a tracker"}
HEADING = "## Option by option\n"
TABLES = """
For TRL 1.16. `submit --trl` takes all options of `GRPOConfig`, `ScriptArguments` and `ModelConfig`. A run file has only
those of the same name, and [its own](run-file.md); for all others, error messages have the sentences of these tables.

### Defaults that differ

| option | default here | in TRL | with `submit --trl` |
|---|---|---|---|
{defaults}
### The same name and meaning

{num_same} options of `GRPOConfig`: {same}.

An exception is `steps_per_generation`, which counts optimizer steps here; TRL's counts microbatches, so divide it by
`gradient_accumulation_steps`. The steps in `num_train_epochs` can [differ a little](#differences).

Of `ScriptArguments` and `ModelConfig`: {same_elsewhere}.

### Another name or form

{elsewhere}
### Missing

`submit --trl` leaves these out with a note, except those in bold: they would change what is learned, and are refused.

{absent}
### Arguments of the trainer, and AsyncGRPOConfig

For run files. `GRPOTrainer` of headrace takes the arguments themselves: [From Python](python.md#the-arguments).

{others}"""


def page() -> str:
    """Return the page as it should be."""
    return PAGE.read_text(encoding="utf-8").partition(HEADING)[0] + HEADING + _tables()


def _tables() -> str:
    same = [name for name in TRL_DEFAULTS if name in RunConfig.model_fields]
    of_scripts = {name for name in same if name.startswith(("dataset", "lora", "load_in", "use_peft", "reward_funcs"))}
    of_scripts |= {"model_revision", "dtype", "attn_implementation", "datasets"}
    elsewhere = {name: why for name, why in OF_OTHER_CONFIGS.items() if name not in TRL_DEFAULTS}
    absent = {**ABSENT, **{name: why for name, why in OF_OTHER_CONFIGS.items() if name in TRL_DEFAULTS}}
    return TABLES.format(
        defaults="".join(f"| {' | '.join(row)} |\n" for row in _defaults()),
        num_same=NUM_UNDER_TRLS_NAME,
        same=_listed(name for name in same if name not in of_scripts),
        same_elsewhere=_listed(sorted(of_scripts)),
        elsewhere=_clauses(ELSEWHERE, "here"),
        absent=_clauses(absent, "why"),
        others=_clauses({**OF_THE_CONSTRUCTOR, **INSTEAD_IN_DATASETS, **elsewhere}, "here"),
    )


def _defaults() -> Iterable[tuple[str, ...]]:
    yield from _DERIVED_DEFAULTS
    for name, default in DEFAULTS_OF_TRL.items():
        ours: Any = RunConfig.model_fields[name].default
        of_file = "TRL's" if name == "steps_per_generation" else _OF_A_FILE.get(name, "ours")
        yield f"`{name}`", f"`{json.dumps(ours)}`", default, of_file


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _clauses(options: Mapping[str, str], title: str) -> str:
    """Return a table with a row for each clause, before it the options it is about."""
    by_clause: dict[str, list[str]] = {}
    for name in options:
        shown = f"**`{name}`**" if name in CHANGE_WHAT_IS_LEARNED else f"`{name}`"
        by_clause.setdefault(INSTEAD.get(name) or options[name], []).append(shown)
    rows = "".join(f"| {', '.join(names)} | {clause} |\n" for clause, names in by_clause.items())
    return f"| TRL | {title} |\n|---|---|\n{rows}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
