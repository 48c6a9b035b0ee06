"""A script finds what it reads from TRL's trainer, or a sentence that says where it is."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.grpo.grpo_trainer import GRPOTrainer
from headrace.grpo.script_run import ScriptRun
from headrace.grpo.trainer_attributes import ScriptProcess, all_tools, missing, reward_func_names, reward_weights
from shared.run_options.grpo_config import GRPOConfig

pytestmark = pytest.mark.unit


class Scored:
    def reset(self, **row: Any) -> None:
        """Begin."""

    def act(self, x: int) -> int:
        """Act."""
        return x

    def get_reward(self) -> float:
        """Return the reward."""
        return 1.0

    def _private(self) -> None:
        """No tool."""


class Plain:
    def reset(self, **row: Any) -> None:
        """Begin."""

    def play(self) -> int:
        """Play."""
        return 0


def brevity(**columns: Any) -> list[float]:
    return []


def names(tools: list[Any]) -> list[str]:
    return [tool.__name__ for tool in tools]


def test_rewards_have_the_names_of_their_metrics_and_an_environment_adds_its_class_once() -> None:
    several = {"a": Scored, "b": Scored, "c": Plain}
    assert reward_func_names([brevity, "org/model", "my.rewards:style"], several) == [
        "brevity",
        "model",
        "style",
        "Scored",
    ]
    unnamed: Callable[[list[str]], list[float]] = lambda completions: [0.0 for _ in completions]  # noqa: E731
    assert reward_func_names([functools.partial(brevity, most=3), unnamed], None) == ["brevity", "reward_1"]
    assert reward_weights([0.5], num_functions=1, environment_factory=several).tolist() == [0.5, 1.0]
    assert reward_weights(None, num_functions=2, environment_factory=None).tolist() == [1.0, 1.0]
    assert reward_func_names([], Scored) == ["Scored"]


def test_tools_are_functions_and_methods_of_environments() -> None:
    assert names(all_tools([brevity], {"a": Scored, "b": Scored, "c": Plain})) == ["brevity", "act", "play"]
    assert names(all_tools([], Scored)) == ["act"]
    assert all_tools([], "my_envs:Game") == []


def test_the_accelerator_is_that_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = ScriptProcess()
    accelerator.print("done", 1)
    accelerator.print("loss", 0.5, sep="=", end=";", flush=True)
    accelerator.wait_for_everyone()
    assert capsys.readouterr().out == "done 1\nloss=0.5;"
    assert (accelerator.is_main_process, accelerator.process_index, accelerator.num_processes) == (True, 0, 1)
    with pytest.raises(AttributeError, match=r"trainer.accelerator has no gather here: a script is one process"):
        _ = accelerator.gather


@pytest.mark.parametrize(
    "name", ["optimizer", "get_train_dataloader", "environments", "vllm_generation", "ref_model", "callback_handler"]
)
def test_a_missing_attribute_says_where_it_is(name: str) -> None:
    assert str(missing(name)).startswith(f"GRPOTrainer has no {name} here: ")
    assert str(missing("colour")) == "GRPOTrainer has no colour"


def test_what_has_no_event_is_not_a_callback() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="'tensorboard' is not a callback: it has no event of"):
        GRPOTrainer("org/model", "length", train_dataset="org/rows", callbacks=["tensorboard"])


def test_an_option_that_is_no_attribute_is_among_the_options() -> None:
    says = "GRPOTrainer has no temperature here: it is an option; trainer.args.temperature has its value"
    assert str(missing("temperature")) == says


@pytest.mark.parametrize("name", ["compute_loss", "_save", "get_optimizer_cls_and_kwargs", "get_train_dataloader"])
def test_a_subclass_with_a_method_that_nothing_would_call_is_refused(name: str) -> None:
    mixin: Any = type("Mixin", (), {name: brevity})
    for bases, methods in (((GRPOTrainer,), {name: brevity}), ((mixin, GRPOTrainer), {})):
        with pytest.raises(ValueError, match=f"Mine.{name} would never be called: (the training ranks|prompts are)"):
            type("Mine", bases, methods)


def test_a_subclass_may_have_other_methods_and_hears_which_the_training_does_not_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = type("Mine", (GRPOTrainer,), {"report": brevity, "log": brevity})
    type("Another", (mine,), {"report": brevity})
    note = "note: train() does not call Mine.log; it calls on_log of callbacks\n"
    assert capsys.readouterr().out == note


def test_a_trainer_has_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    args = GRPOConfig(output_dir=str(tmp_path), reward_weights=[0.5], beta=0.1, run_options={"num_generations": 4})
    rows = [{"environment": "a"}, {"environment": "b"}]
    script: Any = GRPOTrainer(
        model="org/model",
        reward_funcs=brevity,
        args=args,
        train_dataset=rows,
        environment_factory={"a": Scored, "b": Plain},
    )
    assert script.args is args
    assert script.train_dataset is rows
    assert (script.num_generations, script.beta) == (4, 0.1)
    assert (script.reward_func_names, script.reward_weights.tolist()) == (["brevity", "Scored"], [0.5, 1.0])
    assert names(script.tools) == ["act", "play"]
    assert script.is_world_process_zero()
    assert script.is_local_process_zero()
    script.log({"mine": 2.0}, None)  # as a subclass calls super().log(logs, start_time)
    assert script.state.log_history == [{"mine": 2.0, "epoch": 0.0, "step": 0}]
    assert script.control.should_training_stop is False
    assert script.entropy_coef == args.entropy_coef
    script._events.newest = {"entropy_coef": 0.3}
    assert script.entropy_coef == 0.3
    with pytest.raises(ValueError, match="trial is not supported: make a trainer for each set of options"):
        script.train(trial=object())
    assert not hasattr(script, "optimizer")
    with pytest.raises(AttributeError, match=r"GRPOTrainer has no tokenizer here: it is trainer.processing_class"):
        _ = script.tokenizer
    with pytest.raises(AttributeError, match="GRPOTrainer has no get_train_dataloader here: prompts are read by"):
        script.get_train_dataloader()
    with pytest.raises(ValueError, match=r"requires a `train_dataset` with a column environment.*: a, b"):
        GRPOTrainer(model="org/model", reward_funcs=brevity, args=args, environment_factory={"a": Scored, "b": Plain})


@pytest.mark.parametrize(("loss_type", "num_warnings"), [("grpo", 0), ("dapo", 1)])
def test_a_sequence_level_ratio_in_a_loss_of_tokens_is_warned_of_at_once(
    loss_type: str, num_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    args = GRPOConfig(output_dir=str(tmp_path), loss_type=loss_type, importance_sampling_level="sequence")
    GRPOTrainer(model="org/model", reward_funcs=brevity, args=args, train_dataset=[{"prompt": "x"}])
    assert caplog.text.count("weights each sequence by its completion length") == num_warnings


def test_a_trainer_writes_the_files_that_scripts_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    args = GRPOConfig(output_dir=str(tmp_path / "out"))
    script = GRPOTrainer("org/model", brevity, args, [{"prompt": "a"}])
    script.save_metrics("train", {"train_loss": 0.5})
    script.save_metrics("eval", {"eval_reward": 1.0})
    script.log_metrics("eval", {"eval_reward": 1.0})
    script.save_state()
    script.create_model_card(dataset_name="org/data", tags=["math"])
    files = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "out").iterdir()}
    assert json.loads(files["train_results.json"]) == {"train_loss": 0.5}
    assert json.loads(files["all_results.json"]) == {"train_loss": 0.5, "eval_reward": 1.0}
    assert json.loads(files["trainer_state.json"])["global_step"] == 0
    assert "- org/data" in files["README.md"]
    assert "eval_reward =" in capsys.readouterr().out


def test_an_evaluation_takes_the_arguments_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def count(_: ScriptRun, data: Any) -> dict[str, Any]:
        return {"eval_rows": len(data)}

    monkeypatch.setattr(ScriptRun, "evaluate", count)
    several = {"few": [{"prompt": "a"}], "more": [{"prompt": "a"}] * 2}
    script = GRPOTrainer("org/model", brevity, GRPOConfig(), [{"prompt": "a"}], eval_dataset=several)
    assert script.evaluate() == {"eval_few_rows": 1, "eval_more_rows": 2}
    assert script.evaluate("more") == {"eval_rows": 2}
    assert script.evaluate("org/data") == {"eval_rows": len("org/data")}
    assert script.evaluate([{"prompt": "a"}] * 3, ["logits"], "test") == {"test_rows": 3}


def test_without_options_the_directory_is_called_after_the_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert GRPOTrainer("org/model", brevity, train_dataset=[{"prompt": "a"}]).args.output_dir == "model-GRPO"
    (tmp_path / "mine").mkdir()
    script = GRPOTrainer(f"{tmp_path}/mine/", brevity, train_dataset=[{"prompt": "a"}])
    assert script.args.output_dir == "mine-GRPO"
    assert GRPOTrainer("org/model", brevity, GRPOConfig(), [{"prompt": "a"}]).args.output_dir == "trainer_output"


class Linear:
    """Stands for a model with three weights, of which two are trained."""

    config = SimpleNamespace(_name_or_path="org/model")

    def save_pretrained(self, directory: Path) -> None:
        raise NotImplementedError

    def parameters(self) -> list[Any]:
        sizes = ((2, True), (1, False))
        return [SimpleNamespace(numel=lambda size=size: size, requires_grad=trained) for size, trained in sizes]


def test_the_weights_that_are_trained_are_counted() -> None:
    pytest.importorskip("transformers")
    assert GRPOTrainer(Linear(), brevity, GRPOConfig(), [{"prompt": "a"}]).get_num_trainable_parameters() == 2


@pytest.mark.parametrize("args", [{"max_steps": 1}, SimpleNamespace(max_steps=1)])
def test_options_that_are_not_headraces_are_refused_at_once(args: Any) -> None:
    pytest.importorskip("transformers")
    kind: type[object] = args.__class__
    says = f"args is a {kind.__name__} of {kind.__module__}; give headrace's GRPOConfig, .*: from headrace import"
    with pytest.raises(ValueError, match=says):
        GRPOTrainer("org/model", brevity, args, [{"prompt": "a"}])


def test_files_go_where_those_of_transformers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for output_dir, directory in ((None, "trainer_output"), ("~/mine", "mine")):
        script = GRPOTrainer("org/model", brevity, GRPOConfig(output_dir=output_dir), [{"prompt": "a"}])
        script.save_state()
        script.create_model_card()
        assert sorted(it.name for it in (tmp_path / directory).iterdir()) == ["README.md", "trainer_state.json"]
