"""A script trains through the real services, on a simulated generator. test_script.py has one with vLLM."""

import contextlib
import io
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, PrinterCallback, TrainerCallback

from headrace import GRPOConfig, GRPOTrainer
from headrace.client import ENDED, HeadraceApiError
from headrace.grpo.argument_error import ArgumentError
from headrace.local.detached import start_detached, wait_until_up
from headrace.local.service_specs import UpSettings
from headrace.local.state_dir import STATE_DIR_VARIABLE
from shared.errors import HeadraceError

pytestmark = pytest.mark.slow

ROWS = Dataset.from_list([{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(16)])
MODULUS = 7


def spread(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    assert len(answer) == len(completions)
    return [sum(ids) % MODULUS / MODULUS for ids in completion_ids]


@pytest.fixture(scope="module", autouse=True)
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run all services but vLLM, which is simulated, where a script finds them."""
    settings = UpSettings(state_dir=tmp_path_factory.mktemp("script") / "state", num_simulated=1)
    process = start_detached(settings, outlives_us=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR_VARIABLE, str(settings.state_dir))
        try:
            wait_until_up(settings, process)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def make_trainer(
    directory: Path, model: Path, /, *, options: dict[str, Any] | None = None, **arguments: Any
) -> GRPOTrainer:
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 2,
        "bf16": False,
        "disable_tqdm": True,
        "run_options": {"save_steps": 2},
    }
    args = GRPOConfig(output_dir=str(directory / "out"), **(chosen | (options or {})))
    given: dict[str, Any] = {"model": str(model), "reward_funcs": spread, "args": args, "train_dataset": ROWS}
    return GRPOTrainer(**(given | arguments))


@pytest.fixture
def trainer(tmp_path: Path, model: Path) -> Callable[..., GRPOTrainer]:
    return partial(make_trainer, tmp_path, model)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def own_model(model: Path) -> dict[str, Any]:
    """Return the arguments for a model object, whose weights are not those on disk."""
    mine = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        embeddings: Any = mine.get_input_embeddings()
        embeddings.weight.mul_(1.5)
    return {"model": mine, "processing_class": AutoTokenizer.from_pretrained(model)}


@dataclass(frozen=True)
class Trained:
    """A script that has trained its own model."""

    script: GRPOTrainer
    mine: Any
    before: dict[str, torch.Tensor]
    result: Any
    said: list[str]

    @property
    def run(self) -> dict[str, Any]:
        assert self.script.run is not None
        return self.script.run

    def lend_to(self, directory: Path) -> None:
        """Let the next scripts of a test be processes that go on with its run."""
        shutil.copytree(str(self.script.args.output_dir), directory / "out")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Trained:
    given = own_model(model)
    before = weights(given["model"])
    script = make_trainer(tmp_path_factory.mktemp("trained"), model, callbacks=[PrinterCallback], **given)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        result = script.train()
    return Trained(script, given["model"], before, result, said.getvalue().splitlines())


def test_training_changes_the_model_and_fills_the_log(trained: Trained) -> None:
    script, result, said = trained.script, trained.result, trained.said
    run_id, run_dir = trained.run["run_id"], Path(trained.run["run_dir"])
    assert f"{run_id} trains with the services of `headrace up` in {run_dir.parents[1]}; it is in {run_dir}" in said
    assert f"{run_id} finished after 4 steps; the model is in {run_dir}/model" in said
    assert ["'loss'" in line for line in said if line.startswith("{")] == [True, True, False], (
        "as in TRL, and a last one"
    )
    log = script.state.log_history
    assert result.global_step == script.state.global_step == 4
    assert [entry["step"] for entry in log] == [2, 4, 4]
    assert all("rewards/spread/mean" in entry and "loss" in entry for entry in log[:2])
    assert log[-1]["train_loss"] == result.training_loss
    assert log[-1]["epoch"] == result.metrics["epoch"] == 0.5  # 4 steps of 2 prompts, of 16
    after = weights(script.model)
    assert any(not torch.equal(after[name], trained.before[name]) for name in after)
    script.save_model()
    saved = weights(AutoModelForCausalLM.from_pretrained(str(script.args.output_dir)))
    assert all(torch.equal(saved[name], after[name]) for name in after)


def test_a_model_object_is_trained_and_updated_in_place(trained: Trained) -> None:
    assert trained.script.model is trained.mine
    after, before = weights(trained.mine), trained.before
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert 0 < max(moved.values()) < 0.1  # four steps from the object's own weights, not from those on disk


def test_an_evaluation_needs_no_training(trainer: Callable[..., GRPOTrainer]) -> None:
    script = trainer()
    found = script.evaluate({"few": ROWS.select(range(2)), "more": ROWS.select(range(5))})
    assert (found["eval_few_groups/done"], found["eval_more_groups/done"]) == (2, 5)
    assert 0 <= found["eval_few_reward"] <= 1
    assert script.state.global_step == 0


class Even:
    """Rewards its rollouts with 1."""

    def reset(self, start: int, **row: Any) -> str:
        assert "environment" not in row
        return f"{type(self).__name__}: count from {start}."

    def count(self, step: int) -> int:
        """Count on.

        Args:
            step: By how much.
        """
        return step

    def get_reward(self) -> float:
        return 1.0


class Odd(Even):
    """Has no other reward than this."""

    def get_reward(self) -> float:
        return 0.0


def test_each_row_is_played_in_the_environment_that_it_names(trainer: Callable[..., GRPOTrainer]) -> None:
    rows = Dataset.from_list(
        [{"environment": name, "start": number} for number in range(4) for name in ("even", "odd")]
    )
    script = trainer(
        reward_funcs=None,
        train_dataset=rows,
        environment_factory={"even": Even, "odd": Odd},
        options={"max_steps": 4, "logging_steps": 1, "shuffle_dataset": False},
    )
    script.train()
    assert script.run is not None
    assert {"rewards/Even/mean", "rewards/Odd/mean"} <= {name for entry in script.state.log_history for name in entry}
    counts = Counter[tuple[str, str, float]]()
    for row in chain.from_iterable(script.client.rollouts(script.run["run_id"], step=step) for step in range(1, 5)):
        for name, outcome in row["rewards"].items():
            counts[row["prompt"][-1]["content"], name.partition(":")[2], outcome["value"]] += 1
    even = {(f"Even: count from {number}.", "Even", 1.0): 4 for number in range(4)}
    odd = {(f"Odd: count from {number}.", "Odd", 0.0): 4 for number in range(4)}
    assert counts == even | odd


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (Dataset.from_list([{"environment": "even"}, {"environment": "chess"}]), "'chess', which is not among"),
        (Dataset.from_list([{"start": 1}]), "names no environment in the column 'environment'"),
        ([{"environment": "even"}, {"environment": "chess"}], "line 2 has environment 'chess', which is not among"),
    ],
)
def test_a_row_that_names_no_known_environment_is_refused_at_once(
    trainer: Callable[..., GRPOTrainer], rows: Any, says: str
) -> None:
    script = trainer(train_dataset=rows, environment_factory={"even": Even})
    with pytest.raises((ArgumentError, HeadraceApiError), match=says):
        script.train()
    assert script.run is None


def test_transformers_early_stopping_ends_the_run_and_the_best_weights_come_back(
    trainer: Callable[..., GRPOTrainer],
) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 100_000, "load_best_model_at_end": True}
    # No evaluation is better than the first by 10, so the second ends the run.
    callbacks = [EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)]
    script = trainer(callbacks=callbacks, eval_dataset=ROWS.select(range(3)), options=evaluated)
    script.train()
    state, run = script.state, script.run or {}
    assert (state.global_step, run["status"]) == (4, "finished")
    assert run["reason"].startswith("stopped early: eval_reward did not improve by more than 10 in the last evaluation")
    values = {entry["step"]: entry["eval_reward"] for entry in state.log_history if "eval_reward" in entry}
    assert list(values) == [2, 4]
    best = 4 if values[4] > values[2] else 2
    assert (state.best_global_step, state.best_metric) == (best, values[best])
    assert state.best_model_checkpoint == f"{run['run_dir']}/checkpoints/step_{best:08d}"
    card = (Path(run["run_dir"]) / "model" / "README.md").read_text()
    assert f"optimizer step {best} of" in card
    assert f"the best by `eval_reward`: {values[best]:.6g}" in card
    saved = weights(AutoModelForCausalLM.from_pretrained(Path(run["run_dir"]) / "model"))
    assert all(torch.equal(saved[name], weight) for name, weight in weights(script.model).items())


class StopsAtTwo(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 2


class PressesCtrlC(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_ctrl_c_pauses_the_run_with_the_weights_of_its_step_and_another_process_goes_on_with_it(
    trainer: Callable[..., GRPOTrainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"max_steps": 100_000, "run_options": {"save_steps": 100_000}}
    first = trainer(callbacks=[PressesCtrlC], options=options)
    before = weights(first.model)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.run is not None
    run_id = first.run["run_id"]
    said = capsys.readouterr().out
    assert "run it again with train(resume_from_checkpoint=True)" in said
    assert first.run["run_dir"] in said
    assert "headrace resume" not in said
    first.save_model(str(tmp_path / "mid"))
    step = first.client.get(run_id)["progress"]["step"]
    assert step >= 2
    assert f"the model has the weights of step {step} of {run_id}, which is paused" in capsys.readouterr().out
    saved = weights(AutoModelForCausalLM.from_pretrained(tmp_path / "mid"))
    assert any(not torch.equal(saved[name], before[name]) for name in before)
    assert all(torch.equal(saved[name], weight) for name, weight in weights(first.model).items())
    assert (tmp_path / "mid" / "tokenizer.json").exists()

    options["max_steps"] = step + 10
    first.client.edit(run_id, {"max_steps": step + 10})
    second = trainer(options=options)
    result = second.train(resume_from_checkpoint=True)
    assert second.run is not None
    assert second.run["run_id"] == run_id
    assert second.run["status"] == "finished"
    assert result.global_step == step + 10
    assert f"continuing {run_id} from step " in capsys.readouterr().out


def inverse(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1 - sum(ids) % MODULUS / MODULUS for ids in completion_ids]


def test_a_script_that_changed_goes_on_in_a_new_run_from_the_newest_checkpoint(
    trainer: Callable[..., GRPOTrainer], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trainer(callbacks=[PressesCtrlC], options={"max_steps": 100_000}, **own_model(model))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.run is not None
    old = first.run["run_id"]
    first.save_model(str(tmp_path / "mid"))  # waits until the run is paused and has counted its steps
    steps = first.client.get(old)["progress"]["step"]
    options = {"max_steps": steps + 10, "learning_rate": 1e-3}
    second = trainer(reward_funcs=inverse, options=options, **own_model(model))  # another object of the same content
    second.train(resume_from_checkpoint=True)
    run = second.run or {}
    assert run["run_id"] != old
    assert (run["beginning"]["run_id"], run["config"]["learning_rate"]) == (old, 1e-3)
    assert run["beginning"]["step"] + second.state.global_step == options["max_steps"]
    assert all("rewards/inverse/mean" in entry for entry in second.state.log_history[:-1])
    assert second.client.get(old)["status"] == "stopped"
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "the script has changed" in line]
    for changed in ("learning_rate 0.01 -> 0.001", f"max_steps 100000 -> {options['max_steps']}", "reward_funcs"):
        assert changed in said
    assert " model" not in said
    assert said.endswith(f"{run['run_id']} continues {old} from step {run['beginning']['step']}")


def broken(completions: list[str], **_: Any) -> list[float]:
    return [1 / 0 for _ in completions]


def test_a_reward_function_that_fails_for_all_ends_the_training_with_its_error_and_can_be_mended(
    trainer: Callable[..., GRPOTrainer],
) -> None:
    first = trainer(reward_funcs=broken, options={"run_options": {"reward_failure_window": 4}})
    with pytest.raises(HeadraceError, match="division by zero") as raised:
        first.train()
    says = rf"the reward function broken \({re.escape(__file__)}, line \d+\) failed for 100% of the completions; the "
    assert re.match(says, str(raised.value))
    assert "broken_" not in str(raised.value), "the name is the script's own"
    assert first.run is not None
    second = trainer(options={"run_options": {"reward_failure_window": 4}})
    assert second.train(resume_from_checkpoint=True).global_step == 4
    assert second.client.get(first.run["run_id"])["status"] == "stopped"


class NeverBegins(Even):
    """Fails at once."""

    def reset(self, start: int, **row: Any) -> str:
        raise OSError("no game server")


def test_an_environment_that_fails_for_all_ends_the_training_with_its_error(
    trainer: Callable[..., GRPOTrainer],
) -> None:
    rows = Dataset.from_list([{"start": number} for number in range(8)])
    script = trainer(
        reward_funcs=None,
        train_dataset=rows,
        environment_factory=NeverBegins,
        options={"run_options": {"reward_failure_window": 4}},
    )
    with pytest.raises(HeadraceError) as raised:
        script.train()
    assert str(raised.value) == (
        "100% of the rollouts were lost; the last failure is: NeverBegins: reset ended with an exception: "
        "no game server. Mend the environment, make the trainer again with it, and "
        "call train(resume_from_checkpoint=True)"
    )


def needs_a_solution(completions: list[str], solution: list[str]) -> list[float]:
    return [float(one == other) for one, other in zip(completions, solution, strict=True)]


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("lacks", ["train_dataset", "eval_dataset"])
def test_a_column_that_a_function_asks_for_and_that_is_missing_is_an_error_before_there_is_a_run(
    trainer: Callable[..., GRPOTrainer], tmp_path: Path, lacks: str, is_named: bool
) -> None:
    file, full = tmp_path / "rows.parquet", ROWS.rename_column("answer", "solution")
    ROWS.to_parquet(str(file))
    data = {"train_dataset": full, "eval_dataset": full.select([0]), lacks: str(file) if is_named else ROWS}
    script = trainer(reward_funcs=needs_a_solution, options={"eval_strategy": "steps", "eval_steps": 1}, **data)
    with pytest.raises(ArgumentError, match=f"needs_a_solution asks for the column solution, which {lacks}"):
        script.train()
    assert script.run is None


def test_another_run_of_the_process_stops_the_paused_one_and_a_callback_stops_that(
    trainer: Callable[..., GRPOTrainer],
) -> None:
    first = trainer(callbacks=[PressesCtrlC], options={"max_steps": 100_000})
    with pytest.raises(KeyboardInterrupt):
        first.train()
    with pytest.raises(ValueError, match="the training is paused"):
        first.evaluate(ROWS)
    second = trainer(callbacks=[StopsAtTwo], options={"max_steps": 100_000})
    second.train()
    assert first.run is not None
    assert second.client.get(first.run["run_id"])["status"] == "stopped"
    assert second.run is not None
    assert second.run["run_id"] != first.run["run_id"]
    assert second.run["status"] == "stopped"
    assert 2 <= second.state.global_step < 100_000


@pytest.mark.timeout(600)
def test_a_script_continues_and_forks_a_run_from_its_checkpoints(
    trained: Trained,
    trainer: Callable[..., GRPOTrainer],
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained.lend_to(tmp_path)
    source = trained.run["run_id"]
    longer = trainer(options={"max_steps": 6}, **own_model(model))
    assert longer.train(resume_from_checkpoint=True).global_step == 2, "two of six steps are left"
    assert longer.run is not None
    assert longer.run["beginning"]["says"].startswith(f"step 4 of {source}")
    fork = trainer(options={"max_steps": 3, "learning_rate": 1e-3}, **own_model(model))
    assert fork.train(resume_from_checkpoint=f"{source}:2").global_step == 1
    assert fork.run is not None
    assert (fork.run["beginning"]["run_id"], fork.run["beginning"]["step"]) == (source, 2)
    differs = f"note: settings that differ from {source}: max_steps 4 -> 3, learning_rate 0.01 -> 0.001"
    assert differs in capsys.readouterr().out.splitlines()
    with pytest.raises(HeadraceError, match="max_steps ends the run at 4: nothing is left to train") as raised:
        trainer(options={"max_steps": 4}).train(resume_from_checkpoint=source)
    assert raised.value.__suppress_context__, "one traceback"
    assert 'set run_options={"resume_only_model": True} to begin at step 0' in str(raised.value)
    anew = trainer(options={"max_steps": 1, "run_options": {"resume_only_model": True}})
    directory = f"{trained.run['run_dir']}/checkpoints/step_00000002"
    assert anew.train(resume_from_checkpoint=directory).global_step == 1
    assert anew.run is not None
    assert (anew.run["beginning"]["run_id"], anew.run["beginning"]["step"]) == (source, 2)
    assert f"note: settings that differ from {source}: " in capsys.readouterr().out


def test_a_run_that_has_made_all_its_steps_is_not_trained_further(
    trained: Trained,
    trainer: Callable[..., GRPOTrainer],
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained.lend_to(tmp_path)
    second = trainer(**own_model(model))
    assert second.train(resume_from_checkpoint=True).global_step == 4
    assert second.run is not None
    run_id = trained.run["run_id"]
    assert second.run["run_id"] == run_id
    said = capsys.readouterr().out.splitlines()
    assert f"note: {run_id} has made all its steps: nothing is left to train" in said
    assert second.state.log_history[:-1] == trained.script.state.log_history[:-1]
    after = weights(trained.mine)
    assert all(torch.equal(after[name], weight) for name, weight in weights(second.model).items())


def test_without_a_run_there_is_nothing_to_go_on_with(trainer: Callable[..., GRPOTrainer]) -> None:
    with pytest.raises(ValueError, match=r"no run to go on with: .*headrace-run\.json does not exist\.") as raised:
        trainer().train(resume_from_checkpoint=True)
    assert raised.value.__suppress_context__, "no traceback of a file"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"optimizers": (object(), None)}, "optimizers is not supported: set optim, optim_args"),
        ({"rollout_func": print}, "rollout_func is not supported: write it as an agent program"),
        ({"reward_funcs": None}, "No reward source provided"),
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"model": 3}, "model is a int; give a hub id, a directory or a PreTrainedModel"),
    ],
)
def test_arguments_without_a_meaning_are_refused_at_once(
    trainer: Callable[..., GRPOTrainer], arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        trainer(**arguments)


def test_a_script_that_was_started_by_a_launcher_of_ranks_is_refused(
    trainer: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="runs in several processes"):
        trainer()


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"peft_config": object()}, "peft_config is a object, but only LoRA"),
    ({"quantization_config": object()}, "only 4 bits"),
    ({"eval_dataset": {"a": ROWS}, "options": {"eval_on_start": True, "eval_strategy": "steps"}}, "takes only one"),
]


@pytest.mark.parametrize(("arguments", "says"), UNSUPPORTED)
def test_arguments_that_a_run_cannot_have_are_refused_before_it_is_made(
    trainer: Callable[..., GRPOTrainer], arguments: dict[str, Any], says: str
) -> None:
    script = trainer(**arguments)
    with pytest.raises(ValueError, match=says):
        script.train()
    assert script.run is None or script.run["status"] in ENDED
