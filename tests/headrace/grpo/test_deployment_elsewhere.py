"""A script trains with services that share no directory with it: files go there over HTTP, and the model back."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace import GRPOConfig, GRPOTrainer
from headrace.grpo.script_services import ScriptServices
from headrace.local.detached import start_detached, wait_until_up
from headrace.local.service_specs import UpSettings
from headrace.local.state_dir import StateDir

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"{number}+{number}=", "solution": str(2 * number)} for number in range(16)]
BONUS = 0.25


def _never(_services: ScriptServices, _directory: Path) -> bool:
    return False


@pytest.fixture(scope="module", autouse=True)
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run all services but vLLM, which is simulated, as a deployment that takes uploads, and return their directory."""
    directory, code = tmp_path_factory.mktemp("uploads"), tmp_path_factory.mktemp("code")
    settings = UpSettings(state_dir=tmp_path_factory.mktemp("elsewhere") / "state", num_simulated=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_UPLOADS_DIR", str(directory))
        patch.setenv("HEADRACE_CODE_UPLOADS_DIR", str(code))
        patch.setenv("HEADRACE_UPLOADS_KEEP_FREE_BYTES", "0")
        process = start_detached(settings, outlives_us=False)
        patch.delenv("HEADRACE_UPLOADS_DIR")
        patch.delenv("HEADRACE_CODE_UPLOADS_DIR")
        patch.setattr(ScriptServices, "see_here", _never)
        try:
            wait_until_up(settings, process)
            state = StateDir(settings.state_dir)
            endpoint = state.endpoint()
            assert endpoint is not None
            patch.setenv("HEADRACE_URL", endpoint.api_url)
            patch.setenv("HEADRACE_API_KEY", state.keys().api_key)
            yield directory
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def options(output_dir: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        learning_rate=1e-2,
        weight_decay=0.5,
        bf16=False,
        disable_tqdm=True,
    )


def test_data_and_model_are_uploaded_and_the_trained_model_is_downloaded(
    uploads: Path, model: Path, tmp_path: Path
) -> None:
    mine = AutoModelForCausalLM.from_pretrained(model)
    script = GRPOTrainer(
        model=mine,
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs="accuracy_reward",
        args=options(tmp_path / "out"),
        train_dataset=Dataset.from_list(ROWS),
    )
    script.train()
    assert script.run is not None
    config, there = script.run["config"], Path(script.run["run_dir"]) / "model"
    assert all(config[name].startswith(f"{uploads}/sha256-") for name in ("model", "dataset_name"))
    trained = AutoModelForCausalLM.from_pretrained(there).state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in mine.state_dict().items())
    script.save_model(str(tmp_path / "saved"))
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {path.name for path in there.iterdir()}
    assert weights_in(tmp_path / "saved") == weights_in(there)
    first = script.run["run_id"]
    script.train()
    beginning = script.run["beginning"]
    assert (beginning["run_id"], beginning["step"], beginning["weights_only"]) == (first, 1, True)
    assert script.run["progress"]["step"] == 1


def weights_in(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_with_a_directory_of_inputs_in_common_the_trained_model_is_still_downloaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_INPUTS_DIR", str(tmp_path / "inputs"))
    script = GRPOTrainer(str(model), "accuracy_reward", options(tmp_path / "out"), Dataset.from_list(ROWS))
    script.train()
    assert script.run is not None
    there = Path(script.run["run_dir"]) / "model"
    script.save_model(str(tmp_path / "saved"))
    assert weights_in(tmp_path / "saved") == weights_in(there) != weights_in(model)
    assert "eval_reward" in script.evaluate(ROWS[:2])
    newest, *_ = script.client.list()
    evaluated = script.client.get(newest["run_id"])["config"]["model"]
    assert weights_in(Path(evaluated)) == weights_in(there), "it evaluates the trained weights"


@pytest.fixture(scope="module")
def of_paths(tmp_path_factory: pytest.TempPathFactory, model: Path) -> GRPOTrainer:
    """Train an adapter on files with a function of the script, and return the trainer."""
    directory = tmp_path_factory.mktemp("paths")
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    bonus = BONUS

    def length(completions: list[str], **_: object) -> list[float]:
        return [bonus + len(text) for text in completions]

    script = GRPOTrainer(
        model=str(model),
        reward_funcs=length,
        args=options(directory / "out"),
        train_dataset=str(rows),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
    )
    script.train()
    return script


def test_paths_are_uploaded_and_a_saved_adapter_names_the_scripts_own_base(
    of_paths: GRPOTrainer, uploads: Path, model: Path, tmp_path: Path
) -> None:
    assert of_paths.run is not None
    assert of_paths.run["config"]["model"].startswith(f"{uploads}/sha256-")
    of_paths.save_model(str(tmp_path / "saved"))
    adapter = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(model)


def test_functions_of_the_script_are_sent_and_score_its_completions(of_paths: GRPOTrainer) -> None:
    assert of_paths.run is not None
    (name,) = of_paths.run["config"]["reward_funcs"]
    assert re.fullmatch(r"length_[0-9a-f]{24}:length", name)
    rollouts = of_paths.client.rollouts(of_paths.run["run_id"])
    assert rollouts
    assert all(row["reward"] == BONUS + len(row["completion"]) for row in rollouts)
