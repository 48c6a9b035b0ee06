"""Supervised warm-up of the demo's model, which imitates a careless teacher until it answers like the teacher.

The teacher reverses a string or, often, copies it (task.py). GRPO learns from groups whose rewards differ. So at its
start the policy must be able to answer right, but often be wrong. The warm-up ends when enough greedy answers on the
validation split are right or a clean copy, and not after a fixed time. So the model has the same skill on a fast and on
a slow machine. The test split is not used.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.demo.demo_task import REVERSE, ReverseTask
from headrace.demo.evaluate import greedy_accuracy_of
from headrace.demo.model import make_model, make_tokenizer
from headrace.demo.task import Example, Splits, copy_of

IGNORED_LABEL = -100


@dataclass(frozen=True)
class WarmupPlan:
    """Hyperparameters of the warm-up, and the share of right or copied answers (0 to 1) at which it stops."""

    stop_at_teacher_like: float = 0.94
    max_steps: int = 1_000
    check_every_steps: int = 20
    batch_examples: int = 128
    learning_rate: float = 2e-3
    ramp_steps: int = 50


@dataclass(frozen=True)
class WarmupProgress:
    """The result of one validation during the warm-up. ``seconds`` counts from the beginning of the warm-up."""

    step: int
    loss: float
    validation_accuracy: float
    teacher_like: float
    """Share of validation completions that are right or a clean copy."""
    seconds: float


def warm_up(
    model_dir: Path,
    splits: Splits,
    *,
    seed: int,
    task: ReverseTask = REVERSE,
    plan: WarmupPlan | None = None,
    on_progress: Callable[[WarmupProgress], None] = lambda _: None,
) -> WarmupProgress:
    """Make a tokenizer and a model, train the model, save both in `model_dir`, and return the last validation's result.

    Raises:
        RuntimeError: After the plan's `max_steps`, too few answers are right or a copy. Nothing is saved.
    """
    plan = plan or WarmupPlan()
    started = time.monotonic()
    tokenizer = make_tokenizer(frame=task.frame, chat_template=task.chat_template)
    model = make_model(tokenizer, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / plan.ramp_steps))
    prompts = [example.prompt for example in splits.validation]
    answers = [example.answer for example in splits.validation]
    batches = _batches(tokenizer, task, splits.warmup, batch_examples=plan.batch_examples, seed=seed)
    for step in range(1, plan.max_steps + 1):
        input_ids, labels, attention_mask = next(batches)
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        if step % plan.check_every_steps:
            continue
        accuracy, completions = greedy_accuracy_of(model, tokenizer, prompts, answers, task=task)
        teacher_like = sum(
            completion in (answer, copy_of(answer)) for completion, answer in zip(completions, answers, strict=True)
        ) / len(answers)
        progress = WarmupProgress(step, loss.item(), accuracy, teacher_like, time.monotonic() - started)
        on_progress(progress)
        if teacher_like >= plan.stop_at_teacher_like:
            model.save_pretrained(model_dir)
            tokenizer.save_pretrained(model_dir)
            return progress
    raise RuntimeError(
        f"after {plan.max_steps} warm-up steps, under {plan.stop_at_teacher_like:.0%} of answers are right or a copy"
    )


def _batches(
    tokenizer: Any, task: ReverseTask, examples: Sequence[Example], *, batch_examples: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield shuffled batches endlessly: `input_ids_BT`, `labels_BT` and `attention_mask_BT`, padded right.

    The label of a token that the teacher did not write, such as one of the prompt, is IGNORED_LABEL.
    """
    order = torch.Generator().manual_seed(seed)
    lessons = [task.lesson(example, eos=tokenizer.eos_token) for example in examples]
    encoded: list[list[int]] = tokenizer(
        [piece.text for lesson in lessons for piece in lesson], add_special_tokens=False
    )["input_ids"]
    pieces = iter(encoded)
    rows = [[(next(pieces), piece.is_learned) for piece in lesson] for lesson in lessons]
    tokens = max(sum(len(ids) for ids, _ in row) for row in rows)
    input_ids = torch.full((len(examples), tokens), tokenizer.pad_token_id)
    labels = torch.full((len(examples), tokens), IGNORED_LABEL)
    attention_mask = torch.zeros((len(examples), tokens), dtype=torch.long)
    for index, row in enumerate(rows):
        end = 0
        for ids, is_learned in row:
            start, end = end, end + len(ids)
            input_ids[index, start:end] = torch.tensor(ids)
            if is_learned:
                labels[index, start:end] = input_ids[index, start:end]
        attention_mask[index, :end] = 1
    while True:
        for chosen in torch.randperm(len(examples), generator=order).split(batch_examples):  # type: ignore[no-untyped-call]
            yield input_ids[chosen], labels[chosen], attention_mask[chosen]
