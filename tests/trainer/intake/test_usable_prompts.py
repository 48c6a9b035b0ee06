"""An evaluation set without usable prompts is refused when the training rank starts."""

from dataclasses import dataclass
from typing import Any

import pytest

from services.trainer.data.dataset import Row
from services.trainer.intake.evaluation import refuse_without_usable_prompts
from shared.errors import UserError
from shared.messages import Prompt
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Rows:
    """Rows with these prompts; an empty prompt is a problem."""

    prompts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def row_at(self, admission_number: int) -> Row:
        prompt = self.prompts[admission_number]
        return Row(
            admission_number, prompt, problem=None if prompt else f"row {admission_number} has an empty 'prompt'"
        )


class Letters:
    """Makes one token of every letter."""

    def encode(self, prompt: Prompt) -> list[int]:
        return [ord(letter) for letter in prompt if isinstance(letter, str)]


def look(*prompts: str, **settings: Any) -> None:
    config = parse_run_config(
        {
            "model": "m",
            "reward_funcs": ["accuracy_reward"],
            "dataset_name": "org/data",
            "dataset_test_split": "test",
            "eval_steps": 5,
            **settings,
        }
    )
    refuse_without_usable_prompts(Rows(prompts), config=config, encoder=Letters())


def test_one_prompt_is_enough() -> None:
    look("", "abcd", "ab", max_prompt_length=3)


def test_no_usable_prompt_is_refused_with_the_reason_of_the_first() -> None:
    with pytest.raises(
        UserError, match="none of the 2 prompts to evaluate on can be used; the first: row 0 has an"
    ) as caught:
        look("", "abcd", max_prompt_length=3)
    assert caught.value.field == "dataset_test_split"


def test_only_the_prompts_that_are_asked_count() -> None:
    with pytest.raises(UserError, match=r"none of the 2 prompts .*: 4 tokens, max_prompt_length=3"):
        look("abcd", "abcde", "ab", max_prompt_length=3, max_eval_prompts=2)
