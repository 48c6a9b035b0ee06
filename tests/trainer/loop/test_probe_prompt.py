"""The probe that generators answer after a push, and whether weights may be sent while it is computed."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.loop.push_schedule import make_prober
from services.trainer.push.prober import Prober
from shared.run_options.run_config import RunConfig


def prober_of(num_ranks: int, prompts: list[list[int]], **options: Any) -> Prober | None:
    """Return the prober for a core with this many ranks and a data set whose prompts are token ids."""
    config = RunConfig(model="m", dataset_name="/data.jsonl", reward_funcs=["exact"], **options)

    def probe(token_ids: list[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    def row_at(number: int) -> SimpleNamespace:
        return SimpleNamespace(problem=None, prompt=prompts[number])

    core: Any = SimpleNamespace(num_ranks=num_ranks, probe=probe)
    encoder: Any = SimpleNamespace(encode=list)
    rows: Any = SimpleNamespace(row_at=row_at)
    return make_prober(config, core, encoder, rows)


@pytest.mark.parametrize(("num_ranks", "is_alone"), [(1, True), (2, False)])
def test_only_a_single_rank_may_send_weights_meanwhile(num_ranks: int, is_alone: bool) -> None:
    prober = prober_of(num_ranks, [[5] * 20, [6] * 20])
    assert prober is not None
    assert prober.is_alone == is_alone
    assert prober.probe(timeout_s=1.0).token_ids == [5] * 20 + [6] * 12


def test_a_prompt_of_one_token_has_no_logprob_to_compare() -> None:
    assert prober_of(1, [[5], *([[]] * 63)]) is None


def test_a_run_may_ask_for_no_probe() -> None:
    assert prober_of(1, [[5] * 32], push_probe_tolerance=None) is None
