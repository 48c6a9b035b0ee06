"""The random draws of simulated replicas: valid, repeatable, and distributed as in the settings."""

import json
import math
import statistics
from pathlib import Path

import pytest

from services.generator.simulated.draws import Draws, prompt_ids_of, text_of
from services.generator.simulated.model_facts import ModelFacts, read_model_facts
from services.generator.simulated.simulation_settings import SimulationSettings, read_simulation_settings
from shared.errors import UserError

pytestmark = pytest.mark.unit

FACTS = ModelFacts(vocab_size=50, eos_token_id=7, max_positions=64)


def test_a_completion_ends_only_with_the_end_of_sequence_or_is_cut_off() -> None:
    draws = Draws(SimulationSettings(completion_tokens=30), FACTS, index=0)
    reasons: set[str] = set()
    for _ in range(300):
        drawn = draws.completion(max_tokens=40)
        reasons.add(drawn.finish_reason)
        assert 1 <= len(drawn.token_ids) == len(drawn.logprobs) <= 40
        assert all(0 <= token < 50 for token in drawn.token_ids)
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in drawn.logprobs)
        assert 7 not in drawn.token_ids[:-1]
        assert (drawn.token_ids[-1] == 7) == (drawn.finish_reason == "stop")
        assert drawn.finish_reason == "stop" or len(drawn.token_ids) == 40
    assert reasons == {"stop", "length"}


def test_draws_depend_on_the_seed_and_the_replica() -> None:
    def first(seed: int, index: int) -> list[int]:
        return Draws(SimulationSettings(seed=seed), FACTS, index=index).completion(max_tokens=30).token_ids

    assert first(1, 0) == first(1, 0)
    assert len({tuple(first(seed, index)) for seed in (1, 2) for index in (0, 1)}) == 4


def test_lengths_logprobs_and_times_have_the_medians_and_means_that_were_set() -> None:
    settings = SimulationSettings(completion_tokens=100, surprise_nats=0.8, first_token_s=0.2, prefill_tokens_per_s=1e4)
    draws = Draws(settings, FACTS, index=3)
    drawn = [draws.completion(max_tokens=10**6) for _ in range(3000)]
    assert statistics.median(len(one.token_ids) for one in drawn) == pytest.approx(100, rel=0.06)
    logprobs = [logprob for one in drawn[:300] for logprob in one.logprobs]
    assert -statistics.fmean(logprobs) == pytest.approx(0.8, rel=0.03)
    times_s = [draws.first_token_s(num_prompt_tokens=1000) for _ in range(2000)]
    assert statistics.median(times_s) == pytest.approx(0.2 + 0.1, rel=0.03)


def test_text_says_what_it_is_and_pieces_of_it_fit_together() -> None:
    assert text_of(8).startswith("simulated token ")
    assert len(text_of(100)) == 400
    assert text_of(3) + text_of(10, start=3) == text_of(10)
    assert all(0 <= token < 50 for token in prompt_ids_of("Wie gehts? äöü", FACTS))
    assert prompt_ids_of("", FACTS) == [0]


def test_the_facts_of_a_model_are_read_only_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 100, "eos_token_id": [5, 6], "max_position_embeddings": 512})
    )
    assert read_model_facts(str(tmp_path), revision=None) == ModelFacts(100, 5, 512)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 9, "eos_token_id": 8}}))
    assert read_model_facts(str(tmp_path), revision=None) == ModelFacts(9, 8, None)


@pytest.mark.parametrize("content", ["{", "{}", '{"vocab_size": "many"}'])
def test_a_config_that_says_too_little_is_refused_with_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        read_model_facts(str(tmp_path), revision=None)


def test_a_wrong_setting_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "-1")
    with pytest.raises(UserError, match="HEADRACE_SIMULATED_SPEED_UP"):
        read_simulation_settings()
