"""Computes how many generators and reward workers keep a trainer busy, and how stale samples are. Pure.

docs/operations.md derives the formulas, with these letters:

R  sampled tokens the trainer trains per second      g  tokens a generator replica samples per second
I  passes over a batch (num_iterations)              T  seconds of a step that never waits
h  seconds for which a push stops decoding           S  max_staleness
"""

import math

from headrace.plan.memory import groups_that_fit
from headrace.plan.rows import Row
from headrace.plan.workload import Workload

PACE, REWARDER = "pace", "rewarder"
_TRAINER_RATE = (
    "give --trainer-tokens-per-s: throughput/trained_tokens_per_s of a run (--from-run RUN), or `make bench-trainer`, "
    "whose rate counts prompts as well: times completion / (prompt + completion)"
)
_GENERATOR_RATE = (
    "give --generator-tokens-per-s: throughput/generated_tokens_per_s of a run whose trainer waits, over its "
    "generators; rate(headrace_generated_tokens_total[5m]) of a busy one; or `make bench-generator`"
)
_LENGTHS = "give --completion-tokens: completions/mean_length of a run, or the expected length"
_REWARD_TIME = (
    "give --reward-s: headrace_reward_seconds_sum / _count of each function, added up; `headrace rewards check` tries "
    "one"
)
_STANDSTILL = "; pushes are not counted: give --push-standstill-s (push/standstill_s, or `make bench-push`)"
_TAKES_TURNS = "with max_staleness: 0 sampling and training take turns: no number of generators keeps the trainer busy"


def pace_rows(work: Workload) -> list[Row]:
    """Return the rows on speed: groups in flight, rates, the duration of a step, generators and staleness.

    Rows that depend on an unknown rate are left out, or say how to measure it.
    """
    rates, tokens, step_s = work.rates, work.tokens_per_step, step_seconds(work)
    rows = [
        _row("groups in flight", work.max_unsettled, "groups", "at most: whole batches in (S + 1) x groups_per_step"),
        _row("sampled tokens a step", tokens, "tokens", _tokens_how(work)),
        _row("trainer's rate", rates.trainer_tokens_per_s, "tokens/s", _source(work, is_trainer=True)),
        _row("one generator's rate", rates.generator_tokens_per_s, "tokens/s", _source(work, is_trainer=False)),
    ]
    if rates.trainer_tokens_per_s is None:
        return rows
    rows.append(_row("a step that never waits", step_s, "s", _LENGTHS if step_s is None else "tokens a step / R"))
    needed = rates.trainer_tokens_per_s / work.config.num_iterations / (1.0 - rates.drop_share)
    how = f"R / num_iterations={work.config.num_iterations}"
    how += f" / (1 - {rates.drop_share:g} that are dropped)" if rates.drop_share else ", if no group is dropped"
    rows.append(_row("generated, to keep it busy", needed, "tokens/s", how))
    return [*rows, *_generators(work, needed, step_s)]


def reward_rows(work: Workload) -> list[Row]:
    """Return the rows on rewards: the groups to score per second, and the reward workers that they keep busy."""
    groups_per_s = groups_per_second(work)
    if groups_per_s is None:
        return []
    rows = [
        Row(
            REWARDER,
            "groups to score",
            groups_per_s,
            "groups/s",
            "groups_per_step / num_iterations / T, plus dropped groups",
        )
    ]
    reward_s = work.rates.reward_s
    if reward_s is None:
        return [*rows, Row(REWARDER, "workers", None, "workers", _REWARD_TIME)]
    how = f"groups/s x {reward_s:g} s, rounded up: a worker makes one call of a synchronous function at a time"
    return [*rows, Row(REWARDER, "workers", float(math.ceil(groups_per_s * reward_s - 1e-9)), "workers", how)]


def groups_per_second(work: Workload) -> float | None:
    """Return the sampled groups per second that keep the trainer busy; None if a step's duration is unknown."""
    step_s = step_seconds(work)
    if step_s is None:
        return None
    return work.config.groups_per_step / work.config.num_iterations / step_s / (1.0 - work.rates.drop_share)


def step_seconds(work: Workload) -> float | None:
    """Return the seconds of a step that never waits: its sampled tokens over the trainer's rate; None if unknown."""
    tokens, rate = work.tokens_per_step, work.rates.trainer_tokens_per_s
    return None if tokens is None or rate is None else tokens / rate


def _generators(work: Workload, needed: float, step_s: float | None) -> list[Row]:
    generator, stop_s = work.rates.generator_tokens_per_s, work.rates.push_standstill_s
    if work.config.max_staleness == 0:
        return [_row("generators", None, "replicas", _TAKES_TURNS)]
    if generator is None:
        return [_row("generators", None, "replicas", "generated / one generator's rate, which is missing")]
    share, how = 1.0, "generated / g"
    if work.rates.holds_pushes:
        how = "generated / g, which includes pushes"
    elif stop_s is None or step_s is None:
        how += _STANDSTILL
    else:
        batch_s = step_s * work.config.steps_per_batch()  # weights are pushed once a batch
        share = 1.0 - stop_s / batch_s
        how = f"generated / (g x (1 - {stop_s:g} s / {batch_s:.3g} s)), h over the steps of a batch"
    if share <= 0:
        how = f"a push stops decoding for {stop_s:g} s, longer than the steps of a batch take"
        return [_row("generators", None, "replicas", how, True)]
    exact = needed / (generator * share)
    replicas = max(1, math.ceil(exact - 1e-9))
    if work.rates.is_generator_lower_bound:
        how += "; at most: g is a lower bound"
    gpus = replicas * work.engine.num_gpus
    rows = [
        _row("generators", replicas, "replicas", f"{how} = {exact:.2f}, rounded up"),
        _row(
            "generator GPUs a trainer GPU",
            gpus / work.trainer_gpus,
            "GPUs",
            f"{replicas} replicas x {work.engine.num_gpus} GPUs / {work.trainer_gpus} of the trainer",
        ),
        _groups_each(work, replicas),
    ]
    return rows if step_s is None else rows + _staleness(work, replicas, generator, step_s)


def _groups_each(work: Workload, replicas: int) -> Row:
    each = work.max_unsettled / replicas
    if each < 1:
        how = "fewer groups in flight than generators: raise max_staleness or groups_per_step"
    else:
        how = "groups in flight / generators; g must have been measured with as many"
    return _row("groups in flight at each", each, "groups", how, each < 1)


def _staleness(work: Workload, replicas: int, generator: float, step_s: float) -> list[Row]:
    config, fit = work.config, groups_that_fit(work)
    held, what = float(work.max_unsettled), "all that admission lets in"
    if fit is not None and fit[1] * replicas + config.groups_per_step < held:
        held, what = fit[1] * replicas + config.groups_per_step, "in engines, and a step's groups that wait"
    expected = min(float(config.max_staleness), max(0.0, held / config.groups_per_step - 1.0))
    running = min(work.max_unsettled / replicas, fit[1] if fit else math.inf) * config.num_generations
    longest_s = config.max_completion_length * running / generator
    steps = longest_s / step_s
    is_late = steps > config.max_staleness
    less = ", or less if they are faster than needed" if config.admission == "just_in_time" else ""
    late = f": more than max_staleness={config.max_staleness}, so batches wait for it" if is_late else ""
    return [
        _row(
            "staleness, about",
            expected,
            "steps",
            f"{held:.0f} groups ({what}) / groups_per_step - 1, at most S{less}",
        ),
        _row(
            "the longest completion",
            longest_s,
            "s",
            f"max_completion_length x {running:.0f} sequences at a time / g = {steps:.1f} steps{late}",
            is_late,
        ),
    ]


def _tokens_how(work: Workload) -> str:
    return _LENGTHS if work.tokens_per_step is None else "groups_per_step x num_generations x mean completion"


def _source(work: Workload, *, is_trainer: bool) -> str:
    rates = work.rates
    if is_trainer:
        return _TRAINER_RATE if rates.trainer_tokens_per_s is None else rates.trainer_source
    if rates.generator_tokens_per_s is None:
        return _GENERATOR_RATE
    if rates.is_generator_lower_bound:
        return f"{rates.generator_source}; at least: the trainer was slower, and generators waited"
    return rates.generator_source


def _row(name: str, value: float | None, unit: str, how: str, is_warning: bool = False) -> Row:
    return Row(PACE, name, None if value is None else float(value), unit, how, is_warning)
