"""About how many tokens a call holds, for limits by the minute; the rewarder has no tokenizer."""

from services.rewarder.reward_call import RewardCall
from shared.arrays import ID_DTYPE

CHARACTERS_PER_TOKEN = 4
"""Where token ids are not known."""


def num_tokens(call: RewardCall) -> int:
    """Return about how many tokens a call holds: prompts and completions, at four characters each without ids."""
    characters = sum(map(_num_characters, call.prompts))
    if call.completion_ids is None:
        characters += sum(map(_num_characters, call.completions))
    num_ids = sum(map(len, call.completion_ids or ())) // ID_DTYPE.itemsize
    return num_ids + -(-characters // CHARACTERS_PER_TOKEN)


def _num_characters(text: str | list[dict[str, str]]) -> int:
    return len(text) if isinstance(text, str) else sum(len(message.get("content") or "") for message in text)
