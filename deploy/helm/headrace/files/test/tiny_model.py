"""Makes a Qwen3 of 186 thousand random weights, a tokenizer of one token a character, and eight prompts."""

import json
import os

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 =+"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_tiny_model(directory):
    """Return the model's directory and the data set's file; what is there already is left as it is."""
    model, dataset = directory / "model", directory / "train.jsonl"
    if not dataset.exists():
        os.umask(0o002)  # generators read it as another pod
        model.mkdir(parents=True, exist_ok=True)
        make_model(model)
        text = "".join(json.dumps({"prompt": f"say {word} ="}) + "\n" for word in "abcdefgh")
        aside = directory / "train.jsonl.part"
        aside.write_text(text)
        os.replace(aside, dataset)
    return model, dataset


def make_model(model):
    """Write model and tokenizer."""
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
        num_attention_heads=8,  # so that 2, 4 or 8 GPUs of a generator can share them
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
