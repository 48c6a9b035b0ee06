"""Tiny reward models on disk, made once, and a source that serves them in real processes.

Nothing here imports torch before it is used, because `make check` runs the unit tests of this folder without it.
"""

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

import pytest

from services.rewarder.reward_call import RewardCall, Verdict
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.reward_models import RewardModels
from services.rewarder.rewarder_metrics import RewarderMetrics


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a reward model."""
    from tests.tiny_reward_model import make_tiny_reward_model

    return make_tiny_reward_model(tmp_path_factory.mktemp("reward model") / "tiny")


@pytest.fixture(scope="session")
def other_reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a second reward model, which gives other rewards."""
    from tests.tiny_reward_model import make_tiny_reward_model

    return make_tiny_reward_model(tmp_path_factory.mktemp("other model") / "tiny", seed=1)


def call_for(*pairs: tuple[str, str]) -> RewardCall:
    """Return a call for these prompts and completions."""
    return RewardCall([prompt for prompt, _ in pairs], [completion for _, completion in pairs], {})


def only(verdicts: list[Verdict]) -> Verdict:
    """Return the only verdict."""
    (verdict,) = verdicts
    return verdict


def count(metrics: RewarderMetrics, name: str, **labels: str) -> float:
    """Return a sample's value; 0 if it has none."""
    return metrics.registry.get_sample_value(f"headrace_reward_model_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def serving(
    settings: ModelSettings | None = None,
    *,
    metrics: RewarderMetrics | None = None,
    in_use: Callable[[], Collection[str]] = tuple,
) -> AsyncGenerator[RewardModels]:
    """Return the source, and end its processes afterwards."""
    registry = (metrics or RewarderMetrics()).registry
    # The timeout is long, because importing torch takes a while on a busy machine.
    chosen = settings or ModelSettings(device="cpu", check_timeout_s=100.0)
    models = RewardModels(chosen, metrics=RewardModelMetrics(registry), in_use=in_use)
    try:
        yield models
    finally:
        await models.close()


def rewrite_json(path: Path, **changes: object) -> None:
    """Change top-level keys of a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
