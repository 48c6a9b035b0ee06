"""FakeEngine with a real transformers model behind its dictionary, so that it answers probes as vLLM would."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.weights.fake_engine import FakeEngine
from tests.weights.known_weights import logprobs_of


class ExactEngine(FakeEngine):
    """Scores probes. Clearing ``probes_go_on`` makes them wait, and ``is_at_probe`` is set while one waits."""

    def __init__(self, model_dir: str) -> None:
        super().__init__()
        self._policy = Qwen3ForCausalLM(Qwen3Config.from_pretrained(model_dir)).eval()
        self.probes_go_on = asyncio.Event()
        self.probes_go_on.set()
        self.is_at_probe = False

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        self.is_at_probe = True
        await self.probes_go_on.wait()
        self.is_at_probe = False
        ids = list(token_ids)

        async def answer() -> list[list[float]]:
            return [self.logprobs(ids)]

        return answer()

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return log p of all tokens but the first, with the loaded weights."""
        weights: dict[str, Any] = dict(self.weights)
        self._policy.load_state_dict(weights, strict=False)
        return logprobs_of(self._policy, ids[:1], ids[1:])
