"""Options of ``trl grpo --config`` as a run: the same meaning, or a sentence for each option without one."""

import contextlib
from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import RunConfig, parse_run_config
from shared.run_options.trl.run_config_of_trl import run_config_of
from shared.run_options.trl.trl_defaults import TRL_DEFAULTS

pytestmark = pytest.mark.unit

MINIMAL: dict[str, Any] = {"model_name_or_path": "m", "dataset_name": "org/data", "reward_funcs": ["accuracy_reward"]}


def translated(**options: Any) -> RunConfig:
    return parse_run_config(run_config_of({**MINIMAL, **options})[0])


def notes(**options: Any) -> list[str]:
    return run_config_of({**MINIMAL, **options})[1]


def refused(**options: Any) -> dict[str, str]:
    with pytest.raises(UserError) as caught:
        run_config_of({**MINIMAL, **options})
    return dict(caught.value.problems)


def test_three_options_are_enough_and_the_others_have_trls_defaults() -> None:
    config = translated()
    assert config.model == "m"
    assert config.dtype == "bfloat16"
    assert config.groups_per_step * config.num_generations == 8
    assert config.max_staleness == 2


@pytest.mark.parametrize(
    ("options", "groups", "steps", "staleness"),
    [
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}, 8, 1, 2),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_processes": 4}, 32, 1, 2),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_generations": 4}, 1, 1, 2),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 2, 4, 7),
        ({"gradient_accumulation_steps": 2, "generation_batch_size": 64}, 2, 4, 7),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 2, 1, 2),
        ({"num_iterations": 3}, 1, 1, 5),
        ({"num_iterations": 3, "max_staleness": 4}, 1, 1, 4),
        ({"accelerate_config": "zero3"}, 8, 1, 2),
        ({"accelerate_config": "single_gpu"}, 1, 1, 2),
    ],
)
def test_completions_of_a_step_become_groups(options: dict[str, Any], groups: int, steps: int, staleness: int) -> None:
    config = translated(**options)
    assert (config.groups_per_step, config.steps_per_generation, config.max_staleness) == (groups, steps, staleness)


@pytest.mark.parametrize(
    ("options", "is_noted"),
    [
        ({"steps_per_generation": 1}, True),
        ({"generation_batch_size": 8}, True),
        ({"steps_per_generation": 8}, False),
        ({"steps_per_generation": 1, "loss_type": "grpo"}, False),
        ({"steps_per_generation": 1, "loss_type": "grpo", "scale_rewards": "batch"}, True),
    ],
)
def test_several_generations_in_a_step_are_noted_where_trl_normalises_each(
    options: dict[str, Any], is_noted: bool
) -> None:
    said = notes(per_device_train_batch_size=8, gradient_accumulation_steps=8, **options)
    assert any("normalises each by itself" in note for note in said) is is_noted


def test_data_sets_that_are_not_shuffled_take_turns_which_is_noted() -> None:
    several = {"dataset_name": None, "datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}
    assert [note for note in notes(**several, shuffle_dataset=False) if note.startswith("datasets: they take turns")]
    assert not [note for note in notes(**several) if note.startswith("datasets: they take turns")]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"bf16": True}, "bfloat16"),
        ({"bf16": False}, "float32"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"bf16": False, "dtype": "bfloat16"}, "bfloat16"),
        ({"bf16": False, "model_init_kwargs": {"torch_dtype": "bfloat16"}}, "bfloat16"),
        ({"model_init_kwargs": '{"dtype": "auto", "device_map": "auto"}'}, "bfloat16"),
    ],
)
def test_the_dtype_is_that_of_the_computation(options: dict[str, Any], dtype: str) -> None:
    assert translated(**options).dtype == dtype


def test_reward_functions_are_named_as_here() -> None:
    names = ["accuracy_reward", "my_lib.rewards.brevity", "trl.rewards.think_format_reward", "org/model-0.6B", "a:f"]
    config = translated(reward_funcs=names, reward_model_name_or_path="./judge.v2")
    assert config.reward_funcs == [
        *("./judge.v2", "accuracy_reward", "my_lib.rewards:brevity", "think_format_reward", "org/model-0.6B", "a:f")
    ]
    assert translated(reward_funcs="my_lib.brevity").reward_funcs == ["my_lib:brevity"]


def test_a_mixture_of_data_sets_is_one_here_too() -> None:
    mixture = [
        {"path": "org/a", "name": None, "split": "all", "columns": ["prompt", "solution"], "fraction": 0.25},
        {"path": "json", "data_files": ["b.jsonl"], "fraction": 0.75},
    ]
    config, said = run_config_of({**MINIMAL, "datasets": mixture})
    assert config["datasets"] == [
        {"path": "org/a", "split": "all", "columns": ["prompt", "solution"], "fraction": 0.25},
        {"path": "b.jsonl", "fraction": 0.75},
    ]
    assert "dataset_name: left out; TRL ignores it where datasets is set" in said
    parse_run_config(config)


def test_an_evaluation_needs_a_strategy_as_in_trl() -> None:
    assert translated(eval_steps=5, dataset_test_split="test").eval_source() is None
    assert translated(eval_strategy=False).eval_source() is None, "YAML reads `no` as false"
    config = translated(eval_strategy="steps", logging_steps=20)
    assert config.eval_steps == 20
    assert config.dataset_test_split == "test"
    assert translated(eval_strategy="steps", eval_steps=5, dataset_test_split="val").dataset_test_split == "val"
    assert translated(eval_strategy="epoch", num_train_epochs=4).eval_steps == 0.25
    assert 0.99 < float(translated(eval_strategy="epoch", max_steps=10).eval_steps or 0) < 1, "at the end"


def test_checkpoints_are_written_when_trl_writes_them() -> None:
    assert translated(save_steps=100, save_total_limit=3).save_steps == 100
    assert translated(save_strategy="epoch", num_train_epochs=2).save_steps == 0.5
    assert translated(save_strategy=False, save_steps=7).save_steps == RunConfig.model_fields["save_steps"].default
    assert translated(save_total_limit=None).save_total_limit == 2
    by_best = run_config_of({**MINIMAL, "save_strategy": "best", "save_steps": 7})
    assert "save_steps" not in by_best[0]
    assert any(note.startswith("save_steps: left out; save_strategy is best") for note in by_best[1])


def test_adapters_have_trls_defaults_and_need_use_peft() -> None:
    assert translated(use_peft=True).lora_dropout == 0.05
    assert translated(use_peft=True, lora_target_modules="all-linear").lora_target_modules is None
    assert translated(use_peft=True, lora_target_modules="q_proj").lora_target_modules == ["q_proj"]
    assert "lora_r: left out; use_peft is not set" in notes(lora_r=8)
    assert translated(lora_r=8).use_peft is False


def test_options_of_vllm_go_into_its_table() -> None:
    config = translated(vllm_tensor_parallel_size=2, vllm_max_model_length=4096, vllm={"max_num_seqs": 8})
    assert config.vllm == {"tensor_parallel_size": 2, "max_model_len": 4096, "max_num_seqs": 8}
    assert translated(vllm_enable_sleep_mode=True).vllm_enable_sleep_mode is False


def test_a_run_is_named_as_trl_names_its_repository() -> None:
    config = translated(output_dir="out/my run", report_to=["wandb", "clearml"])
    assert config.name == "my-run"
    assert translated(run_name="a/b", output_dir="out/c").name == "a-b"
    assert translated(output_dir="out/c", push_to_hub=True).hub_model_id == "c"
    assert translated(output_dir="out/c", push_to_hub=True, hub_model_id="me/d").hub_model_id == "me/d"
    assert (config.report_to, config.project, config.logging_steps) == (["wandb"], "huggingface", 10)
    assert translated(report_to="none").report_to == []
    assert translated(report_to="wandb", logging_steps=0.05).in_steps(40).logging_steps == 2


def test_a_long_completion_raises_the_bound_of_a_microbatch() -> None:
    assert translated(max_completion_length=30_000).max_tokens_per_microbatch == 30_000


def test_the_optimizer_is_torchs_of_that_name() -> None:
    assert translated().optim == "adamw_torch_fused"
    config = translated(optim="sgd", adam_beta1=0.5)
    assert (config.optim, config.adam_beta1) == ("sgd", 0.9), "TRL ignores the options of Adam"


def test_arguments_of_an_optimizer_are_kept_where_it_takes_some() -> None:
    assert translated(optim="sgd", optim_args="momentum=0.9").optimizer_arguments() == {"momentum": 0.9}
    assert translated(optim_args="momentum=0.9").optim_args is None, "transformers ignores arguments of AdamW"
    assert "optim_args: left out; optim adamw_torch_fused does not use it" in notes(optim_args="momentum=0.9")
    assert translated(optim="lion_8bit", adam_beta1=0.5, adam_epsilon=1e-6).adam_beta1 == 0.5


def test_a_backend_or_a_mode_turns_compilation_on_as_in_transformers() -> None:
    assert not translated().torch_compile
    config = translated(torch_compile_backend="aot_eager")
    assert (config.torch_compile, config.compile_backend) == (True, "aot_eager")
    assert translated(torch_compile=True).compile_backend == "inductor"
    assert translated(torch_compile_mode="default").torch_compile
    config = translated(torch_compile_mode="reduce-overhead")
    assert (config.torch_compile, config.torch_compile_mode) == (True, None)
    assert any("records CUDA graphs" in note for note in notes(torch_compile_mode="reduce-overhead"))


def test_a_streamed_data_set_stays_one() -> None:
    assert translated(dataset_streaming=True, max_steps=5).dataset_streaming


def test_options_of_older_releases_are_translated() -> None:
    assert translated(warmup_ratio=0.1).warmup_steps == 0.1
    assert translated(torch_dtype="float32", bf16=False).dtype == "float32"


def test_an_option_without_effect_is_left_out_where_a_run_refuses_it() -> None:
    options: dict[str, Any] = {"loss_type": "sapo", "epsilon_high": 0.3, "num_completions_to_print": 3}
    assert translated(**options).epsilon_high is None
    said = notes(**options)
    assert any(note.startswith("epsilon_high: left out, as in TRL it has no effect; loss_type sapo") for note in said)
    assert "num_completions_to_print: left out, as in TRL it has no effect; log_completions is not set" in said


def test_options_without_meaning_are_left_out_with_one_line_for_one_reason() -> None:
    said = notes(vllm_mode="server", vllm_server_host="h", vllm_server_port=1, dataloader_num_workers=2, env={"A": "b"})
    assert "vllm_server_host, vllm_server_port: left out; generators join a run by themselves, through Redis" in said
    assert "dataloader_num_workers: left out; prompts are encoded as they are admitted" in said
    assert "env: left out; set these variables for the services instead" in said
    assert any(note.startswith("vllm_mode: left out; the generator is always vLLM") for note in said)


def test_a_warm_up_that_a_constant_rate_never_makes_is_left_out_as_transformers_does() -> None:
    for warmup in ({"warmup_ratio": 0.1}, {"warmup_steps": 10}):
        assert translated(lr_scheduler_type="constant", **warmup).warmup_steps == 0
        (name,) = warmup
        said = f"{name}: left out; lr_scheduler_type constant does not use it"
        assert said in notes(lr_scheduler_type="constant", **warmup)


def test_defaults_and_what_is_so_anyway_are_not_worth_a_note() -> None:
    silent: dict[str, Any] = {"use_vllm": True, "dataloader_num_workers": 0, "fp16": False, "deepspeed": None}
    assert notes(**silent) == notes()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fp16": True}, "bf16: true"),
        ({"use_dora": True, "use_peft": True}, "vLLM does not serve DoRA; set use_rslora: true"),
        ({"lora_modules_to_save": ["lm_head"], "use_peft": True}, "leave use_peft out to train all weights"),
        ({"optim": "galore_adamw"}, "galore_adamw is not offered; a run has adamw_torch_fused"),
        ({"num_generation": 8}, "did you mean num_generations?"),
        ({"train_dataset": "x"}, "set dataset_name"),
        ({"gpu_memory_utilization": 0.5}, "table vllm"),
        ({"dtype": "float16"}, "float32 or bfloat16"),
        ({"model_init_kwargs": {"rope_scaling": {}}}, "does not pass it"),
        ({"per_device_train_batch_size": 3}, "3 completions, which are not whole groups of num_generations=8"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "make it a multiple"),
        ({"steps_per_generation": 1, "generation_batch_size": 8}, "give only one"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2},
            "make it at least as many",
        ),
        ({"per_device_train_batch_size": "8"}, "must be a whole number"),
        ({"accelerate_config": "mine.yaml"}, "set num_processes"),
    ],
)
def test_an_option_that_would_change_what_is_learned_is_refused(options: dict[str, Any], sentence: str) -> None:
    assert any(sentence in told for told in refused(**options).values())


def test_every_problem_is_reported_at_once() -> None:
    assert refused(fp16=True, neftune_noise_alpha=5.0).keys() == {"fp16", "neftune_noise_alpha"}


@pytest.mark.parametrize("value", [7, -1, 2.5, "x", "", [1], {"a": 1}, True, None, "{", 10**30, float("nan")])
def test_a_value_of_a_wrong_kind_is_refused_here_or_by_the_run(value: Any) -> None:
    together = {"eval_strategy": "epoch", "save_strategy": "epoch", "use_peft": True, "push_to_hub": True}
    for name in (*TRL_DEFAULTS, "num_processes", "accelerate_config", "env", "warmup_ratio", "torch_dtype"):
        for others in ({}, together):
            with contextlib.suppress(UserError):
                parse_run_config(run_config_of({**MINIMAL, **others, name: value})[0])
