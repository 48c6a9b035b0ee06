import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from services.trainer.data.prompt_encoder import PromptEncoder, load_tokenizer
from shared.errors import UserError
from tests.tiny_model import CHAT_TEMPLATE, SPECIAL, make_tiny_tokenizer

BOS = SPECIAL.index("<bos>")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer()


def test_text_becomes_the_tokens_the_tokenizer_makes_of_it(tokenizer: PreTrainedTokenizerFast) -> None:
    assert PromptEncoder(tokenizer).encode("cab") == [6, 4, 5]


def test_a_tokenizer_that_begins_with_a_special_token_does_so_here(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    assert PromptEncoder(tokenizer).encode("cab") == [BOS, 6, 4, 5]


def test_a_conversation_goes_through_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert CHAT_TEMPLATE.endswith("=")
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    assert PromptEncoder(tokenizer).encode(messages) == [4, 5, 6, tokenizer.convert_tokens_to_ids("=")]


def test_the_template_is_asked_to_begin_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}z{% endif %}"
    assert PromptEncoder(tokenizer).encode([{"role": "user", "content": "a"}]) == [4, 4 + 25]


def test_the_template_gets_its_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if not enable_thinking %}z{% endif %}"
    messages = [{"role": "user", "content": "a"}]
    z = 4 + 25
    assert PromptEncoder(tokenizer, chat_template_kwargs={"enable_thinking": False}).encode(messages) == [4, z]
    assert PromptEncoder(tokenizer, chat_template_kwargs={"enable_thinking": True}).encode(messages) == [4]


def test_a_conversation_without_a_chat_template_is_explained(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template; use plain text prompts"):
        PromptEncoder(tokenizer).encode([{"role": "user", "content": "a"}])


def test_a_conversation_the_template_refuses_is_explained(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="refuses this conversation: roles must alternate"):
        PromptEncoder(tokenizer).encode([{"role": "user", "content": "a"}])


def test_a_conversation_that_the_template_was_not_made_for_is_explained(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ 'Today: ' + date_string }}"
    encoder = PromptEncoder(tokenizer, chat_template_kwargs={"date_string": 20240726})
    with pytest.raises(UserError, match="refuses this conversation: can only concatenate str"):
        encoder.encode([{"role": "user", "content": "a"}])


def test_a_prompt_of_no_token_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="encodes to no tokens"):
        PromptEncoder(tokenizer).encode("")


def test_a_tokenizer_is_loaded_from_a_model_directory(tiny_model: Path) -> None:
    assert PromptEncoder(load_tokenizer(str(tiny_model))).encode("cab") == [6, 4, 5]


def test_a_directory_without_a_tokenizer_is_explained(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(UserError, match="has no tokenizer files"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_of_another_release_of_its_library_is_refused_with_a_sentence(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {"type": "Unknown"}}))
    with pytest.raises(UserError, match="no tokenizer could be loaded from"):
        load_tokenizer(str(tmp_path))
