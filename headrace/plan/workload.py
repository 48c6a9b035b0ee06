"""What is planned for: a run, its mean lengths, the machines, and rates that somebody measured."""

from dataclasses import dataclass

from headrace.plan.model_shape import ModelShape
from services.trainer.loop.schedule import BatchShape
from services.trainer.loop.staleness import window
from shared.run_config import RunConfig

_FOR_EVER = 1 << 40


@dataclass(frozen=True)
class Rates:
    """Measured; None is not known.

    Attributes:
        trainer_tokens_per_s: Sampled tokens trained a second, over the time of passes and steps alone.
        generator_tokens_per_s: Sampled tokens a second of one replica.
        push_standstill_s: How long a push stops decoding.
        reward_s: Time of the reward functions for one group.
        drop_share: Of all groups that are sampled, those that are dropped and not trained.
        is_generator_lower_bound: Whether the generators could have done more, had they been given more.
        holds_pushes: Whether the generators' rate was measured with weight pushes in it.
        trainer_source: Where the trainer's rate comes from, in words.
        generator_source: Where the generators' does.
    """

    trainer_tokens_per_s: float | None = None
    generator_tokens_per_s: float | None = None
    push_standstill_s: float | None = None
    reward_s: float | None = None
    drop_share: float = 0.0
    is_generator_lower_bound: bool = False
    holds_pushes: bool = False
    trainer_source: str = "given"
    generator_source: str = "given"


@dataclass(frozen=True)
class Engine:
    """How one generator replica is spread over GPUs.

    Attributes:
        tensor_parallel: GPUs among which each layer is split, by key-value heads.
        pipeline_parallel: Stages among which the layers are.
        data_parallel: Whole engines beside each other, each with a KV cache of its own.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1

    @property
    def gpus_of_a_model(self) -> int:
        """GPUs that hold the weights once."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_gpus(self) -> int:
        """GPUs of the replica."""
        return self.gpus_of_a_model * self.data_parallel


@dataclass(frozen=True)
class Workload:
    """One run on some machines. Lengths are means, in tokens; None is not known, as is the shape of any model."""

    config: RunConfig
    shape: ModelShape | None
    num_parameters: int
    prompt_tokens: float | None
    completion_tokens: float | None
    trainer_gpus: int
    engine: Engine
    gpu_bytes: float | None
    engine_bytes: float | None
    rates: Rates

    @property
    def dtype_bytes(self) -> int:
        """Of a weight as it is pushed and served."""
        return 2 if self.config.dtype == "bfloat16" else 4

    @property
    def max_unsettled(self) -> int:
        """Groups that admission lets be neither trained nor dropped."""
        shape = BatchShape.of(self.config)
        return window(num_steps_left=_FOR_EVER, max_staleness=self.config.max_staleness, shape=shape)

    @property
    def adapter_parameters(self) -> int | None:
        """Weights of the adapters of a LoRA run on every linear layer; None if they cannot be told."""
        linear = None if self.shape is None else self.shape.num_linear_inputs_and_outputs
        return None if linear is None or self.config.lora_target_modules else self.config.lora_r * linear

    @property
    def tokens_per_step(self) -> float | None:
        """Sampled tokens that one optimizer step is made on."""
        if self.completion_tokens is None:
            return None
        return self.config.groups_per_step * self.config.num_generations * self.completion_tokens
