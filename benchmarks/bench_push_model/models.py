"""The models, as transformers builds them from the numbers of their configurations, without content.

The names, shapes and order of what is pushed then come from the trainer's own code.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch

LARGE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "7B": (
        "qwen2",
        {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
        },
    ),
    "32B": (
        "qwen2",
        {
            "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
        },
    ),
    "70B": (
        "llama",
        {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""Qwen2.5-7B, Qwen2.5-32B and Llama-3.3-70B: the architecture, and the numbers of config.json that give the shapes."""

SMALL: tuple[str, Mapping[str, Any]] = (
    "qwen2",
    {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32_000, "tie_word_embeddings": True,
    },
)  # fmt: skip
"""111 million weights, as in bench_push."""


def empty_model(kind: str, numbers: Mapping[str, Any]) -> Any:
    """Return a float32 model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = cast(Any, AutoConfig).for_model(kind, **numbers)
    with torch.device("meta"):
        return cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)


def filled_model(kind: str, numbers: Mapping[str, Any]) -> Any:
    """Return a float32 model on the CPU with random weights."""
    model = empty_model(kind, numbers).to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model
