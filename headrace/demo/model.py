"""The demo's policy: a Qwen3 with about half a million weights, and a tokenizer with one token per letter.

Both are made locally, so nothing is downloaded. Embeddings are untied because vLLM's CPU path mishandles tied ones.
`head_dim` is explicit because Qwen3's default of 128 suits a larger model.
"""

import re

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from headrace.demo import task
from headrace.demo.demo_task import REVERSE

MAX_POSITIONS = 64
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_tokenizer(
    *,
    frame: tuple[str, ...] = REVERSE.frame,
    chat_template: str | None = None,
    max_positions: int = MAX_POSITIONS,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each letter and each text in ``frame``. Prompts get no special tokens.

    Args:
        frame: Texts other than letters, such as ``"reverse "``. A text that begins with another one must precede it.
        chat_template: Renders conversations; None for prompts of plain text.
        max_positions: Most tokens of a prompt with its completion.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *frame, *task.LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join((*map(re.escape, frame), "."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """Return a float32 Qwen3 with about half a million weights, which are drawn from ``seed``."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)
