"""Finds problems in a run's newest metrics, and describes them in sentences for the run API and the command line.

    metrics.jsonl, its last lines --+
    evaluations.jsonl, last line ---+--> find_warnings --> kind for programs, sentence for people
    config -------------------------+

Pure, except read_warnings. Until a run has MIN_BATCHES batches, only its evaluations give warnings. A metric that lines
lack, as in files of an older release, gives no warning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from services.trainer.run_outputs import read_last_evaluation, read_last_metrics

WarningKind = Literal[
    "nothing_learned", "evaluation_skipped", "evaluation_incomplete", "generators_wait", "trainer_starves",
    "mostly_truncated", "reward_fails", "no_tool_calls",
]  # fmt: skip

MIN_BATCHES, MAX_BATCHES = 5, 10
_MAX_LINES = 100
"""Lines to read, or more if they would hold fewer than MIN_BATCHES batches, which have many optimizer steps then."""
_STARVED, _BOTH_WAIT = 0.5, 0.2
"""Shares of the trainer's time above which a warning is given."""
_NOTHING_AHEAD, _TRUNCATED, _FAILED, _DROPPED = 0.8, 0.5, 0.1, 0.9
"""Shares of batches, completions, completions and groups above which a warning is given."""


@dataclass(frozen=True)
class RunWarning:
    """A likely problem of a run, found in its metrics.

    Args:
        kind: A stable name that programs may compare.
        says: One or two sentences for people. The wording may change.
    """

    kind: WarningKind
    says: str


def read_warnings(run_dir: Path, config: Mapping[str, Any]) -> list[RunWarning]:
    """Return the warnings about a run from its files; an empty list if they cannot be read. Blocks on the disk."""
    steps = _steps_per_batch(config)
    num_lines = min(max(_MAX_LINES, MIN_BATCHES * steps), MAX_BATCHES * steps)
    try:
        return find_warnings(read_last_metrics(run_dir, limit=num_lines), read_last_evaluation(run_dir), config)
    except OSError:  # a file that cannot be read must not hide the run
        return []


def find_warnings(
    lines: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any], config: Mapping[str, Any]
) -> list[RunWarning]:
    """Return the warnings that a run's newest metrics and its newest evaluation give, the worst first.

    Args:
        lines: The newest lines of metrics, oldest first, of at most MAX_BATCHES batches.
        evaluation: The newest evaluation; empty without any.
        config: The run's settings.
    """
    batches = [line for line in lines if "reward" in line]
    found: list[RunWarning | None] = []
    if len(batches) >= MIN_BATCHES:
        found = [
            _nothing_learned(batches),
            *_failing_rewards(batches),
            _unscorable(batches),
            _truncated(batches, config),
            _without_calls(batches, config),
            _waiting(lines, batches, config),
        ]
    found += [_skipped(evaluation, config), _incomplete(evaluation)]
    return [warning for warning in found if warning is not None]


def _nothing_learned(batches: Sequence[Mapping[str, Any]]) -> RunWarning | None:
    equal = _values(batches, "frac_reward_zero_std")
    rewards = _values(batches, "reward")
    if len(equal) == len(batches) and min(equal) == 1.0 and rewards:
        return RunWarning(
            "nothing_learned",
            f"nothing was learned in the last {len(batches)} batches: the rewards in each group were all equal (mean "
            f"reward {rewards[-1]:.3g}). Either the task is too hard or already solved, or the reward functions do not "
            "tell completions apart",
        )
    dropped = _growth(batches, "groups/dropped/zero_std")
    settled = _num_settled(batches)
    if settled and dropped / settled >= _DROPPED:
        return RunWarning(
            "nothing_learned",
            f"{dropped:.0f} of the last {settled:.0f} groups were dropped because their rewards were all equal: most "
            "of the sampling teaches nothing",
        )
    return None


def _failing_rewards(batches: Sequence[Mapping[str, Any]]) -> list[RunWarning]:
    names = {name.split("/", 1)[1].rsplit("/", 1)[0] for line in batches for name in line if _is_failed_ratio(name)}
    found: list[RunWarning] = []
    for name in sorted(names):
        share = _mean(_values(batches, f"rewards/{name}/failed_ratio"))
        if share > _FAILED:
            found.append(
                RunWarning(
                    "reward_fails",
                    f"reward function {name} failed for {share:.0%} of the completions of the last {len(batches)} "
                    "batches; its messages are in the rollouts and in the rewarder's log",
                )
            )
    return found


def _unscorable(batches: Sequence[Mapping[str, Any]]) -> RunWarning | None:
    """Warn if many groups were dropped because too few of their completions were scored.

    Such groups are in none of the reward metrics.
    """
    dropped, settled = _growth(batches, "groups/dropped/unscorable"), _num_settled(batches)
    if not settled or dropped / settled <= _FAILED:
        return None
    return RunWarning(
        "reward_fails",
        f"{dropped:.0f} of the last {settled:.0f} groups were dropped because reward functions failed for their "
        "completions; the rewarder's log has the messages",
    )


def _is_failed_ratio(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/failed_ratio")


def _truncated(batches: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> RunWarning | None:
    share = _mean(_values(batches, "completions/clipped_ratio"))
    if share <= _TRUNCATED:
        return None
    return RunWarning(
        "mostly_truncated",
        f"{share:.0%} of the completions of the last {len(batches)} batches hit a length limit before they ended "
        f"(max_completion_length={config.get('max_completion_length')})",
    )


def _without_calls(batches: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> RunWarning | None:
    """Warn if no tool was called. A tool-call parser that does not fit the policy leaves the calls in the text."""
    calls = _values(batches, "tools/call_frequency")
    has_tools = config.get("tools") or config.get("mcp_servers")  # an environment may have none
    if not has_tools or len(calls) < len(batches) or any(calls):
        return None
    return RunWarning(
        "no_tool_calls",
        f"no tool was called in the last {len(batches)} batches. If the rollouts show calls as text, set "
        "tool_call_parser to another of vLLM's parsers",
    )


def _waiting(
    lines: Sequence[Mapping[str, Any]], batches: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> RunWarning | None:
    timed = [line for line in lines if _is_number(line.get("wait_time")) and _is_number(line.get("step_time"))]
    timed = [line for line in timed if line.get("step") != 1]  # it waits for everything to start
    step_s, wait_s = sum(_values(timed, "step_time")), sum(_values(timed, "wait_time"))
    ahead = _values(batches, "queue/ahead")
    if not step_s or not ahead:
        return None
    share, num_idle = wait_s / step_s, ahead.count(0.0)
    if num_idle / len(ahead) >= _NOTHING_AHEAD:
        says = (
            f"the generators wait for the trainer: in {num_idle} of the last {len(ahead)} batches, all groups that may "
            "be in flight were scored before the batch was trained"
        )
        if share >= _BOTH_WAIT:
            bound = config.get("max_staleness")
            says += (
                f". The trainer in turn waited for {share:.0%} of its time: max_staleness={bound} is too small for "
                "both to work at the same time"
            )
        else:
            says += f", and the trainer waited for only {share:.0%} of its time. Fewer generators are enough"
        return RunWarning("generators_wait", says)
    if share <= _STARVED:
        return None
    at_generators, at_rewarders = (_mean(_values(lines, f"queue/{name}")) for name in ("prompts", "completions"))
    slower, add = ("scoring", "rewarders") if at_rewarders > at_generators else ("sampling", "generators")
    return RunWarning(
        "trainer_starves",
        f"the trainer waited for groups for {share:.0%} of its time in the last {len(ahead)} batches; {slower} is the "
        f"slowest part. More {add} would help: {at_generators:.0f} groups were with generators and "
        f"{at_rewarders:.0f} with rewarders when a step ended",
    )


def _skipped(evaluation: Mapping[str, Any], config: Mapping[str, Any]) -> RunWarning | None:
    skipped = evaluation.get("eval_skipped")
    if not _is_number(skipped) or skipped < 1:
        return None
    count = "1 evaluation was" if skipped == 1 else f"{skipped:.0f} evaluations were"
    every, steps = config.get("eval_steps"), _steps_per_batch(config)
    why = f"an evaluation takes longer than eval_steps={every} steps; raise eval_steps or lower max_eval_prompts"
    if _is_number(every) and 1 <= every < steps:
        why = f"evaluations begin between batches, and a batch has {steps} steps; set eval_steps to {steps} or more"
    return RunWarning(
        "evaluation_skipped", f"{count} skipped before that of step {evaluation['step']:.0f}, because {why}"
    )


def _incomplete(evaluation: Mapping[str, Any]) -> RunWarning | None:
    missing, done = evaluation.get("eval_groups/missing"), evaluation.get("eval_groups/done")
    unscored = evaluation.get("eval_groups/unscored", 0)
    if not _is_number(missing) or not _is_number(done) or not _is_number(unscored) or missing + unscored < 1:
        return None
    step, num_prompts = evaluation["step"], missing + done
    return RunWarning(
        "evaluation_incomplete",
        f"the evaluation of step {step:.0f} has no score for {missing + unscored:.0f} of {num_prompts:.0f} prompts",
    )


def _steps_per_batch(config: Mapping[str, Any]) -> int:
    return int(config.get("num_iterations") or 1) * int(config.get("steps_per_generation") or 1)


def _num_settled(batches: Sequence[Mapping[str, Any]]) -> float:
    return _growth(batches, "groups/trained") + _growth(batches, "groups/dropped")


def _growth(batches: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return by how much a running total grew from the first batch to the last. A total that is absent is 0."""
    first, last = (line.get(name) or 0.0 for line in (batches[0], batches[-1]))
    return float(last) - float(first)


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(line[name]) for line in lines if _is_number(line.get(name))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
