"""Reward models as users see them, with the rewarder as a process: checked at submit, used in scoring, and listed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.install_commands import install_extras
from shared.messages import decode_scored_group, encode
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.groups import completed_group
from tests.rewarder.conftest import RewarderProcess, descendants, is_running, until, wait_for
from tests.stream_view import entries

KEY = {"Authorization": "Bearer key-of-the-test"}


def ask(rewarder: RewarderProcess, method: str, path: str, **body: Any) -> httpx.Response:
    return httpx.request(method, rewarder.url(path), json=body or None, headers=KEY, timeout=100, trust_env=False)


@pytest.mark.slow
async def test_a_run_and_v1_score_use_a_reward_model_by_its_name(
    redis: Redis,
    run_config: RunConfig,
    start_rewarder: Callable[..., RewarderProcess],
    reward_model: Path,
) -> None:
    name = str(reward_model)
    rewarder = start_rewarder(HEADRACE_REWARD_MODEL_DEVICE="cpu", HEADRACE_CHECK_TIMEOUT_S="100")
    rewarder.wait_until_ready()

    refused = ask(rewarder, "POST", "/v1/rewards/check", reward_funcs=["accuracy_reward", "/tmp/no/such/model"])
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "/tmp/no/such/model"
    assert refused.json()["detail"].startswith("there is no directory /tmp/no/such/model where the rewarder runs; give")

    checked = ask(rewarder, "POST", "/v1/rewards/check", reward_funcs=[name]).raise_for_status().json()
    (found,) = checked["reward_funcs"]
    assert (found["kind"], found["required_columns"]) == ("reward-model", [])
    assert found["summary"] == "Qwen3ForSequenceClassification on cpu in float32"
    listed = ask(rewarder, "GET", "/v1/rewards").raise_for_status().json()["reward_funcs"]
    assert found in listed

    scored = ask(
        rewarder,
        "POST",
        "/v1/score",
        reward_funcs=[name, "think_format_reward", "org/not-there"],
        prompts=[[{"role": "user", "content": "1+1="}]] * 2,
        completions=[[{"role": "assistant", "content": text}] for text in ("2", "3")],
        chat_template_kwargs={"shout": True},
    )
    outcomes = scored.raise_for_status().json()["outcomes"]
    assert [[outcome["outcome"] for outcome in row] for row in outcomes] == [["scored", "scored", "error"]] * 2
    assert outcomes[0][0]["version"] == found["version"]
    assert outcomes[0][0]["value"] != outcomes[1][0]["value"]
    assert outcomes[0][2]["detail"].startswith("org/not-there is not in the rewarder's cache of Hugging Face")

    changed = run_config.model_copy(update={"reward_funcs": [name]})
    await RunStore(redis).create("run-test", changed, run_dir="unused")
    await RunStore(redis).set_status("run-test", "running")
    keys = RunKeys("run-test")
    await redis.xadd(keys.completions, {"group_id": "00000001", "payload": encode(completed_group("00000001"))})

    async def is_scored() -> bool:
        return bool(await redis.xlen(keys.scored))

    await until(is_scored, what="the scored group")
    group = decode_scored_group((await entries(redis, keys.scored))[0][1]["payload"])
    assert [(reward.name, reward.outcome) for rollout in group.rollouts for reward in rollout.rewards] == [
        (name, "scored")
    ] * len(group.rollouts)

    below = descendants(rewarder.process.pid)
    assert rewarder.stop() == 0, rewarder.log()
    wait_for(lambda: not any(is_running(pid) for pid in below), what="the end of every process")


def test_without_torch_the_sentence_says_what_to_install(
    start_rewarder: Callable[..., RewarderProcess], tmp_path: Path
) -> None:
    # As in an environment without the extra: the packages cannot be found.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: (\n"
        "    None if name in ('torch', 'transformers', 'safetensors') else find(name, package)\n"
        ")\n"
    )
    root = Path(__file__).parent.parent.parent.parent
    rewarder = start_rewarder(PYTHONPATH=f"{tmp_path}:{root}")
    rewarder.wait_until_ready()
    refused = ask(rewarder, "POST", "/v1/rewards/check", reward_funcs=["org/name"])
    assert refused.status_code == 422
    assert refused.json()["detail"] == (
        "'org/name' is a reward model, and this rewarder does not have torch, transformers, safetensors; where it "
        f"runs, install with {install_extras('rewarder-models')}"
    )
