"""The input of a plan: a run, its mean lengths, the machines, and measured rates."""

from dataclasses import dataclass

from headrace.plan.model_shape import ModelShape
from services.trainer.groups.schedule import BatchShape
from services.trainer.groups.staleness import window
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

_FOR_EVER = 1 << 40


@dataclass(frozen=True)
class Rates:
    """Measured rates. None means unknown.

    Attributes:
        trainer_tokens_per_s: Sampled tokens trained per second of training; waiting and pushes are not counted.
        generator_tokens_per_s: Sampled tokens per second of one replica.
        push_standstill_s: Seconds for which a push stops decoding.
        reward_s: Seconds that the reward functions take for one group.
        turns: Mean turns of a rollout with tools.
        turn_cpu_s: Seconds of processor time that the sessions service needs for one turn.
        drop_share: Share of the sampled groups that are dropped, from 0 to below 1.
        is_generator_lower_bound: Whether the generators waited for work and could have sampled more.
        holds_pushes: Whether the generators' rate includes the time of weight pushes.
        trainer_source: Where the trainer's rate comes from, in words.
        generator_source: Where the generators' rate comes from, in words.
    """

    trainer_tokens_per_s: float | None = None
    generator_tokens_per_s: float | None = None
    push_standstill_s: float | None = None
    reward_s: float | None = None
    turns: float | None = None
    turn_cpu_s: float | None = None
    drop_share: float = 0.0
    is_generator_lower_bound: bool = False
    holds_pushes: bool = False
    trainer_source: str = "given"
    generator_source: str = "given"


@dataclass(frozen=True)
class Engine:
    """The split of one generator replica over GPUs.

    Attributes:
        tensor_parallel: Number of GPUs that share each layer, split by attention heads.
        pipeline_parallel: Number of stages that share the layers.
        data_parallel: Number of complete engines, each with its own KV cache.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1

    @property
    def gpus_of_a_model(self) -> int:
        """The number of GPUs that together hold one copy of the weights."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of the replica."""
        return self.gpus_of_a_model * self.data_parallel


@dataclass(frozen=True)
class Workload:
    """The run, machines and rates that a plan is computed for. Lengths are means, in tokens. None means unknown."""

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
        """Bytes of one weight as it is pushed and served."""
        return 2 if self.config.dtype == "bfloat16" else 4

    @property
    def max_unsettled(self) -> int:
        """The most groups that admission allows to be neither trained nor dropped."""
        shape = BatchShape.of(self.config)
        return window(num_steps_left=_FOR_EVER, max_staleness=self.config.max_staleness, shape=shape)

    @property
    def adapter_parameters(self) -> int | None:
        """Number of weights in the adapters of a LoRA run on every linear layer; None if unknown."""
        linear = None if self.shape is None else self.shape.num_linear_inputs_and_outputs
        return None if linear is None or self.config.lora_target_modules else self.config.lora_r * linear

    @property
    def tokens_per_step(self) -> float | None:
        """Sampled tokens in one optimizer step; None if the mean length is unknown."""
        if self.completion_tokens is None:
            return None
        return self.config.groups_per_step * self.config.num_generations * self.completion_tokens


def spread(config: RunConfig, shape: ModelShape | None, *, num_gpus: int | None) -> Engine:
    """Return how a generator replica is split over GPUs by the parallel sizes in the run's vllm section.

    If ``num_gpus`` is given, the tensor parallelism is chosen so that the replica has this many GPUs.

    Raises:
        UserError: vLLM cannot split the model this way. The message lists the numbers of GPUs that work.
    """
    tensor, pipeline, data = (
        int(config.vllm.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline", "data")
    )
    named = f"tensor_parallel_size={tensor}"
    if num_gpus is not None:
        if num_gpus % (pipeline * data):
            raise UserError(
                f"--generator-gpus {num_gpus} is not a multiple of pipeline_parallel_size={pipeline} x "
                f"data_parallel_size={data} of the run's vllm section"
            )
        tensor, named = num_gpus // (pipeline * data), f"--generator-gpus {num_gpus}"
    if shape is not None and not shape.splits_over(tensor):
        sizes = [str(size) for size in range(1, shape.num_heads + 1) if shape.splits_over(size)]
        raise UserError(
            f"{named} splits each layer over {tensor} GPUs, and {shape.num_heads} attention heads "
            f"({shape.num_kv_heads} of keys and values) cannot be shared evenly: choose from {', '.join(sizes)}. "
            f"For whole engines side by side, set data_parallel_size in the run's vllm section"
        )
    return Engine(tensor, pipeline, data)
