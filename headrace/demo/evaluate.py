"""Measures the greedy accuracy of a transformers model, without the services.

The demo reports this number before and after the run. The model is loaded from a saved directory with plain
transformers, so the saved files are tested too. Answers are scored with the run's own reward function.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.demo.demo_task import REVERSE, ReverseTask
from headrace.demo.reward import exact_answer

BATCH_PROMPTS = 256
_MAX_TURNS = 4


def greedy_accuracy(
    model_dir: Path, prompts: Sequence[str], answers: Sequence[str], *, task: ReverseTask = REVERSE
) -> tuple[float, list[str]]:
    """Load a model directory, and return the model's share of exact answers (0 to 1) and its answer to every prompt."""
    tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(model_dir)
    model: Any = cast("Any", AutoModelForCausalLM).from_pretrained(model_dir, dtype=torch.float32)
    return greedy_accuracy_of(model, tokenizer, prompts, answers, task=task)


def greedy_accuracy_of(
    model: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str], *, task: ReverseTask = REVERSE
) -> tuple[float, list[str]]:
    """Return a model's share of exact answers (0 to 1) and its answer to every prompt. ``model.training`` is kept."""
    found: list[str] = []
    was_training = model.training
    model.eval()
    for start in range(0, len(prompts), BATCH_PROMPTS):
        found += _answer(model, tokenizer, task, prompts[start : start + BATCH_PROMPTS])
    model.train(was_training)
    rewards = exact_answer(found, list(answers))
    return sum(rewards) / len(rewards), found


def _answer(model: Any, tokenizer: Any, task: ReverseTask, prompts: Sequence[str]) -> list[str]:
    """Return the last completion for each prompt. After a tool call, the model reads the result and completes again."""
    texts = [task.text_of(prompt) for prompt in prompts]
    found = [""] * len(prompts)
    asked: Sequence[int] = range(len(prompts))
    for _ in range(_MAX_TURNS):
        if not asked:
            break
        completions = _complete(model, tokenizer, [texts[index] for index in asked], task)
        unanswered: list[int] = []
        for index, completion in zip(asked, completions, strict=True):
            found[index] = completion
            reply = task.reply(completion)
            if reply is not None:
                texts[index] += completion + tokenizer.eos_token + reply
                unanswered.append(index)
        asked = unanswered
    return found


@torch.inference_mode()
def _complete(model: Any, tokenizer: Any, texts: list[str], task: ReverseTask) -> list[str]:
    encoded: Any = tokenizer(
        texts,
        add_special_tokens=False,
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
        return_tensors="pt",
    )
    tokens: torch.Tensor = model.generate(
        **encoded,
        # Longer than any right answer, so that cutting off a completion that does not end cannot make it right.
        max_new_tokens=int(task.run_options["max_completion_length"]),
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    completions: list[str] = tokenizer.batch_decode(
        tokens[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return completions
