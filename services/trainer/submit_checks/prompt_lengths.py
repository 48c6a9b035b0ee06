"""Counts a lower bound of prompts' tokens without transformers, for the check of a data set before a run starts.

The count leaves out special tokens. In a conversation it also leaves out what the chat template adds around messages,
and whitespace around their content, which some templates drop. A prompt that is too long by this count is therefore too
long. The training rank, which encodes the whole prompt, may find more such prompts (prompt_encoder.py).
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from services.trainer.data.model_files import model_file
from shared.messages import Prompt
from shared.run_options.run_config import RunConfig

MAX_COUNTED = 1000
"""Number of prompts of a data set to tokenise: those with the fewest bytes."""

TokenCount = Callable[[Prompt], int]


def token_count(config: RunConfig) -> TokenCount | None:
    """Return a function that counts a prompt's tokens, or None if the model's tokenizer is not on this machine."""
    path = model_file(config, "tokenizer.json")
    tokenizer = None if path is None else _load(path)
    if tokenizer is None:
        return None

    def count(prompt: Prompt) -> int:
        return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in _texts(prompt))

    return count


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


def _num_bytes(prompt: Prompt) -> int:
    # Bytes are closer to tokens than characters are if scripts are mixed.
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in _texts(prompt))


def _texts(prompt: Prompt) -> Sequence[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"].strip() for message in prompt]


def _load(path: Path) -> Any:
    """Load a tokenizer with the tokenizers library, which needs no torch; return None if it cannot read the file."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  tokenizers raises a plain Exception for a file that it cannot read
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
