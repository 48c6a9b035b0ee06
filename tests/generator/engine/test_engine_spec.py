"""The arguments that an engine is started with."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from services.generator.engine.adapter import AdapterSpec
from services.generator.engine.engine_spec import check_engine_args, refuse_auto_map, spec_for
from services.generator.engine.vllm_environment import set_environment
from services.generator.settings import GeneratorSettings, read_settings
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


def a_config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "/models/tiny", "dataset_name": "/x.jsonl", "reward_funcs": ["accuracy_reward"]} | changes
    )


def test_runs_that_differ_only_in_training_share_an_engine() -> None:
    assert spec_for(a_config(learning_rate=0.1), has_cuda=False) == spec_for(a_config(), has_cuda=False)


@pytest.mark.parametrize(
    "changes",
    [{"model": "/models/other"}, {"model_revision": "main"}, {"dtype": "bfloat16"},
     {"max_prompt_length": 8, "max_completion_length": 8}],
)  # fmt: skip
def test_another_model_precision_or_length_needs_another_engine(changes: dict[str, Any]) -> None:
    assert spec_for(a_config(**changes), has_cuda=False) != spec_for(a_config(), has_cuda=False)


@pytest.mark.parametrize(
    ("changed", "by_all_weights", "by_adapters"),
    [("config.json", True, True), ("tokenizer.json", True, True), ("chat_template.jinja", True, True),
     ("model-00001-of-00002.safetensors", False, True), ("README.md", False, False)],
)  # fmt: skip
def test_a_changed_model_directory_needs_another_engine_unless_all_that_changed_is_pushed(
    changed: str, by_all_weights: bool, by_adapters: bool, tmp_path: Path
) -> None:
    configs = [a_config(model=str(tmp_path)), a_config(model=str(tmp_path), use_peft=True)]
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    before = [spec_for(config, has_cuda=False) for config in configs]
    assert [spec_for(config, has_cuda=False) for config in configs] == before
    (tmp_path / changed).write_text('{"eos_token_id": 7}')
    is_another = [spec_for(config, has_cuda=False) != spec for config, spec in zip(configs, before, strict=True)]
    assert is_another == [by_all_weights, by_adapters]


@pytest.mark.parametrize("of_replica", [{}, {"pipeline_parallel_size": 2}], ids=["the run's", "the replica's"])
def test_adapters_in_a_pipeline_are_refused_before_the_engine_starts(of_replica: dict[str, Any]) -> None:
    of_run = {} if of_replica else {"vllm": {"pipeline_parallel_size": 2}}
    spec = spec_for(a_config(use_peft=True, **of_run), has_cuda=False)
    with pytest.raises(UserError, match="adapters cannot be pushed to an engine with pipeline_parallel_size=2"):
        spec.engine_args(of_replica, has_cuda=False)
    assert spec_for(a_config(**of_run), has_cuda=False).engine_args(of_replica, has_cuda=False)
    assert spec.engine_args({"pipeline_parallel_size": 1}, has_cuda=False)


def test_the_longest_rollout_decides_the_models_length() -> None:
    limited = spec_for(a_config(max_prompt_length=100, max_completion_length=28), has_cuda=False)
    assert limited.engine_args({}, has_cuda=False)["max_model_len"] == 128
    for unlimited in (
        a_config(),
        a_config(max_prompt_length=100, max_completion_length=28, tools=["my_tools:look_up"]),
    ):
        # A first turn has the tools' schemas, too, which admission does not count.
        assert spec_for(unlimited, has_cuda=False).engine_args({}, has_cuda=False)["max_model_len"] == -1


def test_a_gpu_gets_compilation_and_a_cpu_does_not() -> None:
    on_gpu = spec_for(a_config(), has_cuda=True).engine_args({}, has_cuda=True)
    on_cpu = spec_for(a_config(), has_cuda=False).engine_args({}, has_cuda=False)
    assert (on_gpu["enforce_eager"], on_cpu["enforce_eager"]) == (False, True)


def test_no_two_replicas_sample_with_one_seed() -> None:
    assert len({spec_for(a_config(), has_cuda=False).engine_args({}, has_cuda=False)["seed"] for _ in range(8)}) > 1


SLEEPING: dict[str, Any] = {"vllm_enable_sleep_mode": True, "max_staleness": 0, "push_staging": "none"}


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_options_that_need_a_gpu_are_refused_without_one_before_anything_starts(transport: str) -> None:
    with pytest.raises(UserError, match="use auto, gloo or disk"):
        spec_for(a_config(weight_transport=transport), has_cuda=False)
    with pytest.raises(UserError, match="releases GPU memory, but this generator runs on CPU"):
        spec_for(a_config(**SLEEPING), has_cuda=False)


def test_an_engine_that_sleeps_is_another_one() -> None:
    sleeping = spec_for(a_config(**SLEEPING), has_cuda=True)
    assert sleeping.engine_args({}, has_cuda=True)["enable_sleep_mode"] is True
    awake = spec_for(a_config(), has_cuda=True)
    assert "enable_sleep_mode" not in awake.engine_args({}, has_cuda=True)
    assert sleeping != awake


@pytest.mark.parametrize("is_runs", [True, False])
def test_a_draft_model_outlives_sleep_because_no_push_brings_it(is_runs: bool) -> None:
    """In vLLM, a draft's parameters are `draft.*`, and exactly this pattern may match nothing."""
    kept = {"sleep_preserve_parameter_names": ["*.table"]}
    spec = spec_for(a_config(**SLEEPING, **({"vllm": kept} if is_runs else {})), has_cuda=True)
    args = spec.engine_args({} if is_runs else kept, has_cuda=True)
    assert args["sleep_preserve_parameter_names"] == ["*.table", "draft.*"]
    without = spec_for(a_config(**SLEEPING), has_cuda=True).engine_args({}, has_cuda=True)
    assert without["sleep_preserve_parameter_names"] == ["draft.*"]
    awake = spec_for(a_config(), has_cuda=True).engine_args({}, has_cuda=True)
    assert "sleep_preserve_parameter_names" not in awake


def test_a_lora_run_has_an_engine_that_serves_one_adapter_of_its_rank() -> None:
    spec = spec_for(a_config(use_peft=True, lora_r=20), has_cuda=False)
    args = spec.engine_args({}, has_cuda=False)
    assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, 32)
    assert "enable_lora" not in spec_for(a_config(), has_cuda=False).engine_args({}, has_cuda=False)


@pytest.mark.parametrize(
    "changes", [{"lora_r": 8}, {"lora_alpha": 64}, {"lora_target_modules": ["q_proj"]}, {"use_rslora": True}]
)
def test_another_kind_of_adapter_needs_another_engine(changes: dict[str, Any]) -> None:
    lora = spec_for(a_config(use_peft=True), has_cuda=False)
    assert spec_for(a_config(use_peft=True, **changes), has_cuda=False) != lora
    assert spec_for(a_config(), has_cuda=False) != lora
    assert spec_for(a_config(use_peft=True, lora_dropout=0.1), has_cuda=False) == lora


def test_adapters_on_a_gpu_are_served_only_in_bfloat16() -> None:
    with pytest.raises(UserError, match="set dtype: bfloat16"):
        spec_for(a_config(use_peft=True), has_cuda=True)
    assert spec_for(a_config(use_peft=True, dtype="bfloat16"), has_cuda=True).adapter is not None


def test_a_base_in_4_bits_is_refused_on_cpu_and_without_the_package() -> None:
    config = a_config(use_peft=True, load_in_4bit=True, dtype="bfloat16")
    with pytest.raises(UserError, match="needs a GPU, but this generator runs on CPU"):
        spec_for(config, has_cuda=False)
    if importlib.util.find_spec("vllm_bnb_plugin") is None:
        with pytest.raises(UserError, match="needs the package vllm-bnb-plugin"):
            spec_for(config, has_cuda=True)
    spec = AdapterSpec.of(config)
    assert spec is not None
    assert spec.engine_args()["quantization"] == "bitsandbytes"


def test_engine_arguments_of_the_operator_win_over_the_runs_and_the_runs_win_over_ours() -> None:
    spec = spec_for(a_config(vllm={"max_num_seqs": 16, "block_size": 32, "enforce_eager": False}), has_cuda=False)
    args = spec.engine_args({"max_num_seqs": 8}, has_cuda=False)
    assert (args["max_num_seqs"], args["block_size"], args["enforce_eager"]) == (8, 32, False)
    assert spec.overruled({"max_num_seqs": 8, "block_size": 32, "seed": 1}) == ["max_num_seqs"]


def test_speculation_on_a_cpu_is_refused_for_what_it_would_sample() -> None:
    speculation = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    for spec, of_replica in ((spec_for(a_config(vllm=speculation), has_cuda=False), {}),
                             (spec_for(a_config(), has_cuda=False), speculation)):  # fmt: skip
        with pytest.raises(UserError, match="needs a GPU"):
            spec.engine_args(of_replica, has_cuda=False)
        assert spec.engine_args(of_replica, has_cuda=True)["speculative_config"] == speculation["speculative_config"]


def test_another_engine_argument_needs_another_engine() -> None:
    assert spec_for(a_config(vllm={"max_num_seqs": 8}), has_cuda=False) != spec_for(a_config(), has_cuda=False)
    assert spec_for(a_config(generation_kwargs={"stop": "a"}), has_cuda=False) == spec_for(a_config(), has_cuda=False)


@pytest.mark.parametrize("name", ["trust_remote_code", "logprobs_mode", "model", "dtype", "enable_lora"])
def test_options_that_falsify_rollouts_or_run_foreign_code_cannot_be_set(name: str) -> None:
    with pytest.raises(UserError, match=name):
        check_engine_args({"HEADRACE_ENGINE_ARGS": {name: True}}, {name})


def test_an_unknown_engine_argument_is_named() -> None:
    with pytest.raises(UserError, match="no engine argument max_seqs; did you mean max_num_seqs"):
        check_engine_args(
            {"HEADRACE_ENGINE_ARGS": {}, "HEADRACE_DEFAULT_ENGINE_ARGS": {"max_seqs": 1}}, {"max_num_seqs"}
        )
    with pytest.raises(UserError, match="use names of AsyncEngineArgs"):
        check_engine_args({"HEADRACE_ENGINE_ARGS": {"qqq": 1}}, {"max_num_seqs"})


def test_auto_map_is_found_at_any_depth() -> None:
    refuse_auto_map({"text_config": {"layers": [{"map": {}}]}}, where="config.json")
    with pytest.raises(UserError, match=r"config\.json has auto_map"):
        refuse_auto_map({"text_config": {"layers": [{"auto_map": {}}]}}, where="config.json")


def test_vllm_cannot_be_talked_into_its_development_mode() -> None:
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "k", "VLLM_CPU_KVCACHE_SPACE": "7"}
    set_environment(environment, is_cpu=True, log_level="info")
    assert environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert "VLLM_API_KEY" not in environment
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"


def test_an_engines_own_groups_listen_on_loopback() -> None:
    environment: dict[str, str] = {}
    set_environment(environment, is_cpu=False, log_level="INFO")
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_vllm_and_cuda_count_gpus_in_the_same_order_unless_the_operator_chose_another() -> None:
    environment: dict[str, str] = {}
    set_environment(environment, is_cpu=False, log_level="INFO")
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    chosen = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    set_environment(chosen, is_cpu=False, log_level="INFO")
    assert chosen["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_only_a_cpu_gets_the_cpus_settings() -> None:
    environment: dict[str, str] = {}
    set_environment(environment, is_cpu=False, log_level="INFO")
    assert "TORCHDYNAMO_DISABLE" not in environment


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE_ARGS", '{"max_num_seqs": 8}')
    monkeypatch.setenv("HEADRACE_REPLICA_ID", "generator-7")
    settings = read_settings()
    assert settings.engine_args == {"max_num_seqs": 8}
    assert settings.name == "generator-7"
    assert GeneratorSettings(replica_id="").name


def test_default_engine_arguments_count_where_neither_run_nor_replica_sets_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_DEFAULT_ENGINE_ARGS", '{"gpu_memory_utilization": 0.4}')
    for of_run, of_replica, expected in (({}, {}, 0.4), ({"gpu_memory_utilization": 0.7}, {}, 0.7),
                                         ({}, {"gpu_memory_utilization": 0.8}, 0.8)):  # fmt: skip
        monkeypatch.setenv("HEADRACE_ENGINE_ARGS", json.dumps(of_replica))
        spec = spec_for(a_config(vllm=of_run), has_cuda=True)
        args = spec.engine_args(read_settings().args_beside(spec.of_run), has_cuda=True)
        assert args["gpu_memory_utilization"] == expected


@pytest.mark.parametrize("value", ["{max_num_seqs: 8}", "[1]"])
def test_engine_arguments_that_are_not_a_json_object_are_refused_with_an_explanation(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE_ARGS", value)
    with pytest.raises(UserError, match=r'HEADRACE_ENGINE_ARGS: .*\{"max_num_seqs": 64\}'):
        read_settings()
