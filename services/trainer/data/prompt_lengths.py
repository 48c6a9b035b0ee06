"""How short prompts can be, counted without transformers: for the look at a data set before a run starts.

A count is a lower bound: special tokens are left out, and of a conversation what the chat template adds around its
messages and the space around their content, which some templates drop. A prompt that is too long by this count is too
long, and the training rank, which encodes prompts as they are, may find more of them (prompt_encoder.py).
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from services.trainer.data.model_files import model_file
from shared.messages import Prompt
from shared.run_config import RunConfig

MAX_COUNTED = 1000
"""Prompts of a data set that are tokenised, the shortest by bytes."""

TokenCount = Callable[[Prompt], int]


def token_count(config: RunConfig) -> TokenCount | None:
    """Return what counts the tokens of a prompt, or None if the model's tokenizer is not on this machine."""
    path = model_file(config, "tokenizer.json")
    tokenizer = None if path is None else _load(path)
    if tokenizer is None:
        return None

    def count(prompt: Prompt) -> int:
        return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in _texts(prompt))

    return count


def fewest_tokens(prompts: Iterable[Prompt], count: TokenCount, *, at_most: int) -> int | None:
    """Return the tokens of the shortest prompt if none has ``at_most`` or fewer, else None; None for no prompts.

    Of more than ``MAX_COUNTED`` prompts those with the fewest bytes are counted.
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
    # Nearer to tokens than characters are, where scripts are mixed.
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in _texts(prompt))


def _texts(prompt: Prompt) -> Sequence[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"].strip() for message in prompt]


def _load(path: Path) -> Any:
    """Return a tokenizer of the library below transformers, which needs no torch; None if the file is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  what that library raises for a file it cannot read has no class of its own
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
