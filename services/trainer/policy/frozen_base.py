"""How the frozen base of a LoRA run is stored: in the run's dtype, or in 4 bits (QLoRA, arXiv 2305.14314).

The base never changes, so it needs no float32 master copy. In 4 bits, bitsandbytes stores it as NF4 with double
quantisation, and converts matrices back to bfloat16 for products. The generator stores it in the same way
(engine_spec.py), or its logprobs would belong to another model.
"""

import importlib.util
from typing import Any

import torch

from services.trainer.policy.model_options import run_dtype
from shared.errors import UserError
from shared.run_options.run_config import RunConfig


def frozen_base(config: RunConfig, *, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `policy_model.load_policy` for a frozen base; empty if all weights are trained.

    Raises:
        UserError: This device cannot hold the base in 4 bits.
    """
    if not config.use_peft:
        return {}
    dtype = run_dtype(config)
    if not config.load_in_4bit:
        return {"dtype": dtype}
    if device.type != "cuda":
        raise UserError("load_in_4bit needs a GPU, and the trainer has none; leave it out", field="load_in_4bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "load_in_4bit needs the package bitsandbytes in the trainer's environment", field="load_in_4bit"
        )
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "quantization": quantization}
