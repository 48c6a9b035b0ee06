"""Draws the lengths, token ids and logprobs of a simulated engine. Seeded, so that a simulation can be repeated.

length           log-normal, cut off at max_tokens
minus logprob    exponential
token ids        uniform, with end-of-sequence only as the last token
"""

import math
from dataclasses import dataclass

import numpy as np

from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulation_settings import SimulationSettings

_WORDS = "simulated token "
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class DrawnCompletion:
    """One completion, without the times of its tokens.

    Attributes:
        token_ids: Includes end-of-sequence if the completion ended by itself.
        logprobs: Logprobs in nats, float32, at most 0 and finite.
        finish_reason: ``stop`` or ``length``.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Draws:
    """Draws random completions, and the times to their first tokens, for one simulated replica.

    Args:
        settings: Settings of the simulation.
        facts: Facts about the model.
        index: Index of the replica; part of the seed.
    """

    def __init__(self, settings: SimulationSettings, facts: ModelFacts, *, index: int) -> None:
        self._settings = settings
        self._facts = facts
        self._random = np.random.default_rng([settings.seed, index])

    def completion(self, *, max_tokens: int, ignore_eos: bool = False) -> DrawnCompletion:
        """Draw one completion of at most ``max_tokens`` tokens; of exactly ``max_tokens`` with ``ignore_eos``."""
        settings, facts = self._settings, self._facts
        drawn = self._random.lognormal(math.log(settings.completion_tokens), settings.completion_tokens_sigma)
        wanted = max_tokens if ignore_eos else max(1, round(drawn))
        length, is_cut_off = min(wanted, max_tokens), ignore_eos or wanted > max_tokens
        ids = self._random.integers(0, facts.vocab_size, size=length)
        if facts.eos_token_id is not None:
            ids[ids == facts.eos_token_id] = (facts.eos_token_id + 1) % facts.vocab_size
            if not is_cut_off:
                ids[-1] = facts.eos_token_id
        surprise = self._random.exponential(settings.surprise_nats, size=length).astype(np.float32)
        logprobs: list[float] = (-surprise).tolist()
        return DrawnCompletion([int(token) for token in ids], logprobs, "length" if is_cut_off else "stop")

    def first_token_s(self, *, num_prompt_tokens: int) -> float:
        """Draw the time to the first token, in simulated seconds."""
        settings = self._settings
        prefill_s = num_prompt_tokens / settings.prefill_tokens_per_s
        if settings.first_token_s == 0:
            return prefill_s
        fixed_s = self._random.lognormal(math.log(settings.first_token_s), settings.first_token_sigma)
        return float(fixed_s) + prefill_s


def text_of(num_tokens: int, *, start: int = 0) -> str:
    """Return the text of tokens ``[start, num_tokens)``: four characters per token, repeating "simulated token"."""
    begin, end = start * _CHARACTERS_PER_TOKEN, num_tokens * _CHARACTERS_PER_TOKEN
    return (_WORDS * (end // len(_WORDS) + 1))[begin:end]


def prompt_ids_of(text: str, facts: ModelFacts) -> list[int]:
    """Return invented token ids for a text, one for every four bytes and at least one, without a tokenizer."""
    data = text.encode()
    pieces = [data[i : i + _CHARACTERS_PER_TOKEN] for i in range(0, len(data), _CHARACTERS_PER_TOKEN)]
    return [int.from_bytes(piece, "little") % facts.vocab_size for piece in pieces] or [0]
