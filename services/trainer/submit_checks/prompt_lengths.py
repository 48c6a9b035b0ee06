"""Counts the tokens of prompts when a run is submitted, with the model's tokenizer but without transformers.

The count of tokens is a lower bound. It leaves out special tokens. In a conversation it also leaves out what the chat
template adds around messages, and whitespace around their content, which some templates drop. A prompt that is too long
by this count is therefore too long. The training rank, which encodes the whole prompt, may find more such prompts
(prompt_encoder.py).
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.trainer.data.model_files import model_file
from shared.errors import UserError
from shared.messages import MAX_MESSAGE_BYTES, Prompt
from shared.run_options.engine_args import default_max_model_len
from shared.run_options.run_config import RunConfig

MAX_COUNTED = 1000
"""Number of prompts of a data set to tokenise: those with the fewest bytes."""
_BYTES_PER_PROMPT_TOKEN = 5
"""Bytes of a prompt's token in a message, for each completion: 4 for the id, 1 for the mask."""
_MAX_CHARACTERS = 1_000_000
"""Most characters of a text to tokenise. The tokens of its beginning are a lower bound too."""
_MAX_COUNTED_BYTES = 10_000_000
"""Most bytes of all prompts that are tokenised to count those that are too long."""

_MAX_COMPARED, _MAX_COMPARED_CHARACTERS = 100, 10_000
"""Prompts, and characters of each text in them, that are compared with the vocabulary."""

_RUST_PANIC = "PanicException"
"""Name of the exception for a failure inside tokenizers. It cannot be imported, and does not derive from Exception."""

TokenCount = Callable[[Prompt], int]


class PromptTokenizer:
    """The tokenizer of a run's model, applied to the texts of prompts.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        name: object = getattr(tokenizer.model, "unk_token", None)
        self._unknown: int | None = tokenizer.token_to_id(name) if isinstance(name, str) else None

    @classmethod
    def of(cls, config: RunConfig) -> "PromptTokenizer | None":
        """Return the tokenizer of a run's model, or None if it is not on this machine."""
        path = model_file(config, "tokenizer.json")
        tokenizer = None if path is None else _load(path)
        return None if tokenizer is None else cls(tokenizer)

    def count(self, prompt: Prompt) -> int:
        """Return a lower bound of the number of a prompt's tokens, without special tokens and the chat template."""
        texts = (text[:_MAX_CHARACTERS] for text in _texts(prompt))
        return sum(len(self._encoded(text).ids) for text in texts)

    def known_share(self, prompts: Iterable[Prompt]) -> float:
        """Return the share of the first prompts' characters, without whitespace, that the vocabulary has.

        The model sees the other characters as unknown tokens, or not at all. Returns 1 without prompts.
        """
        num_characters, num_known = 0, 0
        for prompt in itertools.islice(prompts, _MAX_COMPARED):
            for text in _texts(prompt):
                begun = text[:_MAX_COMPARED_CHARACTERS]
                encoding = self._encoded(begun)
                spans = zip(encoding.ids, encoding.offsets, strict=True)
                known = {position for token, span in spans if token != self._unknown for position in range(*span)}
                num_known += len(known)  # their places cannot be compared: BPE that leaves characters out shifts them
                num_characters += sum(not character.isspace() for character in begun)
        return min(1.0, num_known / num_characters) if num_characters else 1.0

    def _encoded(self, text: str) -> Any:
        try:
            # A user's tokenizer may take very long. Unlike this, `encode` would block all threads meanwhile.
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ != _RUST_PANIC:
                raise
            raise UserError(f"the model's tokenizer fails on a prompt: {error}", field="model") from error
        return encoding


def fewest_tokens(prompts: Iterable[Prompt], count: TokenCount, *, at_most: int) -> int | None:
    """Return the token count of the shortest prompt if every prompt has more than ``at_most`` tokens, else None.

    Returns None without prompts. Of more than ``MAX_COUNTED`` prompts, counts those with the fewest bytes.
    """
    unread = iter(prompts)
    first = next(unread, None)
    if first is None or count(first) <= at_most:
        return None
    candidates = itertools.chain([first], unread)
    shortest = heapq.nsmallest(MAX_COUNTED, candidates, key=_num_bytes)
    fewest: int | None = None
    for prompt in shortest:
        num_tokens = count(prompt)
        if num_tokens <= at_most:
            return None
        fewest = num_tokens if fewest is None else min(fewest, num_tokens)
    return fewest


def num_longer(prompts: Iterable[Prompt], count: TokenCount, *, at_most: int) -> tuple[int, int]:
    """Return how many prompts have more than ``at_most`` tokens, and how many prompts were looked at.

    Stops after tokenising ``MAX_COUNTED`` prompts or 10 MB. A prompt of ``at_most`` bytes or fewer is not tokenised.
    """
    num_long, num_seen, num_counted, num_counted_bytes = 0, 0, 0, 0
    for prompt in prompts:
        if num_counted == MAX_COUNTED or num_counted_bytes > _MAX_COUNTED_BYTES:
            break
        num_seen += 1
        if (num_bytes := _num_bytes(prompt)) > at_most:
            num_counted += 1
            num_counted_bytes += num_bytes
            num_long += count(prompt) > at_most
    return num_long, num_seen


class GroupSizes:
    """Finds rows of a data set whose prompt groups are certainly too large for an entry in Redis.

    A group contains the row once, and the prompt's tokens once for each completion. With ``max_prompt_length``, long
    prompts are dropped before that, so only the columns count.
    """

    def __init__(self, config: RunConfig, count: TokenCount | None) -> None:
        self._config = config
        self._count = None if config.is_agentic else count
        self._num_uncounted_bytes = _MAX_COUNTED_BYTES

    def why_too_large(self, prompt: Prompt, columns: Mapping[str, Any]) -> str | None:
        """Return why a group of the row cannot be sent, as the end of a sentence about the row; None if it can."""
        of_prompt = 0 if self._config.max_prompt_length is not None else _num_bytes(prompt)
        try:
            num_bytes = of_prompt + len(msgspec.msgpack.encode(columns))
        except (TypeError, ValueError, OverflowError, RecursionError):  # admission reports it
            return None
        per_token = 4 + _BYTES_PER_PROMPT_TOKEN * self._config.num_generations
        may_be_larger = num_bytes + per_token * of_prompt > MAX_MESSAGE_BYTES
        if self._count is not None and may_be_larger and self._num_uncounted_bytes > 0:
            self._num_uncounted_bytes -= of_prompt
            num_bytes += per_token * self._count(prompt)
        if num_bytes <= MAX_MESSAGE_BYTES:
            return None
        return (
            f"is too large: a group of {self._config.num_generations} completions of it takes at least "
            f"{num_bytes / 2**20:.1f} MiB, more than the {MAX_MESSAGE_BYTES >> 20} MiB of an entry in Redis"
        )


def num_positions(config: RunConfig, model: Mapping[str, Any]) -> int | None:
    """Return the most tokens that prompt and completion may have together; None if that is not known.

    Args:
        config: The run. Its ``vllm.max_model_len`` takes the place of the model's number.
        model: The model's config.json; empty if it is not known.
    """
    return _max_model_len(config) or default_max_model_len(model)


def whose_positions(config: RunConfig) -> str:
    """Return where `num_positions` gets its number: "vllm.max_model_len" or "the model"."""
    return "vllm.max_model_len" if _max_model_len(config) else "the model"


def _max_model_len(config: RunConfig) -> int | None:
    asked: Any = config.vllm.get("max_model_len")
    return asked if isinstance(asked, int) and asked > 0 else None  # -1: as many as fit into the GPU's memory


def _num_bytes(prompt: Prompt) -> int:
    # Bytes are closer to tokens than characters are if scripts are mixed.
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in _texts(prompt))


def _texts(prompt: Prompt) -> Sequence[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"].strip() for message in prompt]


def _load(path: Path) -> Any:
    """Load a tokenizer with the tokenizers library, which needs no torch; return None if that fails."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  tokenizers raises a plain Exception for a file that it cannot read
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
