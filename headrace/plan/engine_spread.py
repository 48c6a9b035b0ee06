"""Splits one generator replica over GPUs, by the run's vllm section and the number of GPUs. Pure."""

from headrace.plan.model_shape import ModelShape
from headrace.plan.workload import Engine
from shared.errors import UserError
from shared.run_options.run_config import RunConfig


def spread(config: RunConfig, shape: ModelShape | None, *, num_gpus: int | None) -> Engine:
    """Return the parallelism of a replica. If ``num_gpus`` is given, it determines the tensor parallelism.

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
