"""Where models may be loaded from, and which of them are in memory."""

import asyncio
import shutil
from pathlib import Path

import pytest

from services.rewarder.reward_answer import Inspected
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.user_code.worker_frames import Refused
from tests.rewarder.reward_models.conftest import call_for, count, serving
from tests.rewarder.reward_models.fake_hub import COMMIT, serving_hub
from tests.tiny_reward_model import make_tiny_reward_model

ONE_AT_A_TIME = ModelSettings(device="cpu", max_loaded=1, check_timeout_s=100.0)
ONE = call_for(("a", "b"))


@pytest.mark.slow
async def test_a_model_of_the_hub_is_fetched_without_code_and_pickle_and_has_its_commit_as_version(
    reward_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hub = tmp_path / "on the hub"
    shutil.copytree(reward_model, on_hub)
    for name in ("model.py", "pytorch_model.bin", "README.md"):
        (on_hub / name).write_text("not to be fetched")
    with serving_hub(on_hub) as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        async with serving() as models:
            refused = await models.inspect("org/name@v2")
            assert refused == Refused("org/name has no revision 'v2' on the hub")
            refused = await models.inspect("org/other")
            assert isinstance(refused, Refused)
            assert refused.detail.startswith("org/other is not on the hub, or private; check the spelling")
            inspected = await models.inspect("org/name@v1")
            assert isinstance(inspected, Inspected), (hub.asked, inspected)
            assert inspected.version == COMMIT[:12]
            answer, _ = await models.call("org/name@v1", ONE, timeout_s=60, lane="a")
            assert answer.version == COMMIT[:12]
        fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
    assert not {"model.py", "pytorch_model.bin", "README.md"} & fetched


@pytest.mark.slow
async def test_the_unused_model_that_was_used_longest_ago_makes_room(
    reward_model: Path, other_reward_model: Path, metrics: RewarderMetrics
) -> None:
    name, other = str(reward_model), str(other_reward_model)
    used: set[str] = {name}
    async with serving(ONE_AT_A_TIME, metrics=metrics, in_use=lambda: used) as models:
        assert isinstance(await models.inspect(name), Inspected)
        with pytest.raises(RewardFailure) as caught:
            await models.call(other, ONE, timeout_s=60, lane="a")
        assert caught.value.outcome == "overload"
        assert caught.value.detail.endswith(
            f"beside {name}: they are in use, and this rewarder has 1 at a time; set HEADRACE_REWARD_MODEL_MAX_LOADED"
        )
        refused = await models.inspect(other)
        assert refused == Refused(caught.value.detail)
        assert count(metrics, "loads_total", result="loaded") == 1
        used.clear()
        first, _ = await models.call(other, ONE, timeout_s=60, lane="a")
        assert list(models.listed()) == [other]
        assert count(metrics, "kills_total", reason="unloaded") == 1
        assert metrics.registry.get_sample_value("headrace_reward_models_loaded") == 1
        assert first.verdicts[0].outcome == "scored"


async def test_models_that_are_checked_together_have_to_fit_together(
    reward_model: Path, other_reward_model: Path
) -> None:
    async with serving(ONE_AT_A_TIME) as models:
        found = await asyncio.gather(models.inspect(str(reward_model)), models.inspect(str(other_reward_model)))
        assert [type(what).__name__ for what in found] == ["Inspected", "Refused"]


@pytest.mark.slow
async def test_a_directory_that_was_changed_is_loaded_anew_at_the_next_check(tmp_path: Path) -> None:
    directory = make_tiny_reward_model(tmp_path / "model")
    name = str(directory)
    async with serving() as models:
        before, _ = await models.call(name, ONE, timeout_s=60, lane="a")
        make_tiny_reward_model(directory, seed=5)
        same, _ = await models.call(name, ONE, timeout_s=60, lane="a")
        assert (same.version, same.verdicts) == (before.version, before.verdicts)
        assert isinstance(await models.inspect(name), Inspected)
        after, _ = await models.call(name, ONE, timeout_s=60, lane="a")
        assert after.version != before.version
        assert after.verdicts != before.verdicts
