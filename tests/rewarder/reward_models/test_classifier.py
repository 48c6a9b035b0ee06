"""Other model architectures, in this process: the rewards equal a plain forward pass; and the length limit of texts."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.rewarder.reward_call import Verdict
from services.rewarder.reward_models.classifier import Classifier
from tests.tiny_model import VOCAB_SIZE, make_tiny_tokenizer
from tests.tiny_reward_model import make_tiny_reward_model

COMMON = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
BERT = COMMON | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
PROMPTS, COMPLETIONS = ["a b", "abc", "x"], ["c", "de" * 10, "y" * 70]


@pytest.mark.parametrize(
    ("family", "settings", "max_tokens"),
    [
        ("Bert", BERT, 64),
        ("Roberta", BERT | {"pad_token_id": 1, "max_position_embeddings": 66}, 64),  # the first two are for padding
        ("GPT2", COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}, 64),
        (
            "OPT",
            COMMON
            | {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "max_position_embeddings": 64},
            64,
        ),
        ("Llama", BERT, None),  # rotary positions have no limit, and TRL does not set one
    ],
)
def test_every_family_gives_the_numbers_of_a_plain_forward_pass_and_says_what_is_too_long(
    tmp_path: Path, family: str, settings: dict[str, Any], max_tokens: int | None
) -> None:
    library: Any = transformers
    torch.manual_seed(0)
    config = getattr(library, f"{family}Config")(**settings)
    getattr(library, f"{family}ForSequenceClassification")(config).save_pretrained(tmp_path)
    tokenizer: Any = make_tiny_tokenizer()
    tokenizer.model_max_length = int(1e30)
    tokenizer.save_pretrained(tmp_path)

    classifier = Classifier(tmp_path, name=family, device="cpu", dtype="auto")
    encodings = classifier.encode(PROMPTS, COMPLETIONS, {})
    usable = [encoding for encoding in encodings if not isinstance(encoding, Verdict)]
    refused = [encoding.detail for encoding in encodings if isinstance(encoding, Verdict)]
    assert refused == ([] if max_tokens is None else [f"71 tokens, and the model takes at most {max_tokens}"])

    model = library.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)][: len(usable)]
    inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        expected = model(**inputs).logits[:, 0].tolist()
    assert [verdict.value for verdict in classifier.score(usable)] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(usable)


def test_the_chat_template_reads_the_arguments_of_tool_calls_as_objects_as_in_trl(tmp_path: Path) -> None:
    directory = make_tiny_reward_model(tmp_path / "model")
    tokenizer: Any = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}"
    )
    tokenizer.save_pretrained(directory)
    classifier = Classifier(directory, name="m", device="cpu", dtype="auto")
    function = {"name": "add", "arguments": '{"a": "seven"}'}
    calling: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    (encoding,) = classifier.encode([[{"role": "user", "content": "a"}]], [[calling]], {})
    assert not isinstance(encoding, Verdict)
    assert encoding["input_ids"] == tokenizer("seven", add_special_tokens=False)["input_ids"]


def test_a_batch_that_does_not_fit_into_memory_is_halved_and_a_single_text_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = Classifier(make_tiny_reward_model(tmp_path / "model"), name="m", device="cpu", dtype="auto")
    encodings = classifier.encode(["a"] * 5, ["b" * n for n in range(1, 6)], {})
    usable = [item for item in encodings if not isinstance(item, Verdict)]
    expected = classifier.score(usable)
    forward = classifier._forward  # pyright: ignore[reportPrivateUsage]
    sizes: list[int] = []

    def with_room_for_two_short_ones(encodings: Any) -> list[float]:
        sizes.append(len(encodings))
        assert sys.exc_info()[1] is None, "the error before holds the tensors of its pass"
        if len(encodings) > 2 or any(len(item["input_ids"]) == 6 for item in encodings):
            raise torch.OutOfMemoryError("no memory")
        return forward(encodings)

    monkeypatch.setattr(classifier, "_forward", with_room_for_two_short_ones)
    found = classifier.score(usable)
    assert [verdict.value for verdict in found[:4]] == pytest.approx([verdict.value for verdict in expected[:4]])
    assert found[4] == Verdict("error", None, "no memory on cpu for a text of 6 tokens")
    assert sizes == [5, 2, 3, 1, 2, 1, 1]
