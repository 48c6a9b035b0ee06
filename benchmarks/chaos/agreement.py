"""Finds contradictions between the files that a run left behind: pure functions of its history.

rollout log = its own arithmetic   each completion once, with the reward that its length earns, stamped in order
metrics = rollout log              rewards, lengths and tokens of each step, recomputed from its rollouts
data set                           in an epoch, no prompt is trained twice
evaluations                        each due evaluation once, or counted as skipped; each of its prompts once
run API = ledger                   steps, groups admitted, trained and dropped by reason
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.chaos import workload
from benchmarks.chaos.history import Row, RunHistory, numbers

_STAMPS = ["admitted", "claimed", "generated", "scored", "trained"]
_MAX_NAMED = 4


def contradictions(history: RunHistory, *, ended_well: bool) -> list[str]:
    """Return one sentence for each contradiction.

    Args:
        history: The run's history.
        ended_well: Whether the run finished or was stopped. The run API is then complete, and nothing is in progress.
    """
    steps = {step: rows for step, rows in history.rollouts.items() if step <= history.ledger_step}
    metrics = {int(row["step"]): row for row in history.metrics if int(row["step"]) <= history.ledger_step}
    found = [
        *_incomplete_groups(steps, history.num_generations),
        *_wrong_rewards(steps),
        *_disordered_stamps(steps),
        *_wrong_metrics(metrics, steps, history),
        *_wrong_counts(metrics, history),
        *_prompts_trained_twice(steps, history.num_prompts),
        *_wrong_evaluations(history, is_complete=ended_well and not history.was_stopped),
    ]
    return [*found, *history.weight_problems, *_what_the_api_says(history)] if ended_well else found


def _incomplete_groups(steps: Mapping[int, Sequence[Row]], num_generations: int) -> Iterable[str]:
    for step, rows in steps.items():
        times = Counter((str(row["group_id"]), int(row["branch"])) for row in rows)
        groups = {group for group, _ in times}
        if times != Counter((group, branch) for group in groups for branch in range(num_generations)):
            yield f"step {step}: its groups do not have {num_generations} completions each, once"


def _wrong_rewards(steps: Mapping[int, Sequence[Row]]) -> Iterable[str]:
    for step, row in _rows(steps):
        if row.get("lost"):
            continue  # a tool worker was killed twice in one call
        values = {name: outcome["value"] for name, outcome in row["rewards"].items()}
        if values[workload.LENGTH_REWARD] != workload.length_reward(row):
            yield f"step {step}, group {row['group_id']}: a completion has the reward of another"
        if not math.isclose(row["reward"], sum(values.values())):
            yield f"step {step}, group {row['group_id']}: the reward {row['reward']} is not the sum of {values}"


def _disordered_stamps(steps: Mapping[int, Sequence[Row]]) -> Iterable[str]:
    for step, row in _rows(steps):
        times = [float(at_s) for _, at_s, _ in row["stamps"]]
        if [str(what) for what, _, _ in row["stamps"]] != _STAMPS or times != sorted(times):
            yield f"step {step}, group {row['group_id']}: its stamps are out of order: {row['stamps']}"


def _wrong_metrics(
    metrics: Mapping[int, Row], steps: Mapping[int, Sequence[Row]], history: RunHistory
) -> Iterable[str]:
    """Recompute each step's metrics from its rollouts."""
    num_tokens = 0.0
    for step, row in sorted(metrics.items()):
        rollouts = steps.get(step, ())
        if not rollouts:
            return  # a step without rollouts is already reported
        if any(rollout.get("lost") for rollout in rollouts):
            return  # the log does not say how many of its tokens count
        lengths = [int(rollout["num_tokens"]) for rollout in rollouts]
        num_tokens += sum(lengths) + history.prompt_tokens * len(rollouts)
        counted = {
            "reward": sum(float(rollout["reward"]) for rollout in rollouts) / len(rollouts),
            "completions/mean_length": sum(lengths) / len(rollouts),
            "num_tokens": num_tokens,
            "groups/trained": step * history.groups_per_step,
            "staleness/max": max(float(rollout["staleness"]) for rollout in rollouts),
        }
        for name, value in counted.items():
            if not math.isclose(float(row[name]), value, rel_tol=1e-6, abs_tol=1e-6):
                yield f"metrics of step {step}: {name} is {row[name]}, but its rollouts give {value}"
                return


def _wrong_counts(metrics: Mapping[int, Row], history: RunHistory) -> Iterable[str]:
    """Compare the group counts of successive metrics with each other, and the last ones with the ledger."""
    in_order = [row for _, row in sorted(metrics.items())]
    for earlier, later in itertools.pairwise(in_order):
        for name in ("groups/admitted", "groups/dropped"):
            if later[name] < earlier[name]:
                yield f"metrics of step {int(later['step'])}: {name} falls from {earlier[name]} to {later[name]}"
    if in_order and history.ledger is not None:
        dropped = {reason: len(numbers(runs)) for reason, runs in history.ledger["dropped"].items()}
        last = in_order[-1]
        said = {
            name.removeprefix("groups/dropped/"): int(value)
            for name, value in last.items()
            if name.startswith("groups/dropped/")
        }
        if sum(said.values()) != last["groups/dropped"] or any(
            count > dropped.get(reason, 0) for reason, count in said.items()
        ):
            yield f"metrics of step {int(last['step'])} dropped {said}, the ledger {dropped}"


def _prompts_trained_twice(steps: Mapping[int, Sequence[Row]], num_prompts: int) -> Iterable[str]:
    """Yield the epochs in which a prompt was trained under two admission numbers."""
    epochs: dict[int, dict[int, str]] = {}
    for _, row in _rows(steps):
        number = int(row["group_id"])
        epochs.setdefault(number // num_prompts, {})[number] = str(row["prompt"])
    for epoch, prompts in sorted(epochs.items()):
        if again := sorted(prompt for prompt, times in Counter(prompts.values()).items() if times > 1):
            yield f"epoch {epoch} trained prompts twice: {', '.join(again[:_MAX_NAMED])}"


def _wrong_evaluations(history: RunHistory, *, is_complete: bool) -> Iterable[str]:
    every, accounted, last = history.eval_steps, 0, 0
    reported = {int(row["step"]) for row in history.evaluations}
    if unreported := sorted(history.evaluation_rollouts.keys() - reported):
        yield f"evaluations of steps {unreported} have completions, but no line in evaluations.jsonl"
    for row in history.evaluations:
        step = int(row["step"])
        if step <= last:
            yield f"the evaluation of step {step} comes after the evaluation of step {last}"
        last = step
        accounted += 1 + int(row["eval_skipped"])
        if accounted != step // every:
            yield f"{accounted} evaluations are accounted for up to step {step}; {step // every} were due"
            return
        rows = history.evaluation_rollouts.get(step, ())
        times = Counter((str(found["group_id"]), int(found["branch"])) for found in rows)
        expected = history.num_eval_prompts * history.num_generations
        if int(row["eval_groups/done"]) != history.num_eval_prompts or not (len(times) == len(rows) == expected):
            yield (
                f"the evaluation of step {step} has {int(row['eval_groups/done'])} prompts and {len(rows)} "
                f"completions; {history.num_eval_prompts} prompts and {expected} were due"
            )
    if is_complete and accounted != history.ledger_step // every:
        yield f"{accounted} evaluations were made or skipped; {history.ledger_step // every} were due"


def _what_the_api_says(history: RunHistory) -> Iterable[str]:
    if history.ledger is None:
        return
    expected: dict[str, Any] = {
        "step": history.ledger_step,
        "policy_version": history.ledger_step,
        "groups_admitted": int(history.ledger["admitted"]),
        "groups_trained": len(numbers(history.ledger["trained"])),
        "groups_dropped": {
            reason: len(numbers(runs)) for reason, runs in history.ledger["dropped"].items() if numbers(runs)
        },
    }
    said = {name: history.progress.get(name) for name in expected}
    if said != expected:
        yield f"the run API says {said}; the ledger has {expected}"


def _rows(steps: Mapping[int, Sequence[Row]]) -> Iterable[tuple[int, Row]]:
    return ((step, row) for step, rows in steps.items() for row in rows)
