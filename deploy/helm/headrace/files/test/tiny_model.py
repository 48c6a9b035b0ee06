"""Makes a Qwen3 with 186 thousand random weights, a tokenizer with one token per character, and eight prompts."""

import json
import os

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 =+"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_tiny_model(directory):
    """Make the model and the data set unless they exist; return the model's directory and the data set's path."""
    model, dataset = directory / "model", directory / "train.jsonl"
    if not dataset.exists():
        os.umask(0o002)  # the generators' pods read these files
        model.mkdir(parents=True, exist_ok=True)
        make_model(model)
        text = "".join(json.dumps({"prompt": f"say {word} ="}) + "\n" for word in "abcdefgh")
        aside = directory / "train.jsonl.part"
        aside.write_text(text)
        os.replace(aside, dataset)
    return model, dataset


def make_model(model):
    """Write the model and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    ).save_pretrained(model)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,  # can be divided among 2, 4 or 8 GPUs of a generator
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(model)
