"""The same model on a GPU gives the same rewards, within its precision."""

from pathlib import Path

import pytest

from services.rewarder.reward_answer import Inspected
from services.rewarder.reward_models.model_settings import ModelSettings
from tests.rewarder.reward_models.conftest import call_for, serving

PAIRS = [(f"{number}+{number}=", str(2 * number)) for number in range(40)]


@pytest.mark.gpu
async def test_a_gpu_gives_the_numbers_of_the_cpu(reward_model: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    name = str(reward_model)
    found: dict[str, list[float | None]] = {}
    for device in ("cpu", "auto"):
        async with serving(ModelSettings(device=device, check_timeout_s=100.0)) as models:
            inspected = await models.inspect(name)
            assert isinstance(inspected, Inspected), inspected
            assert f" on {'cuda' if device == 'auto' else 'cpu'} in float32" in inspected.summary
            answer, _ = await models.call(name, call_for(*PAIRS), timeout_s=60, lane="a")
            found[device] = [verdict.value for verdict in answer.verdicts]
    assert found["auto"] == pytest.approx(found["cpu"], abs=1e-3)
    assert None not in found["auto"]
