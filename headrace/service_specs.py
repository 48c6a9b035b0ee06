"""Which processes make up headrace on one machine, with their commands and their environment.

    redis --> trainer (run API; spawns ranks)   rewarder   generator-0 .. generator-(N-1)
                                                           or one process of N simulated ones

Everything that a service is told, it is told by environment: a key on a command line is public.
"""

import os
import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace import cpu_placement, embedded_redis
from headrace.state_dir import Keys, StateDir
from headrace.supervised_process import ServiceSpec
from shared.errors import UserError

DEFAULT_API_PORT = 8400
_NUM_PORTS_TRIED = 50
_SECRET_FILES = frozenset({"HEADRACE_API_KEY_FILE", "HEADRACE_INTERNAL_KEY_FILE", "HEADRACE_REDIS_PASSWORD_FILE"})
"""Of the person who starts us: services refuse a secret beside the file of another, and theirs are given to them."""
REDIS, TRAINER, REWARDER, SIMULATED = "redis", "trainer", "rewarder", "simulated"


def default_commands() -> dict[str, tuple[str, ...]]:
    """Return how the services are started."""
    modules = {TRAINER: "trainer", REWARDER: "rewarder", "generator": "generator", SIMULATED: "generator.simulated"}
    return {name: (sys.executable, "-m", f"services.{module}") for name, module in modules.items()}


@dataclass(frozen=True)
class UpSettings:
    """What `headrace up` was asked for.

    Attributes:
        num_simulated: Simulated generators, in one process, that take the place of all others; 0 is none.
        metrics_port: Of the trainer's metrics; the rewarder's are on the next one, the generators' on those after it.
            0 is none.
    """

    state_dir: Path
    num_generators: int = 1
    num_simulated: int = 0
    api_port: int | None = None
    metrics_port: int = 0
    redis_url: str | None = field(default=None, repr=False)
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=default_commands)

    @property
    def num_generator_processes(self) -> int:
        """How many processes generate."""
        return 1 if self.num_simulated else self.num_generators

    def metrics_of(self, place: int) -> dict[str, str]:
        """Return what the service at this place is told: trainer 0, rewarder 1, generators from 2 on."""
        return {"HEADRACE_METRICS_PORT": str(self.metrics_port + place if self.metrics_port else 0)}


@dataclass(frozen=True)
class Addresses:
    """The ports of one launch."""

    redis: int
    trainer: int
    rewarder: int
    generators: tuple[int, ...]

    @property
    def api_url(self) -> str:
        """The public API."""
        return f"http://127.0.0.1:{self.trainer}"

    @property
    def rewarder_url(self) -> str:
        """The rewarder."""
        return f"http://127.0.0.1:{self.rewarder}"

    @property
    def generator_urls(self) -> tuple[str, ...]:
        """The generators, in order."""
        return tuple(f"http://127.0.0.1:{port}" for port in self.generators)


def choose_addresses(settings: UpSettings) -> Addresses:
    """Pick a free port for everyone.

    Raises:
        UserError: The API port that was asked for is taken.
    """
    first = settings.metrics_port
    taken = set(range(first, first + 2 + settings.num_generator_processes)) if first else set[int]()
    return Addresses(
        trainer=_api_port(settings.api_port, taken),
        redis=_some_port(taken),
        rewarder=_some_port(taken),
        generators=tuple(_some_port(taken) for _ in range(settings.num_generator_processes)),
    )


def redis_spec(state: StateDir, *, port: int, password: str) -> ServiceSpec:
    """Return the embedded server; its configuration file is written."""
    config = embedded_redis.write_config(state.redis, port=port, password=password)
    return ServiceSpec(
        name=REDIS,
        command=(str(embedded_redis.server_binary()), str(config)),
        environment=dict(os.environ),
        log_path=state.logs / "redis.log",
        is_essential=True,
        stop_timeout_s=15.0,
    )


def service_specs(
    settings: UpSettings, state: StateDir, *, keys: Keys, addresses: Addresses, redis_url: str
) -> list[ServiceSpec]:
    """Return the services in the order in which they are ended: the trainer's ranks save first."""
    common = _common_environment(keys, redis_url)
    _, for_trainer = _placement(settings.num_generator_processes)
    trainer_environment = {
        "HEADRACE_PORT": str(addresses.trainer),
        "HEADRACE_REPLICA_ID": "trainer-0",
        "HEADRACE_RUNS_DIR": str(state.runs),
        "HEADRACE_REWARDER_URL": addresses.rewarder_url,
        **settings.metrics_of(0),
    }
    rewarder_environment = {
        "HEADRACE_PORT": str(addresses.rewarder),
        "HEADRACE_REPLICA_ID": "rewarder-0",
        **settings.metrics_of(1),
    }

    def spec(
        name: str, kind: str, environment: Mapping[str, str], stop_timeout_s: float, *arguments: str
    ) -> ServiceSpec:
        return ServiceSpec(
            name=name,
            command=(*settings.commands[kind], *arguments),
            environment={**common, **environment},
            log_path=state.logs / f"{name}.log",
            is_essential=kind == TRAINER,
            stop_timeout_s=stop_timeout_s,
        )

    if settings.num_simulated:
        (port,) = addresses.generators
        simulated_environment = {
            "HEADRACE_PORT": str(port),
            "HEADRACE_REPLICA_ID": SIMULATED,
            **settings.metrics_of(2),
        }
        how_many = ("--replicas", str(settings.num_simulated))
        generators = [spec(SIMULATED, SIMULATED, simulated_environment, 15.0, *how_many)]
    else:
        num_generators = len(addresses.generators)
        generators = [
            generator_spec(
                settings, state, keys=keys, redis_url=redis_url, index=index, port=port, num_generators=num_generators
            )
            for index, port in enumerate(addresses.generators)
        ]
    return [
        spec(TRAINER, TRAINER, {**trainer_environment, **_unless_set(for_trainer)}, 30.0),
        *generators,
        spec(REWARDER, REWARDER, rewarder_environment, 15.0),
    ]


def generator_spec(
    settings: UpSettings,
    state: StateDir,
    *,
    keys: Keys,
    redis_url: str,
    index: int,
    port: int,
    num_generators: int,
) -> ServiceSpec:
    """Return one of ``num_generators`` generators, counted from 0."""
    for_generators, _ = _placement(num_generators)
    name = f"generator-{index}"
    own = {
        "HEADRACE_PORT": str(port),
        "HEADRACE_REPLICA_ID": name,
        **settings.metrics_of(2 + index),
        **_unless_set(for_generators[index]),
    }
    return ServiceSpec(
        name=name,
        command=settings.commands["generator"],
        environment={**_common_environment(keys, redis_url), **own},
        log_path=state.logs / f"{name}.log",
        is_essential=False,
        stop_timeout_s=15.0,
    )


def free_port() -> int:
    """Return a port for one more service."""
    return _some_port(set())


def importable_environment() -> dict[str, str]:
    """Return this process's environment, in which another Python finds our packages and none of their namesakes."""
    root = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        # Our packages have generic names: a folder `services` where the user stands must not win over them.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": _joined_path(root, os.environ.get("PYTHONPATH")),
        "PYTHONUNBUFFERED": "1",
    }


def _common_environment(keys: Keys, redis_url: str) -> dict[str, str]:
    inherited = {name: value for name, value in importable_environment().items() if name not in _SECRET_FILES}
    return {
        **inherited,
        "HEADRACE_REDIS_URL": redis_url,
        "HEADRACE_HOST": "127.0.0.1",
        "HEADRACE_API_KEY": keys.api_key,
        "HEADRACE_INTERNAL_KEY": keys.internal_key,
        # `my_rewards:function` is looked for where the user stands.
        "HEADRACE_REWARD_PATH": _joined_path(os.environ.get("HEADRACE_REWARD_PATH"), os.getcwd()),
    }


def _placement(num_generators: int) -> tuple[list[dict[str, str]], dict[str, str]]:
    if cpu_placement.has_gpu(os.environ):
        return [{} for _ in range(num_generators)], {}
    return cpu_placement.place(cpu_placement.available_cores(), num_generators=num_generators)


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}


def _joined_path(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)


def _api_port(wanted: int | None, taken: set[int]) -> int:
    if wanted is not None:
        if wanted in taken or not _is_free(wanted):
            raise UserError(f"port {wanted} is taken; name another one with --port, or none to have one chosen")
        taken.add(wanted)
        return wanted
    for port in range(DEFAULT_API_PORT, DEFAULT_API_PORT + _NUM_PORTS_TRIED):
        if port not in taken and _is_free(port):
            taken.add(port)
            return port
    return _some_port(taken)


def _some_port(taken: set[int]) -> int:
    """Return a free port below those the kernel hands to outgoing connections.

    A service that is started again needs its port still to be there.
    """
    first_outgoing = 32768
    ranges = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if ranges.exists():
        first_outgoing = max(12_000, int(ranges.read_text().split()[0]))
    for _ in range(_NUM_PORTS_TRIED * 10):
        port = random.randrange(10_000, first_outgoing)  # not a secret
        if port not in taken and _is_free(port):
            taken.add(port)
            return port
    raise UserError("no free port was found on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
