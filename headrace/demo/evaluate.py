"""Measures the greedy accuracy of a transformers model, without the services.

The demo reports this number before and after the run. It loads a saved directory with plain transformers, so it tests
the checkpoint as well as the training. The score is the run's own reward function.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.demo import task
from headrace.demo.reward import exact_answer

BATCH_PROMPTS = 256
MAX_NEW_TOKENS = task.MAX_ANSWER_TOKENS + 2
"""Longer than any right answer, so that cutting off a completion that does not end cannot make it right."""


def greedy_accuracy(model_dir: Path, prompts: Sequence[str], answers: Sequence[str]) -> tuple[float, list[str]]:
    """Load a transformers directory; return the share of exact answers and every completion."""
    tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(model_dir)
    model: Any = cast("Any", AutoModelForCausalLM).from_pretrained(model_dir, dtype=torch.float32)
    return greedy_accuracy_of(model, tokenizer, prompts, answers)


def greedy_accuracy_of(
    model: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]
) -> tuple[float, list[str]]:
    """Do the same for a model in memory, and restore its training mode."""
    completions: list[str] = []
    was_training = model.training
    model.eval()
    for start in range(0, len(prompts), BATCH_PROMPTS):
        completions += _complete(model, tokenizer, list(prompts[start : start + BATCH_PROMPTS]))
    model.train(was_training)
    rewards = exact_answer(completions, list(answers))
    return sum(rewards) / len(rewards), completions


@torch.inference_mode()
def _complete(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    encoded: Any = tokenizer(
        prompts,
        add_special_tokens=False,
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
        return_tensors="pt",
    )
    tokens: torch.Tensor = model.generate(
        **encoded,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    completions: list[str] = tokenizer.batch_decode(
        tokens[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return completions
