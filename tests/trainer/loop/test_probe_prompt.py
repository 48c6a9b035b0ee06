"""The prompt that generators score after a push."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from services.trainer.loop.push_schedule import make_prober
from services.trainer.push.prober import Prober
from shared.run_options.run_config import RunConfig

THREAD = ThreadPoolExecutor(max_workers=1)


def prober_of(prompts: list[list[int]], **options: Any) -> Prober | None:
    """Return the prober for a data set whose prompts are token ids."""
    config = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"], **options)

    def probe(token_ids: list[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    def row_at(number: int) -> SimpleNamespace:
        return SimpleNamespace(problem=None, prompt=prompts[number])

    core: Any = SimpleNamespace(probe=probe)
    encoder: Any = SimpleNamespace(encode=list)
    rows: Any = SimpleNamespace(row_at=row_at)
    return make_prober(config, core, encoder, rows, torch_thread=THREAD)


async def test_the_probe_is_the_beginning_of_the_data_set() -> None:
    prober = prober_of([[5] * 20, [6] * 20])
    assert prober is not None
    assert (await prober.probe(0, timeout_s=1.0)).token_ids == [5] * 20 + [6] * 12


def test_a_prompt_of_one_token_has_no_logprob_to_compare() -> None:
    assert prober_of([[5], *([[]] * 63)]) is None


def test_a_run_may_ask_for_no_probe() -> None:
    assert prober_of([[5] * 32], push_probe_tolerance=None) is None
