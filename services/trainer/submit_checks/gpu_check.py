"""Finds a run's options that need a GPU which the training ranks would not have; at submit, without torch."""

import importlib.util
from collections.abc import Mapping

from shared.gpus import num_gpus
from shared.run_options.run_config import RunConfig


def what_needs_a_gpu(config: RunConfig, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return option and reason for each option that a training rank with this environment would refuse."""
    if num_gpus(environment) == 0:
        asked = {
            "attn_implementation": config.attn_implementation not in ("auto", "sdpa", "eager"),
            "use_liger_kernel": config.use_liger_kernel,
            "weight_transport": config.weight_transport in ("nccl", "ipc"),
            "vllm_enable_sleep_mode": config.vllm_enable_sleep_mode,
        }
        return [
            (name, f"{name}: {getattr(config, name)} needs a GPU, and the trainer has none; leave it out")
            for name, is_asked in asked.items()
            if is_asked
        ]
    if config.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        return [("use_liger_kernel", "use_liger_kernel needs the package liger-kernel in the trainer's environment")]
    return []
