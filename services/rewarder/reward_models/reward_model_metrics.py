"""Prometheus metrics of reward models: loads, processes, and the time and size of forward passes."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.rewarder.reward_models.model_frames import Passed
from services.rewarder.rewarder_metrics import SECONDS

_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class RewardModelMetrics:
    """The Prometheus metrics of reward models.

    The label ``model`` has only names of loaded models, so its number of values is bounded.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.forward_seconds = Histogram(
            "headrace_reward_model_forward_seconds",
            "Time of one forward pass of a reward model",
            ["model"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_texts = Histogram(
            "headrace_reward_model_batch_texts",
            "Texts in one forward pass of a reward model",
            ["model"],
            buckets=_TEXTS,
            registry=registry,
        )
        self.tokens = Counter(
            "headrace_reward_model_tokens",
            "Tokens and padding that a reward model has processed",
            ["model", "kind"],
            registry=registry,
        )
        self.loads = Counter(
            "headrace_reward_model_loads", "Attempts to load a reward model", ["result"], registry=registry
        )
        self.kills = Counter(
            "headrace_reward_model_kills",
            "Processes of reward models that ended, by reason",
            ["reason"],
            registry=registry,
        )
        self.loaded = Gauge("headrace_reward_models_loaded", "Running processes of reward models", registry=registry)

    def observe_pass(self, model: str, done: Passed) -> None:
        """Record the time of one forward pass, and its numbers of texts, tokens and padding tokens."""
        self.forward_seconds.labels(model).observe(done.seconds)
        self.batch_texts.labels(model).observe(done.num_texts)
        self.tokens.labels(model, "text").inc(done.num_tokens)
        self.tokens.labels(model, "padding").inc(done.num_padded_tokens - done.num_tokens)
