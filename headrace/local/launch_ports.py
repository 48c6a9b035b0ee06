"""Chooses the ports of one `headrace up`, and holds them from then on, so that no other process can take them."""

import contextlib
from dataclasses import dataclass

from headrace.local.hang_watch import Question
from headrace.local.held_port import HeldPort
from shared.errors import UserError
from shared.serving.listening import HTTP, METRICS

DEFAULT_API_PORT = 8400
_NUM_PORTS_TRIED = 50
_TRAINER, _REWARDER, _SESSIONS, _FIRST_GENERATOR = 0, 1, 2, 3
"""Offsets from the first metrics port."""


class Doors:
    """The ports of one service: HTTP and, if it serves metrics, a second one.

    Args:
        http: The held HTTP port.
        metrics_port: Number of the metrics port; 0 means no metrics.
        scheme: ``http`` or ``https``, for the HTTP port.

    Raises:
        UserError: The metrics port is taken.
    """

    def __init__(self, http: HeldPort, *, metrics_port: int, scheme: str = "http") -> None:
        self.url = f"{scheme}://127.0.0.1:{http.number}"
        self.question = Question(http.number)
        """The request that tests whether the service hangs."""
        self.listeners = {HTTP: http}
        """The ports that are handed on to the service, by name."""
        if metrics_port:
            try:
                self.listeners[METRICS] = HeldPort(metrics_port)
            except OSError as error:
                http.close()
                raise UserError(
                    f"port {metrics_port} is taken; HEADRACE_METRICS_PORT must be the first of consecutive free ports, "
                    "one for each service"
                ) from error

    @property
    def environment(self) -> dict[str, str]:
        """The service's environment variables for its ports."""
        numbers = {name: str(port.number) for name, port in self.listeners.items()}
        return {"HEADRACE_PORT": numbers[HTTP], "HEADRACE_METRICS_PORT": numbers.get(METRICS, "0")}

    def close(self) -> None:
        """Release the service's ports."""
        for port in self.listeners.values():
            port.close()


@dataclass
class LaunchPorts:
    """The ports of Redis and all services of one `headrace up`."""

    redis: HeldPort
    trainer: Doors
    rewarder: Doors
    sessions: Doors
    generators: list[Doors]
    note: str = ""
    """Says that the run API has another port than usual; empty otherwise."""

    def close(self) -> None:
        """Release all ports."""
        self.redis.close()
        for doors in (self.trainer, self.rewarder, self.sessions, *self.generators):
            doors.close()


def hold_ports(*, api_port: int | None, metrics_port: int, num_generators: int, scheme: str = "http") -> LaunchPorts:
    """Choose and hold the ports of all services and of Redis.

    Args:
        api_port: Port of the run API; None takes 8400 or the next free port.
        metrics_port: First of consecutive metrics ports, one per service; 0 means no metrics.
        num_generators: Number of generator processes.
        scheme: ``http`` or ``https``, for all services.

    Raises:
        UserError: ``api_port`` or a metrics port is taken.
    """
    for_metrics = _for_metrics(metrics_port, num_generators)
    with contextlib.ExitStack() as held:
        trainer = _doors(_api_port(api_port, for_metrics), metrics_port, _TRAINER, scheme)
        held.callback(trainer.close)
        rewarder = _doors(_other_port(for_metrics), metrics_port, _REWARDER, scheme)
        held.callback(rewarder.close)
        sessions = _doors(_other_port(for_metrics), metrics_port, _SESSIONS, scheme)
        held.callback(sessions.close)
        generators = hold_generators(range(num_generators), metrics_port=metrics_port, scheme=scheme)
        redis = _other_port(for_metrics)
        held.pop_all()
    number, note = trainer.listeners[HTTP].number, ""
    if api_port is None and number != DEFAULT_API_PORT and DEFAULT_API_PORT not in for_metrics:
        note = f"port {DEFAULT_API_PORT} is taken: using {number}"
    return LaunchPorts(redis, trainer, rewarder, sessions, generators, note)


def hold_generators(indices: range, *, metrics_port: int, scheme: str = "http") -> list[Doors]:
    """Choose and hold ports for the generators with these indices.

    Raises:
        UserError: A metrics port is taken.
        OSError: No port or file descriptor is free.
    """
    for_metrics = _for_metrics(metrics_port, indices.stop)
    with contextlib.ExitStack() as held:
        found: list[Doors] = []
        for index in indices:
            found.append(_doors(_other_port(for_metrics), metrics_port, _FIRST_GENERATOR + index, scheme))
            held.callback(found[-1].close)
        held.pop_all()
    return found


def _for_metrics(first: int, num_generators: int) -> range:
    return range(first, first + _FIRST_GENERATOR + num_generators) if first else range(0)


def _other_port(taken: range) -> HeldPort:
    """Hold a free port outside a range that is meant for other listeners."""
    while (port := HeldPort()).number in taken:
        port.close()
    return port


def _doors(http: HeldPort, first_metrics_port: int, place: int, scheme: str) -> Doors:
    return Doors(http, metrics_port=first_metrics_port + place if first_metrics_port else 0, scheme=scheme)


def _api_port(wanted: int | None, for_metrics: range) -> HeldPort:
    if wanted is not None:
        held = None if wanted in for_metrics else _hold(wanted)
        if held is None:
            raise UserError(f"port {wanted} is taken; name another one with --port, or omit --port to have one chosen")
        return held
    for number in range(DEFAULT_API_PORT, DEFAULT_API_PORT + _NUM_PORTS_TRIED):
        if number not in for_metrics and (held := _hold(number)) is not None:
            return held
    return _other_port(for_metrics)


def _hold(number: int) -> HeldPort | None:
    try:
        return HeldPort(number)
    except OSError:
        return None
