"""Every engine argument of the installed vLLM is classified by its allowed values and by the users who may set it."""

import dataclasses
import typing
from typing import Any

import pytest

from shared.run_options.engine_arg_names import MODEL_FREE_METHODS, RUN_ENGINE_ARGS, SPECULATIVE_METHODS, TABLES
from shared.run_options.engine_args import OPERATORS_ENGINE_ARGS, RESERVED_ENGINE_ARGS

pytestmark = pytest.mark.vllm
arg_utils: Any = pytest.importorskip("vllm.engine.arg_utils")
ARGUMENTS: dict[str, Any] = {field.name: field for field in dataclasses.fields(arg_utils.AsyncEngineArgs)}
NAMES_CODE_OR_FILES = {
    "structured_outputs_config": {"reasoning_parser_plugin"},
    "attention_config": {"hisparse_config", "use_non_causal"},
    "speculative_config": {
        "code_revision", "draft_load_config", "draft_model_config", "draft_parallel_config", "target_model_config",
        "target_parallel_config", "synthetic_acceptance_rates", "synthetic_acceptance_length",
    },
}  # fmt: skip
"""Arguments that are not in TABLES, with the reason: code, files, another model than the run's, or unchecked drafts."""


def classes_of(annotation: Any) -> list[Any]:
    """Return the dataclasses in an annotation."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in classes_of(part)]


def config_class(name: str) -> Any:
    """Return the class that vLLM makes from a table; None if the annotation has no such class."""
    if name == "speculative_config":
        from vllm.config import SpeculativeConfig

        return SpeculativeConfig
    if name == "quantization_config":
        from vllm.config.quantization import QuantizationConfigArgs

        return QuantizationConfigArgs
    found = classes_of(ARGUMENTS[name].type)
    return found[0] if found else None


def test_each_argument_is_a_runs_an_operators_or_headraces() -> None:
    assert {*RUN_ENGINE_ARGS, *OPERATORS_ENGINE_ARGS, *RESERVED_ENGINE_ARGS} == ARGUMENTS.keys()


def test_the_types_are_read_here_and_not_their_names() -> None:
    assert config_class("attention_config").__name__ == "AttentionConfig"
    assert config_class("engram_config").__name__ == "EngramConfig"
    assert config_class("max_num_seqs") is None


def test_each_table_that_a_run_may_set_has_its_keys_listed() -> None:
    assert {name for name in RUN_ENGINE_ARGS if config_class(name) is not None} == TABLES.keys()


@pytest.mark.parametrize("name", sorted(TABLES))
def test_each_key_of_a_table_has_been_looked_at(name: str) -> None:
    keys = {field.name for field in dataclasses.fields(config_class(name)) if field.init}
    assert TABLES[name] | NAMES_CODE_OR_FILES.get(name, set()) == keys


def test_each_method_of_speculation_has_been_looked_at() -> None:
    from vllm.config.speculative import SpeculativeMethod

    def names(annotation: Any) -> set[str]:
        return {name for part in typing.get_args(annotation) for name in (names(part) or {part})}

    assert names(SpeculativeMethod) - {"custom_class", "extract_hidden_states"} == SPECULATIVE_METHODS


def test_arguments_that_name_a_model_never_name_a_class() -> None:
    from vllm.config import SpeculativeConfig

    looks_like_a_class: Any = vars(SpeculativeConfig)["_is_custom_proposer_path"]
    assert looks_like_a_class("package.module.Class")
    assert not any(looks_like_a_class(model) for model in [*MODEL_FREE_METHODS, "a/package.Class", "/a.b", "./a.b"])
