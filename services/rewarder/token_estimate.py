"""Estimates the tokens of a reward call for limits per minute, because the rewarder does not have a tokenizer."""

from services.rewarder.reward_call import RewardCall
from shared.arrays import ID_DTYPE
from shared.chat_text import chat_text
from shared.messages import Completion

CHARACTERS_PER_TOKEN = 4
"""Used for text without token ids."""


def num_tokens(call: RewardCall) -> int:
    """Return the estimated tokens of prompts and completions, with four characters per token where ids are missing."""
    characters = sum(map(_num_characters, call.prompts))
    if call.completion_ids is None:
        characters += sum(map(_num_characters, call.completions))
    num_ids = sum(map(len, call.completion_ids or ())) // ID_DTYPE.itemsize
    return num_ids + -(-characters // CHARACTERS_PER_TOKEN)


def _num_characters(text: Completion) -> int:
    return len(text) if isinstance(text, str) else sum(len(chat_text(message)) for message in text)
