"""Writes run-file.md from the settings themselves: ``python docs/make_run_file_page.py``. A test compares the two.

A comment above settings in the code is the heading above them in the page.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared.run_options.agents import AgentOptions
from shared.run_options.beginning import BeginningOptions
from shared.run_options.data import DataOptions, DatasetSource
from shared.run_options.generation import GenerationKwargs, GenerationOptions
from shared.run_options.keeping import KeepingOptions
from shared.run_options.labels import LabelOptions
from shared.run_options.lora import LoraOptions
from shared.run_options.loss import LossOptions
from shared.run_options.pushing import PushingOptions
from shared.run_options.run_config import RunConfig
from shared.run_options.section import Section
from shared.run_options.training import TrainingOptions

PAGE = Path(__file__).with_name("run-file.md")
HEAD = """# The run file

For writing a run file: every key with its type, default and meaning, and [the differences from TRL](#coming-from-trl).
A run file is YAML or JSON, passed to `headrace submit` or sent as the body of `POST /v1/runs`. Names are TRL's
(`GRPOConfig`, `ScriptArguments` and `ModelConfig`) wherever the meaning is the same. Unknown keys and contradictory
combinations are refused with the reason. Null means that a key is not set, so its default counts; only for
`push_probe_tolerance` and `vllm_importance_sampling_clip_max` it is a value, which switches them off. Paths may be
relative to the run file; over HTTP they must be absolute. Required are `model`, `dataset_name` or `datasets`, and
`reward_funcs` without an environment that has `get_reward`.

`headrace submit --dry-run` reports whether a run file would be accepted, and the run that results from it. Without
running services it checks only the settings, and model and data sets on this machine, and names what it did not check:
reward functions, tools, vLLM's options, everything on a hub. An option without effect is refused if it is certainly a
mistake; otherwise the answer has a warning.

More about: [data sets and prompts](datasets.md), [rewards](rewards.md), [losses](algorithms.md), [LoRA](lora.md),
[beginning from a checkpoint](continuing.md), [the engine and sampling](engine.md), [the weight push](weight-push.md),
[its transports](weight-transports.md), [metrics](metrics.md).
"""
COMING_FROM_TRL = """
## Coming from TRL

Most options of TRL 1.16's `GRPOConfig`, `ScriptArguments` and `ModelConfig` are keys here under the same name and with
the same meaning. All others are refused, with a hint. [Coming from TRL](coming-from-trl.md#option-by-option) lists the
options by what becomes of them, and the defaults that differ. `headrace submit --trl` translates a file of TRL's.
"""
SECTIONS: list[tuple[type[Section], str]] = [
    (RunConfig, "The run"),
    (LabelOptions, "Name, tags and metadata"),
    (DataOptions, "Data sets"),
    (DatasetSource, "An entry of `datasets`"),
    (BeginningOptions, "Beginning from a checkpoint"),
    (GenerationOptions, "Generation"),
    (GenerationKwargs, "The table `generation_kwargs`"),
    (AgentOptions, "Tools"),
    (LossOptions, "Loss"),
    (TrainingOptions, "Optimizer"),
    (LoraOptions, "LoRA"),
    (PushingOptions, "Weight push"),
    (KeepingOptions, "Checkpoints and the hub"),
]
_HEADING_OR_FIELD = re.compile(r"^    (?:# (?P<heading>.+)|(?P<field>\w+): .*)$", re.MULTILINE)


def page() -> str:
    """Return the page as it should be."""
    settings = "".join(part for section, title in SECTIONS for part in _tables(section, title))
    return HEAD + settings + COMING_FROM_TRL


def _tables(section: type[Section], title: str) -> Iterator[str]:
    for heading, names in _by_heading(section, title).items():
        rows = "".join(_row(name, section.model_fields[name]) for name in names)
        yield f"\n## {heading}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _by_heading(section: type[Section], title: str) -> dict[str, list[str]]:
    """Return the names of the settings a class has itself, by the comment above them."""
    groups: dict[str, list[str]] = {title: []}
    heading = title
    for found in _HEADING_OR_FIELD.finditer(inspect.getsource(section)):
        if found["heading"]:
            heading = found["heading"]
            groups[heading] = []
        elif found["field"] in section.model_fields:
            groups[heading].append(found["field"])
    return {name: fields for name, fields in groups.items() if fields}


def _row(name: str, field: FieldInfo) -> str:
    default = "**required**" if field.default is PydanticUndefined else f"`{json.dumps(field.default)}`"
    meaning = (field.description or "as in TRL").replace("|", "\\|")
    return f"| `{name}` | {_kind(field.annotation)} | {default if default != '`null`' else ''} | {meaning} |\n"


def _kind(annotation: Any) -> str:
    """Return the type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not NoneType)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"table of {_kind(arguments[0])} to {_kind(arguments[1])}"
    names: dict[Any, str] = {str: "text", bool: "true or false", DatasetSource: "tables, see below",
                             GenerationKwargs: "table, see below", Any: "anything"}  # fmt: skip
    return names.get(annotation) or str(annotation.__name__)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
