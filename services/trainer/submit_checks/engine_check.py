"""Asks a live generator whether vLLM accepts a run's options, so that a wrong option fails at submit, not in a run.

    fleet in Redis --> each live one, until one answers --POST /internal/v1/engine/check--> errors, warnings

If no generator is alive, or none can answer, the run is accepted. The run then shows errors that its generators find.
"""

import asyncio
import time
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from services.trainer.settings import TrainerSettings
from shared.engine_check import ENGINE_CHECK_PATH, EngineCheck, EngineVerdict
from shared.redis.keys import FLEET, FLEET_LEASES
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis, patiently
from shared.registration import decode_registration
from shared.run_options.run_config import RunConfig
from shared.service.tls import trouble_with

_PATIENCE_S = 10.0


class GeneratorAsker:
    """Asks live generators whether vLLM accepts a run's options, one after the other until one answers.

    Args:
        redis: Has the list of live generators.
        settings: Key, TLS settings and timeout of the requests.
    """

    def __init__(self, redis: Redis, settings: TrainerSettings) -> None:
        self._redis = redis
        self._key = settings.internal_key.get_secret_value()
        self._peers = settings.generator_tls()
        self._timeout_s = settings.engine_check_timeout_s

    async def check(self, config: RunConfig) -> EngineVerdict:
        """Return vLLM's verdict on the run, or a warning that no generator could be asked."""
        question = EngineCheck(config=config.model_dump(mode="json")).model_dump_json()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        reasons: list[str] = []
        ends_at = time.monotonic() + self._timeout_s
        async with httpx.AsyncClient(headers=headers, **self._peers.for_async_client()) as client:
            for replica_id, url in sorted((await self._living()).items()):
                answer = await _ask(client, url, question, timeout_s=max(1.0, ends_at - time.monotonic()))
                if isinstance(answer, EngineVerdict):
                    return answer
                reasons.append(f"{replica_id} {answer}")
        why = "; ".join(reasons) or "no generator is alive yet"
        return EngineVerdict(
            warnings=[f"vLLM's options were not checked: {why}. If vLLM refuses one, the run shows that later"]
        )

    async def _living(self) -> dict[str, str]:
        names = await alive(self._redis, leases=FLEET_LEASES)
        entries: Mapping[bytes, bytes] = await patiently(
            lambda: self._redis.hgetall(FLEET), what="reading the generators", timeout_s=_PATIENCE_S
        )
        found = {name.decode(): decode_registration(entry) for name, entry in entries.items()}
        return {name: it.url for name, it in found.items() if name in names and it.url and not it.doing}


async def _ask(client: httpx.AsyncClient, url: str, question: str, *, timeout_s: float) -> EngineVerdict | str:
    """Ask one generator. Return its verdict, or a phrase for a warning, such as ``answered 404``."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.post(f"{url.rstrip('/')}{ENGINE_CHECK_PATH}", content=question, timeout=timeout_s)
    except TimeoutError as error:
        return f"did not answer ({type(error).__name__})"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"did not answer ({trouble_with(error, host=urlsplit(url).hostname or '') or type(error).__name__})"
    if response.status_code != HTTPStatus.OK:
        return f"answered {response.status_code}"
    try:
        return EngineVerdict.model_validate_json(response.content)
    except ValidationError:
        return "sent an unknown answer; do both have the same headrace version?"


def what_weakens_learning(config: RunConfig) -> list[str]:
    """Return a warning if sampling is restricted (top_p, ...) and importance weights are per completion, else []."""
    restrictions = config.restrictions()
    if not restrictions or not config.vllm_importance_sampling_correction:
        return []
    if not config.vllm_importance_sampling_mode.startswith("sequence"):
        return []
    return [
        f"completions are sampled with {', '.join(restrictions)}, but the trainer computes logprobs without that, "
        "so the importance weight of a whole completion may be close to 0. "
        "vllm_importance_sampling_mode: token_truncate weights each token separately"
    ]
