"""A reward model in memory: makes texts of prompts and completions, tokenizes them, and computes one reward per text.

The computation is the same as in TRL 1.16's GRPOTrainer:

* The text is the prompt followed by the completion. For conversations it is the chat template of the model's tokenizer
  applied to both, without a generation prompt.
* No special tokens are added, and padding is on the right.
* The reward is the only logit, at the last token that is not padding.

Unlike TRL, this module refuses a model whose classification head is not in the checkpoint: the head would be random.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from services.rewarder.reward_call import Verdict, with_objects
from shared.errors import UserError
from shared.messages import Completion, Prompt
from shared.user_code.error_text import describe, printable

_POSITIONS = ("position_embeddings", "embed_positions", "wpe")
_MAX_LENGTH_UNKNOWN = 1_000_000_000

Encoding = dict[str, list[int]]
"""The tokenizer's output for one text: ``input_ids``, ``attention_mask``, and other inputs of the model."""


def be_quiet() -> None:
    """Make transformers log only errors in this process, and show no progress bars."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Classifier:
    """A sequence classifier with one label, and its tokenizer: the model that computes the rewards."""

    def __init__(self, directory: Path, *, name: str, device: str, dtype: str) -> None:
        """Load the model and its tokenizer.

        Raises:
            UserError: They cannot be loaded, or are not a reward model. The message says why.
        """
        self.device = _device(device)
        self._model = _load_model(directory, name, dtype).to(self.device).eval()
        self._tokenizer: Any = _load_tokenizer(directory, name)
        text_config = self._model.config.get_text_config()
        # The model finds the last token that is not padding, so it must use the tokenizer's padding token.
        text_config.pad_token_id = self._tokenizer.pad_token_id
        text_config.use_cache = False
        self._vocabulary_size: int = self._model.get_input_embeddings().num_embeddings
        self._max_tokens = _max_tokens(self._model, self._tokenizer)
        self.architecture = type(self._model).__name__
        self.dtype = str(self._model.dtype).removeprefix("torch.")

    def encode(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], template_kwargs: dict[str, Any]
    ) -> list[Encoding | Verdict]:
        """Return the tokens of each prompt with its completion, or an error verdict if the model cannot score them."""
        pairs = zip(prompts, completions, strict=True)
        texts = [self._text(prompt, completion, template_kwargs) for prompt, completion in pairs]
        usable = [text for text in texts if isinstance(text, str)]
        encodings = iter(self._encode_texts(usable))
        return [next(encodings) if isinstance(text, str) else text for text in texts]

    def score(self, encodings: Sequence[Encoding]) -> list[Verdict]:
        """Return one verdict per text. Uses one forward pass, or several if the memory is not enough for one.

        Raises:
            RuntimeError: The model failed.
        """
        try:
            values = self._forward(encodings)
        except torch.OutOfMemoryError:
            values = None  # retry outside the except block: the error's frames hold the tensors of the failed pass
        if values is None and len(encodings) > 1:
            half = len(encodings) // 2
            return [*self.score(encodings[:half]), *self.score(encodings[half:])]
        if values is None:
            num_tokens = len(encodings[0]["input_ids"])
            return [Verdict("error", None, f"no memory on {self.device} for a text of {num_tokens} tokens")]
        return [
            Verdict("scored", value) if math.isfinite(value) else Verdict("invalid", None, f"the model gave {value}")
            for value in values
        ]

    def _forward(self, encodings: Sequence[Encoding]) -> list[float]:
        inputs: Any = self._tokenizer.pad(list(encodings), padding=True, padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            logits_B: Any = self._model(**inputs.to(self.device)).logits[:, 0]
        values: list[float] = logits_B.float().tolist()
        return values

    def _text(self, prompt: Prompt, completion: Completion, template_kwargs: dict[str, Any]) -> str | Verdict:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        if isinstance(prompt, str) or isinstance(completion, str):
            return Verdict("error", None, "prompt and completion must both be text, or both be messages")
        if self._tokenizer.chat_template is None:
            return Verdict("error", None, "the model's tokenizer has no chat template, and the prompts are messages")
        try:
            messages = [*prompt, *with_objects(completion)]
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)
        except Exception as error:  # noqa: BLE001  the template is the model's code, and may raise anything
            return Verdict("error", None, printable(f"the chat template failed: {describe(error)}"))
        return text

    def _encode_texts(self, texts: list[str]) -> list[Encoding | Verdict]:
        if not texts:
            return []
        columns: dict[str, list[list[int]]] = dict(self._tokenizer(text=texts, add_special_tokens=False))
        rows = [{name: values[index] for name, values in columns.items()} for index in range(len(texts))]
        return [self._why_not(row["input_ids"]) or row for row in rows]

    def _why_not(self, ids: list[int]) -> Verdict | None:
        """Return an error verdict if the model cannot score these tokens, else None. On a GPU they are fatal."""
        if not ids:
            return Verdict("error", None, "prompt and completion are empty: there is no token to score")
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            return Verdict("error", None, f"{len(ids)} tokens, and the model takes at most {self._max_tokens}")
        if max(ids) >= self._vocabulary_size:
            return Verdict("error", None, f"the tokenizer gave token {max(ids)}, which the model does not have")
        return None


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("HEADRACE_REWARD_MODEL_DEVICE is cuda, and the rewarder sees no GPU; set it to auto or cpu")
    return wanted


def _load_model(directory: Path, name: str, dtype: str) -> Any:
    auto_model: Any = AutoModelForSequenceClassification  # partly untyped, like AutoTokenizer below
    try:
        loaded: Any = auto_model.from_pretrained(
            directory,
            num_labels=1,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that the errors below can name them
            output_loading_info=True,
        )
    except Exception as error:
        raise UserError(f"{name} cannot be loaded as a sequence classifier: {_first_line(error)}") from error
    model, info = cast("tuple[Any, dict[str, Any]]", loaded)
    mismatched: list[tuple[str, Sequence[int], Sequence[int]]] = sorted(info["mismatched_keys"])
    for key, there, wanted in mismatched:
        if len(there) == len(wanted) and there[0] != wanted[0] and list(there[1:]) == list(wanted[1:]):
            raise UserError(
                f"{name} gives {there[0]} numbers for a text ({key}), and a reward is one; use a model with "
                "num_labels=1"
            )
        raise UserError(f"{key} of {name} has shape {tuple(there)} where its config.json says {tuple(wanted)}")
    missing: list[str] = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{name} is not a reward model: its weights do not have {', '.join(missing[:3])}, so they would be "
            "random. A language model does not have this head; use a model that was trained as a reward model"
        )
    return model


def _load_tokenizer(directory: Path, name: str) -> Any:
    auto_tokenizer: Any = AutoTokenizer
    try:
        tokenizer: Any = auto_tokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise UserError(f"the tokenizer of {name} cannot be loaded: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise UserError(f"the tokenizer of {name} has neither a padding token nor an end token; give it one")
    return tokenizer


def _max_tokens(model: Any, tokenizer: Any) -> int | None:
    """Return the most tokens that fit the model's table of learned positions; None for a model without such a table."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _POSITIONS and isinstance(module, torch.nn.Embedding)
    ]
    if not tables:
        return None
    usable = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)  # RoBERTa starts after it
        for table in tables
    ]
    says = getattr(model.config, "max_position_embeddings", None)
    return min(*usable, says if isinstance(says, int) else sys.maxsize, _longest_of(tokenizer))


def _longest_of(tokenizer: Any) -> int:
    longest: Any = tokenizer.model_max_length
    return longest if isinstance(longest, int) and longest < _MAX_LENGTH_UNKNOWN else sys.maxsize


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
