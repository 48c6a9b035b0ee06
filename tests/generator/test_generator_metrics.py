"""The address of /metrics, and the processes whose metrics it shows."""

import socket

import pytest
from prometheus_client import generate_latest

from services.generator.metrics import GeneratorMetrics
from shared.errors import UserError
from shared.serving.metrics_server import serving_metrics

pytestmark = pytest.mark.unit


def test_a_metrics_port_that_is_taken_is_the_operators_mistake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"127.0.0.1:{port}: .* set HEADRACE_METRICS_PORT to a free port"),
            serving_metrics(GeneratorMetrics().registry, host="127.0.0.1", port=port),
        ):
            pass


def test_metrics_say_which_replica_they_are_of() -> None:
    metrics = GeneratorMetrics()
    metrics.name_replica("generator-7")
    assert 'headrace_replica_info{replica_id="generator-7"} 1.0' in generate_latest(metrics.registry).decode()
