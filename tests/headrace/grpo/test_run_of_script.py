"""The settings of a run mean what the arguments of a script's trainer mean in TRL."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_inputs import RunInputs
from headrace.grpo.run_of_script import Files, Script, training_settings
from shared.run_options.grpo_config import GRPOConfig

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
    inputs = RunInputs(tmp_path / "inputs", tmp_path / "functions")
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


@pytest.mark.parametrize("options", [{"bias": "all"}, {"rank_pattern": {"q_proj": 4}}, {"exclude_modules": ["k_proj"]}])
def test_an_option_of_an_adapter_that_a_run_does_not_have_is_refused(files: Files, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"peft_config has {next(iter(options))}, which a run does not have"):
        training_settings(make_script(peft_config=LoraConfig(**options)), files)
