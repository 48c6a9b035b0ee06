"""Where /metrics is served."""

import socket

import pytest

from services.generator.metrics import GeneratorMetrics
from shared.errors import UserError


def test_a_metrics_port_that_is_taken_is_the_operators_mistake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: .*; set HEADRACE_METRICS_PORT to a free port"):
            GeneratorMetrics().serve(host="127.0.0.1", port=port)
