"""Every option of TRL's GRPOConfig is a run setting of the same name, or the docs and hints name the alternative."""

import importlib.util
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from shared.run_options.from_trl import ABSENT, ELSEWHERE, INSTEAD
from shared.run_options.grpo_config import GRPOConfig
from shared.run_options.run_config import RunConfig
from tests.conformance.oracle import trl

OF_OTHER_CONFIGS = {
    "model_name_or_path",  # ModelConfig
    "overwrite_output_dir",  # TrainingArguments of transformers 4
    "warmup_ratio",  # TrainingArguments of transformers 4
}


MEAN_THE_SAME: dict[str, Any] = {"report_to": "none", "min_p": None, "hub_private_repo": None}


def default_of_trl() -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(trl.GRPOConfig)
        if field.init
    }


def test_every_option_of_trl_is_accounted_for_once() -> None:
    of_trl = {**ELSEWHERE, **ABSENT}.keys()
    assert default_of_trl().keys() - RunConfig.model_fields.keys() == of_trl - OF_OTHER_CONFIGS
    assert not INSTEAD.keys() & RunConfig.model_fields.keys()
    assert not ELSEWHERE.keys() & ABSENT.keys()


def test_the_page_has_the_number_of_options_under_the_same_name_and_the_defaults_that_differ() -> None:
    page = page_maker()
    ours, theirs = RunConfig.model_fields, default_of_trl()
    same = ours.keys() & theirs.keys()
    assert len(same) == page.NUM_UNDER_TRLS_NAME
    differ = {name for name in same if ours[name].default != theirs[name]}
    assert differ - MEAN_THE_SAME.keys() == page.DEFAULTS_OF_TRL.keys()
    assert {name: theirs[name] for name in MEAN_THE_SAME} == MEAN_THE_SAME


def test_a_script_reads_our_options_with_trls_parser() -> None:
    given = ["--max_steps", "3", "--no_gradient_checkpointing", "--report_to", "trackio", "--optim", "sgd"]
    given += ["--model_init_kwargs", '{"revision": "v2"}']
    (args,) = trl.TrlParser((GRPOConfig,)).parse_args_and_config(given)
    assert (args.max_steps, args.gradient_checkpointing, args.report_to, args.optim) == (3, False, "trackio", "sgd")
    assert (args.learning_rate, args.run_options, args.model_init_kwargs) == (1e-6, {}, {"revision": "v2"})


def page_maker() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "make_trl_page.py"
    spec = importlib.util.spec_from_file_location("make_trl_page", path)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page
