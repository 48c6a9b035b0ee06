"""Every metric that steps and evaluations log: its name, unit and meaning, and whether TRL logs it too.

    METRICS --> docs/metrics.md      the table for readers (docs/make_metrics_page.py)
            --> run_metrics.py       names, units and help texts for Prometheus
            --> reports.py           the metrics that are not averaged over logging_steps

``{reward}`` and ``{reason}`` in a name stand for a reward function and for the reason of a drop. A test fails if a
logged metric is missing here, or if a metric here is never logged.
"""

import re
from dataclasses import dataclass
from functools import cached_property

EVALUATION = "eval_"
"""Prefix of the metrics of an evaluation."""

_WORDS = {"share": "ratio", "tokens/s": "tokens_per_second"}
"""Names of units in Prometheus, where they differ."""


@dataclass(frozen=True)
class Metric:
    """The name, unit and meaning of a metric that is logged for steps or evaluations.

    Attributes:
        name: Name in metrics.jsonl.
        unit: Empty for a plain number.
        meaning: One sentence.
        in_trl: Whether TRL's GRPOTrainer logs the same metric under this name.
        when: The condition under which the metric is logged; empty if every step logs it.
        is_latest: Whether several steps are summarised by the newest value instead of the mean.
    """

    name: str
    unit: str
    meaning: str
    in_trl: bool = False
    when: str = ""
    is_latest: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """A pattern that matches logged names of this metric, with the placeholders as named groups."""
        return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(self.name)))

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The placeholders in the name, such as ``reward``, which become Prometheus labels."""
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @cached_property
    def prometheus_name(self) -> str:
        """The Prometheus name: with the unit, without placeholders."""
        plain = re.sub(r"/\{(\w+)\}$", r"_by_\1", self.name)
        plain = re.sub(r"/\{\w+\}", "", plain).replace("/", "_")
        plain = plain.removesuffix("_tokens_per_s").removesuffix("_s")
        word = _WORDS.get(self.unit, self.unit)
        return f"headrace_training_{plain}" + (f"_{word}" if word and word.removesuffix("s") not in plain else "")


def find_metric(name: str) -> tuple[Metric, dict[str, str]] | None:
    """Return the metric with this name and the values of its placeholders, or None for unknown names.

    A name with the prefix ``eval_`` is looked up as it is, and then without the prefix.
    """
    for wanted in dict.fromkeys((name, name.removeprefix(EVALUATION))):
        for metric in METRICS:
            if match := metric.pattern.fullmatch(wanted):
                return metric, match.groupdict()
    return None


def is_latest(name: str) -> bool:
    """Return whether several steps are summarised by this metric's newest value, not the mean; False if unknown."""
    found = find_metric(name)
    return found is not None and found[0].is_latest


def _trl(name: str, unit: str, meaning: str, *, when: str = "", is_latest: bool = False) -> Metric:
    return Metric(name, unit, meaning, in_trl=True, when=when, is_latest=is_latest)


_CLIPPED = "loss_type grpo, dr_grpo, dapo, bnpo or luspo"
_CORRECTED = "vllm_importance_sampling_correction"
_BONUS = "entropy_coef or use_adaptive_entropy"
_EXPERTS = "router_aux_loss_coef and a mixture-of-experts model"
_CUDA = "a GPU"
_EVALUATION = "eval_steps"
_AGENTS = "rollouts that sessions play"

METRICS = (
    # Position in the run
    Metric("step", "steps", "Optimizer steps done", is_latest=True),
    Metric("at_s", "seconds", "When the step ended, in Unix time", is_latest=True),
    _trl("num_tokens", "tokens", "Tokens trained on so far: every completion with its prompt", is_latest=True),
    _trl(
        "step_time", "seconds", "From the end of the previous step to the end of this one; includes waiting, not pauses"
    ),
    Metric("train_time", "seconds", "Part of step_time in forward and backward passes and the optimizer step"),
    Metric("wait_time", "seconds", "Part of step_time in which too few scored groups had arrived for a batch"),
    Metric("paused_s", "seconds", "Total time for which the run was paused so far", is_latest=True),
    # Completions
    _trl("completions/mean_length", "tokens", "Mean length of the completions"),
    _trl("completions/min_length", "tokens", "Shortest completion"),
    _trl("completions/max_length", "tokens", "Longest completion"),
    _trl("completions/clipped_ratio", "share", "Completions that hit a length limit instead of ending by themselves"),
    _trl("completions/mean_terminated_length", "tokens", "Mean length of completions that hit no limit; 0 without any"),
    _trl("completions/min_terminated_length", "tokens", "Shortest completion that hit no limit; 0 without any"),
    _trl("completions/max_terminated_length", "tokens", "Longest completion that hit no limit; 0 without any"),
    _trl("tools/call_frequency", "", "Tool calls per completion, lost ones included", when=_AGENTS),
    _trl("tools/failure_frequency", "share", "Tool calls that failed; 0 without any", when=_AGENTS),
    Metric("rollouts/lost", "rollouts", "Completions that could not be played to their end", when=_AGENTS),
    Metric(
        "rollouts/rows_mean", "",
        "Rows of tokens per completion that is not lost; above 1 if histories were rewritten", when=_AGENTS,
    ),
    # Rewards
    _trl("rewards/{reward}/mean", "", "Mean of one reward function over the completions it applies to"),
    _trl("rewards/{reward}/std", "", "Standard deviation of one reward function over these completions"),
    Metric(
        "rewards/{reward}/failed_ratio", "share",
        "Completions for which the function failed or timed out, or that were lost before it could be called",
    ),
    Metric("rewards/{reward}/latency_s", "seconds", "Mean time the function took for one prompt group"),
    _trl("reward", "", "Mean of the weighted sum of the reward functions over all scored completions of the batch"),
    _trl("reward_std", "", "Standard deviation of these weighted sums over the batch"),
    _trl(
        "frac_reward_zero_std", "share",
        "Completions whose advantage is divided by a standard deviation of zero, because their group has equal "
        "rewards; all or no completions with scale_rewards: batch",
    ),
    # Optimizer
    _trl("loss", "", "The loss that was minimised"),
    _trl("grad_norm", "", "Norm of the gradient before clipping", is_latest=True),
    _trl("learning_rate", "", "Learning rate of this step", is_latest=True),
    _trl("entropy", "nats", "Mean entropy of the policy at the sampled tokens"),
    _trl("kl", "nats", "Mean KL divergence from the reference model (k3 estimator)", when="beta > 0"),
    _trl("aux_loss", "", "Load-balancing loss of the experts, before its coefficient", when=_EXPERTS),
    _trl("policy_loss", "", "The loss without the entropy bonus and the load-balancing loss", when=_BONUS),
    _trl("entropy_coef", "", "Weight of the entropy bonus after the step", when=_BONUS),
    Metric("num_bounded_ratios", "", "Ratios of policy, KL term and correction weights above e^20; they count as e^20"),
    _trl("clip_ratio/low_mean", "share", "Tokens whose ratio was clipped from below", when=_CLIPPED),
    _trl("clip_ratio/low_min", "share", "Smallest share of one completion's tokens clipped from below", when=_CLIPPED),
    _trl("clip_ratio/high_mean", "share", "Tokens whose ratio was clipped from above", when=_CLIPPED),
    _trl("clip_ratio/high_max", "share", "Largest share of one completion's tokens clipped from above", when=_CLIPPED),
    _trl("clip_ratio/region_mean", "share", "Tokens clipped from either side", when=_CLIPPED),
    _trl("cispo_clip_ratio", "share", "Tokens whose ratio was clipped", when="loss_type cispo"),
    _trl("vespo/phi_seq_mean", "", "Mean weight of a completion", when="loss_type vespo"),
    # Mismatch of generator and trainer
    _trl("sampling/sampling_logp_difference/mean", "nats", "Mean |trainer's - generator's logprob| of sampled tokens"),
    _trl("sampling/sampling_logp_difference/max", "nats", "Largest such difference of one token"),
    _trl("sampling/importance_sampling_ratio/min", "", "Smallest correction weight, as applied", when=_CORRECTED),
    _trl("sampling/importance_sampling_ratio/mean", "", "Mean correction weight, as applied", when=_CORRECTED),
    _trl("sampling/importance_sampling_ratio/max", "", "Largest correction weight, as applied", when=_CORRECTED),
    Metric("sampling/no_logprob_share", "share", "Sampled tokens without a generator logprob"),
    Metric("sampling/truncated_share", "share", "Correction weights moved to a bound or set to 0", when=_CORRECTED),
    Metric("mismatch_kl/k1", "nats", "KL(generator || trainer) per token: mean of -log r, r the importance ratio"),
    Metric("mismatch_kl/k3", "nats", "KL(generator || trainer) per token by the k3 estimator: mean of r - 1 - log r"),
    Metric("effective_sample_size", "share", "(sum r)^2 / (N sum r^2): effective share of the N weighted tokens"),
    Metric("staleness/min", "steps", "Staleness of the freshest group of the batch"),
    Metric("staleness/mean", "steps", "Mean staleness of the groups of the batch"),
    Metric("staleness/max", "steps", "Staleness of the stalest group; never above max_staleness"),
    # The pipeline
    Metric("groups/admitted", "groups", "Prompt groups admitted so far", is_latest=True),
    Metric("groups/trained", "groups", "Admitted groups that were trained", is_latest=True),
    Metric("groups/dropped", "groups", "Admitted groups that were dropped; the rest is in flight", is_latest=True),
    Metric(
        "groups/dropped/{reason}", "groups", "Groups dropped for this reason", when="a group was dropped",
        is_latest=True,
    ),
    Metric("queue/prompts", "groups", "Groups that wait for a generator or are with one"),
    Metric("queue/completions", "groups", "Groups that wait for a rewarder or are with one"),
    Metric("queue/scored", "groups", "Scored groups that wait to be trained"),
    Metric("queue/settled", "groups", "Trained or dropped groups that are not in a checkpoint yet"),
    Metric(
        "queue/ahead", "groups",
        "Groups that could be sampled and scored while the batch was trained; with 0, generators wait for the trainer",
    ),
    Metric("push/count", "", "Weight pushes so far", is_latest=True),
    Metric("push/confirmed", "", "Pushes that every member of the last attempt confirmed", is_latest=True),
    Metric("push/total_s", "seconds", "Duration of the newest push", when="a push was made"),
    Metric("push/standstill_s", "seconds", "How long generation stood still in the push", when="a push was made"),
    Metric("push/receive_s", "seconds", "Time to the last byte; decoding continues meanwhile", when="a push was made"),
    Metric("push/load_s", "seconds", "Part of the standstill to load weights into the engine", when="a push was made"),
    Metric("push/probe_failed", "", "Generators removed by the probe so far", is_latest=True, when="a probe is made"),
    Metric("push/probe_max_diff", "nats", "Largest logprob difference in the probe", when="a probe was made"),
    Metric("push/bytes", "bytes", "Size of the newest push", when="a push was made"),
    Metric("throughput/generated_tokens_per_s", "tokens/s", "Rate of arriving sampled tokens, over 10 s of steps"),
    Metric("throughput/trained_tokens_per_s", "tokens/s", "Sampled tokens trained on, per second of train_time"),
    Metric("throughput/tokens_per_pass", "tokens", "Mean tokens of a forward pass; max_tokens_per_microbatch if full"),
    Metric(
        "checkpoint/total_s", "seconds", "Time until the newest checkpoint was on disk", when="a checkpoint was written"
    ),
    Metric(
        "checkpoint/standstill_s", "seconds", "How long training stood still for the newest checkpoint",
        when="a checkpoint was written",
    ),
    # Memory of the first rank
    Metric("memory/rss_bytes", "bytes", "Main memory of the process"),
    Metric("memory/peak_rss_bytes", "bytes", "Peak main memory of the process"),
    Metric("memory/device_bytes", "bytes", "GPU memory in tensors", when=_CUDA),
    Metric("memory/device_peak_bytes", "bytes", "Peak GPU memory in tensors during the step", when=_CUDA),
    # Reports
    Metric("reports/lost", "", "Reports that did not reach a tracker", when="report_to", is_latest=True),
    # Only of evaluations
    _trl("eval_runtime", "seconds", "Time from the first prompt to the last score", when=_EVALUATION),
    Metric("eval_policy_version/min", "", "Oldest policy version that sampled its completions", when=_EVALUATION),
    Metric("eval_policy_version/mean", "", "Mean over groups of their oldest policy version", when=_EVALUATION),
    Metric("eval_policy_version/max", "", "Largest over groups of their oldest policy version", when=_EVALUATION),
    Metric(
        "eval_skipped",
        "evaluations",
        "Evaluations that were due since the previous one and that this one replaces",
        when=_EVALUATION,
    ),
    Metric("eval_groups/done", "groups", "Prompts whose groups came back from the rewarder", when=_EVALUATION),
    Metric("eval_groups/missing", "groups", "Prompts without a result", when=_EVALUATION),
    Metric(
        "eval_groups/unscored",
        "groups",
        "Of those, prompts without a scored completion, because reward functions or rollouts failed",
        when=_EVALUATION,
    ),
    Metric("eval_groups/unusable", "groups", "Prompts that are invalid or too long", when=_EVALUATION),
)  # fmt: skip
