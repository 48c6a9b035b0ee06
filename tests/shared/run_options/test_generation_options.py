"""The `vllm:` section, sampling options and structured outputs of a run file."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.engine_arg_names import RUN_ENGINE_ARGS, TABLES
from shared.run_options.engine_args import (
    OPERATORS_ENGINE_ARGS,
    RESERVED_ENGINE_ARGS,
    default_max_model_len,
    longrope_context,
)
from shared.run_options.generation import INSTEAD_IN_GENERATION_KWARGS, GenerationKwargs
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

MINIMAL = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}


def a_run(**settings: Any) -> RunConfig:
    return parse_run_config(MINIMAL | settings)


def test_engine_arguments_are_taken_as_they_are() -> None:
    args = {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    assert a_run(vllm=args).vllm == args
    assert a_run().vllm == {}


@pytest.mark.parametrize("name", sorted(RESERVED_ENGINE_ARGS))
def test_an_option_that_headrace_decides_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"vllm: {name} cannot be set: {RESERVED_ENGINE_ARGS[name]}")):
        a_run(vllm={name: 1})


@pytest.mark.parametrize("name", sorted(OPERATORS_ENGINE_ARGS))
def test_a_run_may_not_have_a_generator_load_code_or_files(name: str) -> None:
    with pytest.raises(UserError, match=f"vllm: {name} cannot be set: .*HEADRACE_ENGINE_ARGS"):
        a_run(vllm={name: "anything"})


CLASS = "package.module.Class"


@pytest.mark.parametrize(
    ("speculation", "why"),
    [
        ({"method": "custom_class", "model": CLASS}, "of its methods a run may use .*HEADRACE_ENGINE_ARGS"),
        (
            {"model": CLASS},
            "set a method too, such as draft_model: without it vLLM may take the model package.module.Class",
        ),
        ({"method": None, "model": CLASS}, "set a method too"),
        ({"method": ["ngram"], "model": CLASS}, "of its methods"),
        ({"method": "extract_hidden_states"}, "of its methods"),
        ({"method": "ngram", "draft_load_config": {"load_format": "pt"}}, "may not set draft_load_config of it"),
        ({"method": "ngram", "draft-load-config": {"load_format": "pt"}}, "may not set draft_load_config of it"),
        ({"method": "ngram", "draft_model_config": {}}, "may not set draft_model_config of it"),
        ({"method": "ngram", "promt_lookup_max": 3}, "did you mean prompt_lookup_max"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "would not sample"),
        ({"method": "ngram", "rejection-sample-method": "synthetic"}, "would not sample"),
        ('{"method": "ngram"}', "it is a table of "),
    ],
)
def test_speculation_that_loads_code_or_samples_another_policy_is_refused(speculation: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        a_run(vllm={"speculative_config": speculation})


@pytest.mark.parametrize(
    "args",
    [
        {"spec_method": "custom_class", "spec_model": CLASS},
        {"spec_model": CLASS},
        {"speculative_config": {"num_speculative_tokens": 3}, "spec_model": CLASS},
        {"speculative_config": {"model": CLASS}, "spec_tokens": 3},
        {"structured_outputs_config": {"reasoning_parser_plugin": "/tmp/parser.py"}},
        {"ec_manager_config": {"encoder_cache_manager_cls": CLASS}},
        {"attention_config": {"hisparse_config": {}}},
    ],
)
def test_no_way_around_leads_to_code_of_the_submitters(args: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be set: "):
        a_run(vllm=args)


@pytest.mark.parametrize(
    "args",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "quantization_config": {"ignore": ["lm_head"]}},
        {"max_model_len": 4096, "gpu_memory_utilization": 0.8, "enable_prefix_caching": False, "enforce_eager": True},
        {"structured_outputs_config": {"backend": "guidance", "disable_additional_properties": True}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt-lookup-max": 4}},
        {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": "someone/a-draft.Model", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": "/models/draft", "rejection_sample_method": "block"}},
        {"speculative_config": {"method": "draft_model", "model": "gpt2.small"}},
        {"speculative_config": {"method": "eagle3", "model": "someone/eagle", "revision": "main"}},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        {"speculative_config": None, "spec_method": "mtp", "spec_tokens": 1},
        {"fully_sharded_loras": True, "lora_dtype": "bfloat16"},
    ],
)  # fmt: skip
def test_a_run_may_set_options_that_load_no_code(args: dict[str, Any]) -> None:
    assert a_run(vllm=args).vllm == args


def test_an_engine_argument_that_there_is_not_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match="vLLM has no engine argument max_seqs; did you mean max_num_seqs"):
        a_run(vllm={"max_seqs": 1})
    with pytest.raises(UserError, match=r"vLLM has no engine argument qqq$"):
        a_run(vllm={"qqq": 1})


def test_an_engine_argument_is_of_one_kind() -> None:
    kinds: list[Iterable[str]] = [RUN_ENGINE_ARGS, RESERVED_ENGINE_ARGS, OPERATORS_ENGINE_ARGS]
    names = [name for kind in kinds for name in kind]
    assert len(names) == len(set(names))
    assert TABLES.keys() <= RUN_ENGINE_ARGS


def test_an_engine_that_could_take_no_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="no room for a prompt"):
        a_run(vllm={"max_model_len": 512}, max_completion_length=512)


def test_a_table_that_nests_without_end_is_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(UserError, match="nests deeper"):
        a_run(vllm={"max_num_seqs": deep})
    with pytest.raises(UserError, match="nests deeper"):
        a_run(generation_kwargs={"structured_outputs": {"json": {"deep": deep}}})


def test_trls_names_are_understood() -> None:
    assert a_run(vllm_structured_outputs_regex="[0-9]+").structured_outputs() == {"regex": "[0-9]+"}
    run = a_run(generation_kwargs={"stop": ["</answer>"], "structured_outputs": {"choice": ["yes", "no"]}})
    assert run.structured_outputs() == {"choice": ["yes", "no"]}
    assert run.generation_kwargs is not None
    assert run.generation_kwargs.stop == ["</answer>"]
    assert a_run(generation_kwargs={"stop": "."}).generation_kwargs == GenerationKwargs(stop=".")


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"structured_outputs": {"regx": "a"}}, "unknown constraint regx; choose from regex, json"),
        ({"structured_outputs": {}}, "not none"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "not regex and json"),
        ({"stop": ""}, "before it begins"),
        ({"stop": []}, "before it begins"),
        ({"stop": ["a", ""]}, "before it begins"),
        ({"seed": 1}, "generation_kwargs.seed: there is no such setting; completions are sampled without"),
        ({"min_tokens": 1}, "the end of sequence"),
        ({"temperature": 1.0}, "it is a separate setting"),
        ({"stopp": "a"}, "did you mean stop?"),
    ],
)
def test_options_that_prevent_training_are_refused_with_the_reason(kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        a_run(generation_kwargs=kwargs)


def test_no_hint_is_given_for_an_argument_that_there_is() -> None:
    assert not INSTEAD_IN_GENERATION_KWARGS.keys() & GenerationKwargs.model_fields.keys()


def test_two_structures_are_one_too_many() -> None:
    with pytest.raises(UserError, match="both set; keep one"):
        a_run(vllm_structured_outputs_regex="a", generation_kwargs={"structured_outputs": {"regex": "b"}})


def test_vllm_is_asked_only_about_options_that_headrace_cannot_check() -> None:
    assert not a_run(top_p=0.9, top_k=5).asks_for_more_of_vllm()
    assert a_run(vllm={"max_num_seqs": 8}).asks_for_more_of_vllm()
    assert a_run(vllm_structured_outputs_regex="").asks_for_more_of_vllm()


def test_the_restrictions_of_sampling_are_named() -> None:
    assert a_run(temperature=0.7).restrictions() == []
    run = a_run(top_k=5, vllm_structured_outputs_regex="a", generation_kwargs={"stop": "a", "presence_penalty": 1.0})
    assert run.restrictions() == ["top_k", "structured outputs", "presence_penalty"]


def test_a_config_with_them_all_survives_storage() -> None:
    run = a_run(vllm={"max_num_seqs": 8}, generation_kwargs={"stop": ["a"], "structured_outputs": {"json": {}}})
    assert RunConfig.model_validate(run.model_dump(mode="json")) == run


@pytest.mark.parametrize(
    ("more", "positions"),
    [
        ({}, 32768),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 32768),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 131072),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 65536),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}, 32768),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, 32768),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 32768),
        ({"rope_parameters": {"full": {"rope_type": "linear", "factor": 8.0}, "sliding": {}}}, 262144),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, 32768),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, 32768),
        ({"rope_scaling": "broken"}, 32768),
    ],
)
def test_a_stretched_embedding_multiplies_the_positions_unless_they_are_stated_stretched(
    more: dict[str, Any], positions: int
) -> None:
    table = {"model_type": "qwen2", "max_position_embeddings": 32768, **more}
    assert default_max_model_len(table) == positions
    assert default_max_model_len({"text_config": table, "max_position_embeddings": 7}) == positions


def test_the_original_context_of_a_longrope_is_beside_it_or_in_the_model() -> None:
    longrope = {"rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}
    original = {"original_max_position_embeddings": 64}
    for table in ({"rope_scaling": longrope | original}, {"rope_parameters": longrope, **original}):
        assert longrope_context(table) == 64
        assert longrope_context({"text_config": table}) == 64
    assert longrope_context({"rope_scaling": {"type": "su"} | original}) == 64
    assert longrope_context({"rope_scaling": {"rope_type": "yarn"} | original}) is None
    assert longrope_context({}) is None


@pytest.mark.parametrize("model", [{}, {"max_position_embeddings": "many"}, {"text_config": []}, {"text_config": {}}])
def test_a_config_that_does_not_say_has_no_number(model: dict[str, Any]) -> None:
    assert default_max_model_len(model) is None
