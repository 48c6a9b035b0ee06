"""Makes a reward model that is small enough to serve in a test's process, like the policies of tiny_model.py."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from tests.tiny_model import MAX_POSITIONS, SPECIAL, VOCAB_SIZE, make_tiny_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}={{ message['content'] }}+{% endfor %}"
    "{% if shout is defined and shout %}STOP{% endif %}"
    "{% if spin is defined %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if refuse is defined %}{{ raise_exception(refuse) }}{% endif %}"
)


def make_tiny_reward_model(path: Path, *, seed: int = 0, num_labels: int = 1) -> Path:
    """Write a Qwen3 with a head for ``num_labels`` outputs and a tokenizer to ``path``, and return ``path``."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.3,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
        dtype="float32",
    )
    config.num_labels = num_labels
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path
