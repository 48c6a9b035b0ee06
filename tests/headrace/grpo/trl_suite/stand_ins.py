"""Makes small stand-ins for the models and data sets of the hub that TRL's tests name.

They lie in a directory under the hub's names. Tests run in it, so that a name is also a relative path, which
transformers, datasets and headrace prefer.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny_model import make_tiny_tokenizer

OWNER: Final = "trl-internal-testing"
_DENSE: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
_EXPERTS: Final = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "decoder_sparse_step": 1,
}
CAUSAL: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", {}),
    "tiny-Qwen3ForCausalLM": ("qwen3", {}),
    "tiny-LlamaForCausalLM-3.2": ("llama", {}),
    "tiny-MistralForCausalLM-0.2": ("mistral", {}),
    "tiny-Gemma2ForCausalLM": ("gemma2", {}),
    "tiny-Cohere2ForCausalLM": ("cohere2", {}),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", _EXPERTS),
    "tiny-Glm4MoeForCausalLM": ("glm4_moe", _EXPERTS),
    "tiny-GptOssForCausalLM": ("gpt_oss", _EXPERTS),
}
DOCUMENTED: Final = {"Qwen/Qwen2.5-0.5B-Instruct": "qwen2", "Qwen/Qwen2.5-72B": "qwen2", "Qwen/Qwen3-0.6B": "qwen3"}
"""Models in the scripts of TRL's documentation."""
CLASSIFIERS: Final = {
    "tiny-Qwen2ForSequenceClassification-2.5": "qwen2",
    "tiny-Qwen3ForSequenceClassification": "qwen3",
    "tiny-LlamaForSequenceClassification-3.2": "llama",
}
_SENTENCES: Final = (
    *(
        "Beautiful is better than",
        "Explicit is",
        "Simple is better",
        "Complex",
        "Flat is better than",
        "Sparse is better",
    ),
    *("Readability", "Special cases aren't special", "Although practicality beats", "Errors should never", "Unless"),
    *("In the face of ambiguity, refuse", "There should be one-- and preferably", "Although that way may not be"),
    *("Now is better than", "Although never is often better than", "If the implementation is hard to", "If it is easy"),
    "Namespaces are one honking",
)


def make_stand_ins(hub: Path, *, further: Mapping[str, str] | None = None) -> None:
    """Make all models and data sets below ``hub``, unless they are there.

    Args:
        hub: The directory.
        further: Kinds of further models, by name.
    """
    owner = hub / OWNER
    for name, (kind, more) in CAUSAL.items():
        _save(AutoModelForCausalLM, owner / name, kind, more)
    for name, kind in CLASSIFIERS.items():
        _save(AutoModelForSequenceClassification, owner / name, kind, {"num_labels": 1})
    for name, kind in {**DOCUMENTED, **(further or {})}.items():
        _save(AutoModelForCausalLM, hub / name, kind, {})
    _save_zen(owner / "zen")
    _write(owner / "zen-standard" / "train.jsonl", [{"prompt": it, "ground_truth": "better"} for it in _SENTENCES])
    questions = [{"role": "user", "content": f"What is {number} + {number}?"} for number in range(16)]
    sums = [{"prompt": [question], "solution": f"${2 * number}$"} for number, question in enumerate(questions)]
    _write(hub / "trl-lib" / "DeepMath-103K" / "train.jsonl", sums)


def _save(auto: Any, directory: Path, kind: str, more: Mapping[str, Any]) -> None:
    if (directory / "config.json").exists():
        return
    tokenizer = make_tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(kind, **{**_DENSE, **more, **ends, "vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _save_zen(directory: Path) -> None:
    """Write the data set ``zen``: 17 prompts to train on and 2 to test on, as text and as messages."""
    prompts = {"train": _SENTENCES[:17], "test": _SENTENCES[17:]}
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {
        "standard_prompt_only": {split: [{"prompt": text} for text in texts] for split, texts in prompts.items()},
        "conversational_prompt_only": {
            split: [{"prompt": [{"role": "user", "content": f"What is {text}?"}]} for text in texts]
            for split, texts in prompts.items()
        },
    }
    card = ["---", "configs:"]
    for config, of_split in rows.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split, found in of_split.items():
            file = directory / config / f"{split}.jsonl"
            _write(file, found)
            card += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (directory / "README.md").write_text("\n".join([*card, "---", ""]))


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
