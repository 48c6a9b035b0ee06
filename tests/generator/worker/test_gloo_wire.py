"""A worker that cannot reach the trainer says so while the others still wait for it."""

import socket
from typing import Any

import pytest

from services.generator.worker.gloo_wire import GlooWire


@pytest.mark.parametrize("timeout_s", [59.0, 8.0])
def test_a_trainer_that_drops_all_packets_is_given_up_long_before_the_rendezvous_ends(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def dropped(address: Any, timeout: float) -> socket.socket:
        waited.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", dropped)
    with pytest.raises(RuntimeError, match=r"the trainer cannot be reached at 10\.0\.0\.1:5: timed out"):
        GlooWire(master_address="10.0.0.1", master_port=5, rank=1, world_size=2, timeout_s=timeout_s)
    assert len(waited) == 1
    assert waited[0] <= timeout_s / 2
    assert waited[0] <= 10
