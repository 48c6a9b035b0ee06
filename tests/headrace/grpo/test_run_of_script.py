"""The settings of a run mean what the arguments of a script's trainer mean in TRL."""

import functools
import itertools
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.grpo.input_delivery import SharedFiles, Uploads
from headrace.grpo.live_model import LiveModel
from headrace.grpo.reward_settings import reward_settings
from headrace.grpo.run_inputs import RunInputs
from headrace.grpo.run_of_script import evaluation_settings, training_settings
from headrace.grpo.script import Files, Script
from services.trainer.beginning.fit import beginning_of
from services.trainer.beginning.source import find_source
from services.trainer.telemetry.step_metrics import metric_names
from shared.files.file_roots import FileRoots
from shared.run_options.grpo_config import GRPOConfig
from shared.run_options.run_config import parse_run_config
from tests.closed_directory import close_directory
from tests.trainer.beginning.made_checkpoints import make_adapter, make_model

pytestmark = pytest.mark.unit

ROWS = [{"prompt": "2 + 2 ="}, {"prompt": "3 + 3 ="}]


@dataclass
class LoraConfig:
    """PEFT's options and defaults, as far as the tests need them."""

    task_type: str | None = None
    r: int = 8
    target_modules: list[str] | None = None
    exclude_modules: list[str] | None = None
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict[str, int])


def make_script(*, peft_config: Any = None, **options: Any) -> Script:
    model = LiveModel("org/model", None, peft_config=peft_config, init_kwargs={})
    return Script(model, ["length"], GRPOConfig(**options), ROWS, ROWS[:1], reward_processing_classes=[None])


@pytest.fixture
def files(tmp_path: Path) -> Files:
    inputs = RunInputs(tmp_path / "inputs", SharedFiles(tmp_path / "functions"))
    return Files(lambda: inputs)


def test_an_adapter_has_the_options_of_its_config_and_pefts_defaults(files: Files) -> None:
    config = LoraConfig(r=4, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    settings, _ = training_settings(make_script(peft_config=config), files)
    assert {name: value for name, value in settings.items() if "lora" in name} == {
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def test_paths_that_only_the_services_may_read_are_passed_on_as_they_are(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Path("/closed")
    close_directory(monkeypatch, closed)
    model = LiveModel(f"{closed}/model", None, peft_config=None, init_kwargs={})
    script = replace(
        make_script(), model=model, train_dataset=f"{closed}/rows.jsonl", reward_funcs=[f"{closed}/reward"]
    )
    settings, _ = training_settings(script, files)
    assert [settings[name] for name in ("model", "dataset_name", "reward_funcs")] == [
        "/closed/model",
        "/closed/rows.jsonl",
        ["/closed/reward"],
    ]


def after_training(script: Script, directory: Path) -> Script:
    script.model.take(directory, checkpoint="run-0")
    return script


def test_the_trained_adapter_is_evaluated_and_trained_further_on_its_base(files: Files, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    adapter = make_adapter(tmp_path / "adapter", r=4, lora_alpha=8, target_modules=["q_proj"])
    script = after_training(make_script(peft_config=config, max_steps=4), adapter)
    run = parse_run_config(evaluation_settings(script, files, data=ROWS)[0])
    assert (run.model, run.use_peft, run.lora_r) == ("org/model", True, 4)
    found = find_source(str(run.resume_from_checkpoint), runs=[], roots=FileRoots((str(tmp_path),), "ROOTS"))
    beginning, notes = beginning_of(run, found)
    assert (beginning.source, beginning.directory, beginning.weights_only) == ("adapter", str(adapter), True)
    assert notes == []
    run = parse_run_config(training_settings(script, files)[0])
    assert (run.model, run.resume_from_checkpoint, run.resume_only_model) == ("org/model", "run-0", True)


def test_a_second_training_begins_with_the_checkpoint_of_the_first(files: Files, tmp_path: Path) -> None:
    """The model of a run is in the run's dtype, and a checkpoint in float32."""
    script = after_training(make_script(beta=0.1), make_model(tmp_path / "trained"))
    settings, _ = training_settings(script, files)
    assert settings["model"] == "org/model", "it is the reference of the KL term, as in TRL"
    assert (settings["resume_from_checkpoint"], settings["resume_only_model"]) == ("run-0", True)


def test_an_adapter_that_is_not_trained_yet_is_evaluated_with_its_base(files: Files) -> None:
    settings, _ = evaluation_settings(make_script(peft_config=LoraConfig(r=4)), files, data=ROWS)
    assert (settings["model"], settings["use_peft"]) == ("org/model", True)
    assert "resume_from_checkpoint" not in settings


def test_a_run_that_is_continued_has_its_model_and_not_the_trained_one(files: Files, tmp_path: Path) -> None:
    trained = make_model(tmp_path / "trained")
    script = after_training(make_script(beta=0.1), trained)
    assert training_settings(script, files, source="run-a:4")[0]["model"] == "org/model"
    continued, _ = training_settings(script, files, source="run-a", model="/runs/run-0/model")
    assert (continued["model"], continued["resume_from_checkpoint"]) == ("/runs/run-0/model", "run-a")
    beginning = {"resume_from_checkpoint": "run-a", "resume_only_model": True}
    fork = after_training(make_script(run_options=beginning), trained)
    assert training_settings(fork, files)[0]["model"] == "org/model"
    evaluated, _ = evaluation_settings(fork, files, data=ROWS)
    assert evaluated["model"] == str(trained)
    assert not evaluated.keys() & beginning.keys()


@pytest.mark.parametrize("options", [{"bias": "all"}, {"rank_pattern": {"q_proj": 4}}, {"exclude_modules": ["k_proj"]}])
def test_an_option_of_an_adapter_that_a_run_does_not_have_is_refused(files: Files, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"peft_config has {next(iter(options))}, which a run does not have"):
        training_settings(make_script(peft_config=LoraConfig(**options)), files)


def test_an_option_that_a_run_cannot_have_is_a_value_error_as_in_trl(files: Files) -> None:
    script = make_script(fp16=True)
    for settings_of in (training_settings, functools.partial(evaluation_settings, data=ROWS)):
        with pytest.raises(ValueError, match=r"fp16: a run has bfloat16"):
            settings_of(script, files)


def test_options_that_follow_from_others_are_left_to_the_run(files: Files) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "logging_steps": 4, "load_best_model_at_end": True}
    script = make_script(max_steps=8, **options)
    for args in (script.args, replace(script.args, run_options={})):
        settings, notes = training_settings(replace(script, args=args), files)
        assert settings["eval_steps"] == 4
        assert parse_run_config(settings).best_metric_name == "eval_reward"
        assert any(note.startswith("metric_for_best_model: eval_reward") for note in notes)
        assert not any(note.startswith("do_eval") for note in notes)


def even(number: int) -> bool:
    """Return whether a number is even.

    Args:
        number: The number.
    """
    return number % 2 == 0


class Even:
    """An environment."""

    def reset(self, **row: Any) -> str:
        return str(row)


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ({"tools": [even]}, {}),
        ({"environment_factory": {"even": Even}}, {}),
        ({}, {"agent": "my_agent:run"}),
        ({}, {"environment_factory": {"even": "my_environments:Even"}}),
    ],
)
def test_an_evaluation_of_an_agent_has_unused_rows_of_the_same_kind(
    files: Files, agent: dict[str, Any], options: dict[str, Any]
) -> None:
    script = replace(make_script(run_options={"prompt_column": "task", **options}), **agent)
    settings, _ = evaluation_settings(script, files, data=[{"task": [{"role": "user", "content": "2?"}]}])
    (row,) = [json.loads(line) for line in Path(settings["dataset_name"]).read_text().splitlines()]
    assert row.pop("task")[0]["role"] == "user"
    assert row == ({"environment": "even"} if "environment_factory" in agent | options else {})


def test_an_evaluation_pushes_nothing_and_has_no_tracker(files: Files) -> None:
    script = make_script(push_to_hub=True, output_dir="out", report_to="wandb", run_options={"hub_model_id": "org/out"})
    settings, _ = evaluation_settings(script, files, data=ROWS)
    assert not any(settings.get(name) for name in ("push_to_hub", "hub_model_id", "report_to", "project"))


class Penalty:
    """Stands for what ``trl.rewards.get_repetition_penalty_reward`` returns."""

    __name__ = "repetition_penalty_reward"
    __module__ = "trl.rewards.other_rewards"

    def __init__(self) -> None:
        self.ngram_size, self.max_penalty = 5, -0.2


class Punishment:
    """Stands for what ``trl.rewards.get_soft_overlong_punishment`` returns."""

    __name__ = "soft_overlong_punishment_reward"
    __module__ = "trl.rewards.other_rewards"

    def __init__(self, most: int) -> None:
        self.max_completion_len, self.soft_punish_cache = most, 256


def test_rewards_that_trls_factories_make_keep_their_arguments(files: Files) -> None:
    script = replace(
        make_script(max_completion_length=1280),
        reward_funcs=[Penalty(), Punishment(1280)],
        reward_processing_classes=[None, None],
    )
    for settings, _ in (training_settings(script, files), evaluation_settings(script, files, data=ROWS)):
        assert settings["reward_kwargs"] == {
            "repetition_penalty_reward": {"ngram_size": 5, "max_penalty": -0.2},
            "soft_overlong_punishment_reward": {"soft_punish_cache": 256},
        }
    script = replace(script, reward_funcs=[Punishment(1000)], reward_processing_classes=[None])
    with pytest.raises(ValueError, match=r"counts from 1000 tokens, .* max_completion_length, which is 1280"):
        training_settings(script, files)


def test_two_rewards_of_one_factory_are_two_functions(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    written: list[Any] = []

    def write(function: Any, *, otherwise: str) -> str:
        written.append(function)
        return f"uploaded:{otherwise}"

    monkeypatch.setattr(files, "function", write)
    first, second, third = Penalty(), Penalty(), Penalty()
    second.ngram_size = 20
    script = replace(make_script(), reward_funcs=[first, second, third], reward_processing_classes=[None] * 3)
    settings = reward_settings(script, files)
    assert settings["reward_funcs"] == ["repetition_penalty_reward", "uploaded:reward_1", "repetition_penalty_reward"]
    assert settings["reward_kwargs"] == {"repetition_penalty_reward": {"ngram_size": 5, "max_penalty": -0.2}}
    assert written == [second]


def test_a_function_whose_source_is_unknown_is_refused_with_the_reason(files: Files) -> None:
    namespace: dict[str, Any] = {}
    exec("def nowhere(completions, **_):\n    return [0.0]", namespace)
    script = replace(make_script(), reward_funcs=[namespace["nowhere"]], reward_processing_classes=[None])
    with pytest.raises(ValueError, match="the source of nowhere is not available"):
        reward_settings(script, files)


def test_tables_of_run_options_are_put_together_with_those_of_trls_options(files: Files) -> None:
    tables = {"vllm": {"max_num_seqs": 64}, "reward_kwargs": {"numeric_match_reward": {"tolerance": 0.01}}}
    script = make_script(vllm_tensor_parallel_size=2, run_options=tables)
    script = replace(script, reward_funcs=[Penalty(), "numeric_match_reward"], reward_processing_classes=[None, None])
    for settings, _ in (training_settings(script, files), evaluation_settings(script, files, data=ROWS)):
        assert settings["vllm"] == {"tensor_parallel_size": 2, "max_num_seqs": 64}
        assert settings["reward_kwargs"] == {
            "repetition_penalty_reward": {"ngram_size": 5, "max_penalty": -0.2},
            "numeric_match_reward": {"tolerance": 0.01},
        }


def test_a_function_around_one_of_trls_is_not_the_built_in_one(files: Files) -> None:
    def accuracy_reward(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    accuracy_reward.__module__ = "trl.rewards.accuracy_rewards"

    @functools.wraps(accuracy_reward)
    def half(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.5 * reward for reward in accuracy_reward(completions, **kwargs)]

    settings, _ = training_settings(replace(make_script(), reward_funcs=[half]), files)
    assert settings["reward_funcs"][0].endswith(":accuracy_reward_half")


def test_a_default_of_trl_that_the_script_gives_counts(files: Files) -> None:
    chosen = {"save_steps": 500, "gradient_checkpointing": True, "max_staleness": 2}
    settings, _ = training_settings(make_script(**chosen, num_iterations=2), files)
    assert {name: settings[name] for name in chosen} == chosen
    again = GRPOConfig(**vars(make_script(**chosen).args))
    assert again.save_steps == 500
    every = {option.name: getattr(GRPOConfig(), option.name) for option in fields(GRPOConfig)}
    settings, _ = training_settings(make_script(**every), files)
    assert "save_steps" not in settings, "a parser of a command line gives every option"


@dataclass
class ScriptConfig(GRPOConfig):
    """Options of the run, and one that only the script reads."""

    num_shots: int = 0


def test_an_option_that_only_the_script_reads_is_not_a_setting(files: Files) -> None:
    args = ScriptConfig(max_steps=5, num_shots=3)
    for settings, _ in (
        training_settings(replace(make_script(), args=args), files),
        evaluation_settings(replace(make_script(), args=args), files, data=ROWS),
    ):
        assert "num_shots" not in settings
    assert training_settings(replace(make_script(), args=args), files)[0]["max_steps"] == 5


def test_the_project_is_the_trackers_variable(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "math")
    assert training_settings(make_script(report_to="wandb"), files)[0]["project"] == "math"
    assert training_settings(make_script(report_to="wandb", project="mine"), files)[0]["project"] == "mine"
    assert training_settings(make_script(report_to="mlflow"), files)[0]["project"] == "huggingface"


def test_epochs_of_a_run_whose_length_is_max_steps(files: Files) -> None:
    settings, notes = training_settings(make_script(max_steps=5, save_strategy="epoch", eval_strategy="epoch"), files)
    assert "save_steps" not in settings
    assert 0.99 < settings["eval_steps"] < 1
    assert any(note.startswith("eval_strategy: one evaluation, at the end of the run") for note in notes)


def test_another_quantization_than_the_runs_is_named(files: Files) -> None:
    bits = SimpleNamespace(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False)
    _, notes = training_settings(replace(make_script(peft_config=LoraConfig()), quantization_config=bits), files)
    assert "quantization_config: 4 bits are nf4 with double quantization (given: fp4 without)" in notes


def test_an_evaluation_at_the_start_needs_no_strategy(files: Files) -> None:
    script = make_script(eval_on_start=True, num_generations_eval=4, eval_steps=5)
    settings, _ = training_settings(script, files)
    assert num_rows(settings.pop("eval_dataset_name")) == 1
    assert {name: value for name, value in settings.items() if "eval" in name} == {
        "eval_on_start": True,
        "num_generations_eval": 4,
    }


def test_without_evaluations_no_option_of_them_is_left(files: Files) -> None:
    settings, notes = training_settings(make_script(num_generations_eval=4, eval_steps=5), files)
    assert not [name for name in settings if "eval" in name]
    assert "num_generations_eval: left out; nothing is evaluated without eval_strategy" in notes


def test_evaluations_on_their_own_have_the_samples_and_the_rows_that_were_chosen(files: Files) -> None:
    script = make_script(num_generations_eval=4, eval_strategy="steps", run_options={"max_eval_prompts": 300})
    endless = ({"prompt": str(number)} for number in itertools.count())
    settings, notes = evaluation_settings(script, files, data=endless)
    assert notes == []
    assert (settings["num_generations_eval"], settings["max_steps"]) == (4, 0)
    assert num_rows(settings["eval_dataset_name"]) == 300


def test_a_continued_run_on_rows_without_a_length_says_with_which_row_it_begins(files: Files) -> None:
    endless = ({"prompt": str(number)} for number in itertools.count())
    script = replace(make_script(max_steps=4), train_dataset=endless)
    anew, continued = (training_settings(script, files, source=source)[1] for source in (None, "run-a"))
    (note,) = set(continued) - set(anew)
    assert "begins with the first row again" in note
    skipping = replace(make_script(max_steps=4, ignore_data_skip=True), train_dataset=endless)
    for unaffected in (skipping, make_script(max_steps=4)):
        assert note not in training_settings(unaffected, files, source="run-a")[1]


def test_what_changed_between_two_evaluations_is_written_anew(files: Files) -> None:
    rows, threshold = [{"prompt": "a"}], [1]

    def short(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) < threshold[0]) for completion in completions]

    script = replace(make_script(), reward_funcs=[short])
    first, again = (evaluation_settings(script, files, data=rows)[0] for _ in range(2))
    rows.append({"prompt": "b"})
    threshold[0] = 2
    changed, _ = evaluation_settings(script, files, data=rows)
    assert (first["eval_dataset_name"], first["reward_funcs"]) == (again["eval_dataset_name"], again["reward_funcs"])
    assert num_rows(changed["eval_dataset_name"]) == 2
    assert changed["reward_funcs"] != first["reward_funcs"]


class Elsewhere:
    """Names what it is sent after its content."""

    def upload(self, path: Path) -> str:
        return f"/uploads/{'+'.join(file.read_text() for file in ([path] if path.is_file() else path.iterdir()))}"

    def upload_module(self, name: str, source: str) -> str:
        raise AssertionError(f"{name} is not given: {source}")


def test_a_file_that_changed_between_two_trainings_is_sent_anew(tmp_path: Path) -> None:
    inputs = RunInputs(tmp_path / "inputs", Uploads(Elsewhere()))
    rows, judge = tmp_path / "rows.jsonl", tmp_path / "judge"
    judge.mkdir()
    script = replace(make_script(), train_dataset=str(rows), reward_funcs=[str(judge)])
    files = Files(lambda: inputs)
    for content in ("first", "second"):
        rows.write_text(content)
        (judge / "config.json").write_text(f"{content} judge")
        settings, _ = training_settings(script, files)
        found = (settings["dataset_name"], settings["reward_funcs"])
        assert found == (f"/uploads/{content}", [f"/uploads/{content} judge"])


def test_rows_that_can_be_read_once_are_written_once(files: Files) -> None:
    data = iter([{"prompt": "a"}, {"prompt": "b"}])
    first, again = (evaluation_settings(make_script(), files, data=data)[0] for _ in range(2))
    assert first["eval_dataset_name"] == again["eval_dataset_name"]


def test_an_evaluation_on_a_part_of_the_rows_says_so(files: Files) -> None:
    rows = [{"prompt": str(number)} for number in range(257)]
    _, (note,) = evaluation_settings(make_script(), files, data=rows)
    assert note.startswith("max_eval_prompts: the first 256 of 257 rows are evaluated on; run_options=")
    assert evaluation_settings(make_script(), files, data=rows[:256])[1] == []


def notes_of(files: Files, **options: Any) -> str:
    return "\n".join(training_settings(make_script(**options), files)[1])


def test_notes_are_about_what_the_script_chose(files: Files) -> None:
    notes = notes_of(files, eval_strategy="steps", eval_steps=5)
    assert "max_eval_prompts" not in notes  # there is one row
    assert "num_processes" not in notes
    rows = [{"prompt": str(number)} for number in range(257)]
    script = replace(make_script(eval_strategy="steps", eval_steps=5), eval_dataset=rows)
    assert "max_eval_prompts: the first 256 of 257 rows" in "\n".join(training_settings(script, files)[1])
    every = "checkpoints are written every 10 optimizer steps"
    assert f"save_steps, save_total_limit: {every}, and the newest 2 are kept (TRL: 500 and all)" in notes
    assert f"save_strategy: {every}, and the newest 2 are kept (TRL: none)" in notes_of(files, save_strategy="no")
    for chosen in ({"save_steps": 2}, {"run_options": {"save_steps": 2}}):
        notes = notes_of(files, **chosen)
        assert "save_total_limit: the newest 2 checkpoints are kept (TRL: all)" in notes
        assert "save_steps" not in notes
    assert f"save_steps: {every} (TRL: 500), as" in notes_of(files, save_total_limit=1)
    assert "save_" not in notes_of(files, save_steps=2, save_total_limit=1)
    says = "per_device_eval_batch_size: left out; generators batch the prompts of an evaluation themselves"
    assert says in notes_of(files, per_device_eval_batch_size=4)


def test_the_interval_of_the_scripts_own_log_is_not_a_setting_of_its_run(files: Files) -> None:
    assert "logging_steps" not in training_settings(make_script(logging_steps=5), files)[0]
    for reader in ({"report_to": ["tensorboard"]}, {"log_completions": True}):
        assert training_settings(make_script(logging_steps=5, **reader), files)[0]["logging_steps"] == 5


def test_as_many_rows_are_taken_of_an_endless_data_set_as_the_steps_need(files: Files) -> None:
    script = make_script(max_steps=3, per_device_train_batch_size=16)
    for run_options, needed in (({}, 6), ({"groups_per_step": 5}, 15)):
        endless = ({"prompt": str(number)} for number in itertools.count())
        args = replace(script.args, run_options=run_options)
        settings, _ = training_settings(replace(script, args=args, train_dataset=endless), files)
        assert num_rows(settings["dataset_name"]) == needed


class Saved:
    """Stands for a model, or a tokenizer."""

    config = SimpleNamespace(_name_or_path="org/judge")

    def save_pretrained(self, directory: Path, **_: Any) -> None:
        directory.mkdir(exist_ok=True)


def test_a_reward_model_is_called_in_metrics_as_in_trl(files: Files) -> None:
    script = replace(make_script(), reward_funcs=[Saved()], reward_processing_classes=[Saved()])
    (name,) = training_settings(script, files)[0]["reward_funcs"]
    assert metric_names([name]) == {name: "judge"}


def num_rows(file: str) -> int:
    return len(Path(file).read_text(encoding="utf-8").splitlines())
