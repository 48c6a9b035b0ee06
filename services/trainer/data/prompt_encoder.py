"""Encodes prompts as token ids, once. Except in agent runs, generators get these ids, and no service tokenises again.

Supports both of TRL's formats, and tokenises them as TRL does: text with the special tokens that the tokenizer adds by
default, and conversations with the chat template and a generation prompt. Code in model repositories is never run; a
repository that needs its own code is refused.
"""

from collections.abc import Mapping
from typing import Any, cast

from shared.errors import UserError
from shared.messages import Prompt


class PromptEncoder:
    """Encodes prompts with a tokenizer of transformers.

    Args:
        tokenizer: The model's tokenizer.
        chat_template_kwargs: Passed to the chat template with the messages.
    """

    def __init__(self, tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs or {})

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, on which the policy is conditioned.

        Raises:
            UserError: The prompt encodes to no tokens, or the chat template is missing or refuses the messages.
        """
        ids = self._encode_text(prompt) if isinstance(prompt, str) else self._encode_messages(prompt)
        if not ids:
            raise UserError("the prompt encodes to no tokens, but the policy needs at least one")
        return ids

    def _encode_text(self, text: str) -> list[int]:
        return list(self.tokenizer(text=text)["input_ids"])

    def _encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "the prompts are conversations, but the model's tokenizer has no chat template; use plain text "
                "prompts, without system_prompt and prompt_as_message, or a model that was made for chat",
                field="dataset_name",
            )
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self._chat_template_kwargs
            )
        except Exception as error:  # a template can fail in any way with what it was not made for
            raise UserError(f"the model's chat template refuses this conversation: {_first_line(error)}") from error
        return list(encoded["input_ids"])


def unreadable() -> tuple[type[Exception], ...]:
    """Return the types of the exceptions that transformers raises for missing or malformed files."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    malformed = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)
    return (OSError, ImportError, *malformed, StrictDataclassError, SafetensorError)


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a model directory or hub id.

    Raises:
        UserError: The tokenizer is missing, or needs code from the model's repository.
    """
    from transformers import AutoTokenizer

    refuse_own_code(model, revision)
    try:
        tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(model, revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises a plain Exception for a file that it cannot read
        raise UserError(f"no tokenizer could be loaded from {model!r}: {_first_line(error)}", field="model") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # Without tokenizer files, transformers makes an empty tokenizer from the architecture's name.
        raise UserError(f"{model!r} has no tokenizer files; copy them from the model it was made from", field="model")
    return tokenizer


def refuse_own_code(model: str, revision: str | None = None) -> None:
    """Raise UserError if the model does not exist, or its configuration refers to code in its repository."""
    from transformers import PretrainedConfig
    from transformers.models.auto import tokenization_auto

    try:
        model_config, _ = cast(Any, PretrainedConfig).get_config_dict(model, revision=revision)
        tokenizer_config = cast(Any, tokenization_auto).get_tokenizer_config(model, revision=revision)
        has_own_code = bool(model_config.get("auto_map") or tokenizer_config.get("auto_map"))
    except unreadable() as error:
        raise UserError(
            f"the model {model!r} was not found: it is not a directory with a valid config.json, and the Hugging Face "
            f"Hub could not provide it ({_first_line(error)})",
            field="model",
        ) from error
    if has_own_code:
        raise UserError(
            f"{model!r} needs Python code from its repository (auto_map in its configuration), which is never run; use "
            "a model that transformers supports directly",
            field="model",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
