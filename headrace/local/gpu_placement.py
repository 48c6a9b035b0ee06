"""Divides a machine's GPUs between training and the generators of one `headrace up`.

    1 GPU                    training and generator on 0; the engine takes 0.4 of its memory
    2 GPUs                   training on 0      generator-0 on 1
    8 GPUs, 2 generators     training on 0-5    generator-0 on 7, generator-1 on 6

Training keeps its GPUs until `headrace up` ends, so generators never get more GPUs than at the start. If the user gives
the training ranks GPUs in HEADRACE_RANK_ENV instead, generators may use all others.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from shared.errors import UserError
from shared.gpus import num_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEFAULT_ARGS, _ENGINE_ARGS = "HEADRACE_DEFAULT_ENGINE_ARGS", "HEADRACE_ENGINE_ARGS"
_SHARED = {"gpu_memory_utilization": 0.4}
"""vLLM's engine arguments on the GPU where training runs too, unless the user has set others."""


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES names of the GPUs that a process with this environment sees."""
    count, names = num_gpus(environment), environment.get(VISIBLE)
    if names is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in names.split(",")[:count]]


def place(
    gpus: list[str], environment: Mapping[str, str], *, num_at_start: int, num_generators: int
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the environment variables that give each generator, and the trainer, its GPUs.

    Args:
        gpus: The names of all GPUs that `headrace up` may use.
        environment: The environment of `headrace up`.
        num_at_start: Number of generators with which `headrace up` began.
        num_generators: Number of generators to place.

    Raises:
        UserError: There are too few GPUs for this number of generators.
    """
    of_each, of_ranks = _gpus_per_replica(environment), _gpus_of_ranks(environment)
    others = gpus[1:] if of_ranks is None else [gpu for gpu in gpus if gpu not in of_ranks]
    if not others:
        own = _table(environment, _DEFAULT_ARGS)
        if num_generators > 1 and not (own | _table(environment, _ENGINE_ARGS)).keys() & _SHARED.keys():
            raise UserError(
                f"{num_generators} generators would share one GPU with training: start one, or set "
                f'{_ENGINE_ARGS}, such as {{"gpu_memory_utilization": 0.2}}'
            )
        is_refused = not own and (environment.get(_DEFAULT_ARGS) or "{}").strip() != "{}"  # by the generator
        variables = {} if is_refused else {_DEFAULT_ARGS: json.dumps(_SHARED | own)}
        return [dict(variables) for _ in range(num_generators)], {}
    if of_ranks is None:
        others = others[-num_at_start * of_each :]
    if num_generators * of_each > len(others):
        raise UserError(
            f"{num_generators} generators need {num_generators * of_each} GPUs, and {len(others)} of {len(gpus)} "
            f"{'is' if len(others) == 1 else 'are'} not used for training; start headrace with another number in "
            "`headrace up --generators`, or give training fewer GPUs in HEADRACE_RANK_ENV"
        )
    last_first = others[::-1]
    generators = [
        {VISIBLE: ",".join(sorted(last_first[index * of_each : (index + 1) * of_each], key=gpus.index))}
        for index in range(num_generators)
    ]
    trainer = {} if of_ranks is not None else {VISIBLE: ",".join(gpu for gpu in gpus if gpu not in others)}
    return generators, trainer


def _gpus_per_replica(environment: Mapping[str, str]) -> int:
    """Return HEADRACE_GPUS_PER_REPLICA, by default the product of the parallel sizes in vLLM's engine arguments.

    Values that the generator will refuse count as 1.
    """
    text = environment.get("HEADRACE_GPUS_PER_REPLICA")
    if text is not None:
        return max(1, int(text)) if text.isascii() and text.isdigit() else 1
    args = _table(environment, _DEFAULT_ARGS) | _table(environment, _ENGINE_ARGS)
    sizes = [args.get(name) for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def _gpus_of_ranks(environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that HEADRACE_RANK_ENV gives the training ranks; None if it names none."""
    named = _table(environment, "HEADRACE_RANK_ENV").get(VISIBLE)
    return [name.strip() for name in named.split(",")] if isinstance(named, str) else None


def _table(environment: Mapping[str, str], variable: str) -> dict[str, Any]:
    """Parse the JSON object in an environment variable. Other values, which the service will refuse, count as empty."""
    try:
        table: Any = json.loads(environment.get(variable) or "{}")
    except json.JSONDecodeError:
        return {}
    return cast("dict[str, Any]", table) if isinstance(table, dict) else {}
