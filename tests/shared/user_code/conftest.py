"""The pool's metrics, which the rewarder has implemented."""

import pytest

from services.rewarder.rewarder_metrics import RewarderMetrics


@pytest.fixture
def metrics() -> RewarderMetrics:
    return RewarderMetrics()
