"""Invalid LoRA settings are refused, each with what to do about it."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

MINIMAL: dict[str, Any] = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}
LORA: dict[str, Any] = {**MINIMAL, "use_peft": True}
IN_4BIT: dict[str, Any] = {**LORA, "load_in_4bit": True, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({**MINIMAL, "lora_r": 8}, "lora_r is set, but use_peft is not; set use_peft: true"),
        ({**MINIMAL, "load_in_4bit": True}, "load_in_4bit is set, but use_peft is not"),
        ({**LORA, "lora_r": 513}, "lora_r: must be at most 512"),
        ({**LORA, "lora_dropout": 1.0}, "lora_dropout: .*less than 1"),
        ({**LORA, "lora_target_modules": []}, "lora_target_modules: .*at least 1 item"),
        ({**LORA, "lora_target_modules": ["q_proj", "lm_head"]}, "lm_head cannot have an adapter: the last projection"),
        (
            {**LORA, "lora_target_modules": ["model.embed_tokens"]},
            "model.embed_tokens cannot have an adapter: embeddings",
        ),
        ({**LORA, "beta": 0.1, "sync_ref_model": True}, "use_peft has none: the reference is the base"),
        ({**IN_4BIT, "dtype": "float32"}, "load_in_4bit needs GPUs.*set dtype: bfloat16"),
        ({**IN_4BIT, "nproc_per_node": 2}, "load_in_4bit trains on one GPU"),
        ({**IN_4BIT, "nnodes": 2}, "load_in_4bit trains on one GPU"),
    ],
)
def test_options_without_a_sensible_meaning_are_refused(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_run_config(raw)


@pytest.mark.parametrize("targets", ["all-linear", ["all-linear"], None])
def test_pefts_name_for_all_linear_layers_is_the_default(targets: Any) -> None:
    assert parse_run_config({**LORA, "lora_target_modules": targets}).lora_target_modules is None


def test_a_base_in_4_bits_goes_with_bfloat16_and_one_rank() -> None:
    assert parse_run_config({**IN_4BIT, "nproc_per_node": 1}).load_in_4bit
