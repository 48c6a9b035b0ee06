"""The three works: model, prompts, reward and settings, the same for every side. Pure: does not import torch.

demo       0.4 million weights; reverse a string of 3 to 5 letters; 128 completions of about 5 tokens a step
between    2.4 million weights; 64 completions of exactly 64 tokens a step, so that nobody waits for the longest
long-tail  8.4 million weights; 64 completions a step with a mean of 72 tokens and at most 512

The last two continue a string of letters. Their model imitates a teacher that writes the next letter of the alphabet
half of the time, and any other letter otherwise. The reward is the share of letters that are in order. In long-tail the
teacher ends a completion with the same probability at each token, so lengths are geometric: nobody sets a length.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.demo.settings import RUN_OPTIONS
from headrace.demo.task import LETTERS

P_IN_ORDER = 0.5
"""Probability that the teacher writes the next letter of the alphabet."""
_NUM_PROMPTS = 8_192
_PROMPT_LETTERS = 6


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int


@dataclass(frozen=True)
class Work:
    """One task with its settings.

    Attributes:
        options: The run's settings, under names that headrace and TRL share, with ``groups_per_step``.
        reward: The reward function, in TRL's signature, as ``module:function``.
        rows_a_pass: TRL's per_device_train_batch_size.
        target_reward: The mean reward whose time is measured.
        smooth_steps: Steps over which that mean is taken.
        num_steps: Steps that are measured by default, after ``num_warmup_steps`` more.
        shape: The model's sizes; None for the demo's model.
        end_probability: Probability with which the teacher ends a completion, at each token.
    """

    name: str
    options: Mapping[str, Any]
    reward: str
    rows_a_pass: int
    target_reward: float
    smooth_steps: int
    num_steps: int
    num_warmup_steps: int
    shape: Shape | None = None
    end_probability: float = 0.0

    @property
    def num_rows(self) -> int:
        """Number of completions in a step."""
        return int(self.options["groups_per_step"]) * int(self.options["num_generations"])

    def trl_options(self) -> dict[str, Any]:
        """Return the settings under which TRL's trainer makes the same steps."""
        options = {name: value for name, value in self.options.items() if name not in _NOT_TRLS}
        return options | {
            "per_device_train_batch_size": self.rows_a_pass,
            "gradient_accumulation_steps": self.num_rows // self.rows_a_pass,
        }

    def prompts(self, seed: int) -> list[dict[str, str]]:
        """Return the rows of a letters work; the demo has its own."""
        draw = random.Random(seed)
        return [{"prompt": "".join(draw.choices(LETTERS, k=_PROMPT_LETTERS))} for _ in range(_NUM_PROMPTS)]


_NOT_TRLS = ("groups_per_step", "max_staleness")
_OPTIONS = {name: value for name, value in RUN_OPTIONS.items() if name != "max_steps"}


def _letters(name: str, *, max_completion_length: int, **numbers: Any) -> Work:
    """Return a work that continues a string of letters. ``numbers`` are attributes of a Work."""
    options = {
        "groups_per_step": 8,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_completion_length": max_completion_length,
    }
    reward = "benchmarks.bench_end_to_end.reward:in_order"
    return Work(name, _OPTIONS | options, reward, target_reward=0.8, smooth_steps=3, **numbers)


DEMO = Work(
    "demo",
    _OPTIONS,
    "headrace.demo.reward:exact_answer",
    rows_a_pass=128,
    target_reward=0.8,
    smooth_steps=20,
    num_steps=190,
    num_warmup_steps=10,
)
BETWEEN = _letters(
    "between", max_completion_length=64, rows_a_pass=64, num_steps=40, num_warmup_steps=4, shape=Shape(192, 768, 4, 6)
)
LONG_TAIL = _letters(
    "long-tail",
    max_completion_length=512,
    rows_a_pass=16,
    num_steps=20,
    num_warmup_steps=3,
    shape=Shape(256, 1024, 8, 8),
    end_probability=1 / 72,
)
WORKS = {work.name: work for work in (DEMO, BETWEEN, LONG_TAIL)}
