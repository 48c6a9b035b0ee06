"""Our advantages equal the advantages that TRL's GRPOTrainer computes from the same rewards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.objective.advantages import batch_advantages
from tests.conformance import oracle
from tests.conformance.batches import options, outcomes, random_groups
from tests.conformance.conftest import Models

SCALINGS: list[dict[str, Any]] = [
    {"scale_rewards": "group"},
    {"scale_rewards": "batch"},
    {"scale_rewards": "none"},
    {"multi_objective_aggregation": "normalize_then_sum"},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: str(*scaling.values()))
@pytest.mark.parametrize("weights", [(1.0, 0.5), (-2.0, 3.0)])
def test_advantages_are_trls(
    scaling: dict[str, Any], weights: tuple[float, float], models: Models, tmp_path: Path
) -> None:
    groups = random_groups(4, 4, seed=3)
    theirs = oracle.make_oracle(models.start, groups, tmp_path, reward_weights=list(weights), **options(**scaling))
    expected = oracle.score(theirs, groups)["advantages"].numpy().reshape(4, 4)
    mine = batch_advantages(
        [outcomes(group, weights) for group in groups],
        scale_rewards=scaling.get("scale_rewards", "group"),
        aggregation=scaling.get("multi_objective_aggregation", "sum_then_normalize"),
    )
    assert None not in [None if advantages_G is None else 0 for advantages_G in mine]
    np.testing.assert_allclose(np.stack([np.asarray(advantages_G) for advantages_G in mine]), expected, atol=2e-6)
