"""Makes a causal language model that is small enough for a real vLLM engine on a CPU to be a test fixture.

It is a Qwen3 of two layers and about 60 thousand weights with untied embeddings, and a tokenizer with one token per
character. Its weights are random: its text has no meaning, but every token has a probability above 0.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTU0123456789 =+"
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
EOS_TOKEN_ID = SPECIAL.index("<eos>")
MAX_POSITIONS = 256
CHAT_TEMPLATE = "{% if tools %}T{% endif %}{% for message in messages %}{{ message['content'] }}{% endfor %}="


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which token ``4 + i`` is ``CHARACTERS[i]``."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def make_tiny_model(path: Path, *, seed: int = 0) -> Path:
    """Write model and tokenizer to ``path`` as ``transformers`` would, and return ``path``.

    The initialisation is wide, so that different seeds give clearly different distributions.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=EOS_TOKEN_ID,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path


def make_tiny_moe(path: Path, *, seed: int = 0, router_aux_loss_coef: float = 0.001) -> Path:
    """Write a mixture of four experts, two for each token, with the same tokenizer, and return ``path``."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        router_aux_loss_coef=router_aux_loss_coef,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=EOS_TOKEN_ID,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path


def make_gemma_3(directory: Path) -> None:
    """Save a Gemma 3 of two layers with a vision tower of one, whose layers have the same names."""
    text = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(directory)
