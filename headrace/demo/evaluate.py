"""Greedy accuracy of a transformers model on prompts, apart from the services.

The number the demo reports before and after: plain transformers on a saved directory, so that it vouches for the
checkpoint as well as for the training. Scored with the very function that the run is rewarded with.
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
"""Room to be wrong in: a completion that never ends must not be cut into a right one."""


def greedy_accuracy(model_dir: Path, prompts: Sequence[str], answers: Sequence[str]) -> tuple[float, list[str]]:
    """Load a transformers directory; return the share of exact answers and every completion."""
    tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(model_dir)
    model: Any = cast("Any", AutoModelForCausalLM).from_pretrained(model_dir, dtype=torch.float32)
    return greedy_accuracy_of(model, tokenizer, prompts, answers)


def greedy_accuracy_of(
    model: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]
) -> tuple[float, list[str]]:
    """Do the same with a model in memory; its training mode is put back."""
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
