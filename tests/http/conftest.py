"""The services with their own Redis, shared by the tests of a file."""

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import RedisServer
from tests.http.service_process import SERVICES, ServiceProcess
from tests.shared_process import SharedProcess, lent

Services = Callable[[str], ServiceProcess]


@pytest.fixture(scope="module")
def http_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return a server that is not emptied while the services use it."""
    server = RedisServer(tmp_path_factory.mktemp("http-redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Return additional settings for the services of a file."""
    return {}


@pytest.fixture(scope="module", params=SERVICES)
def shared(
    request: pytest.FixtureRequest,
    http_redis: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
    settings: dict[str, str],
) -> Iterator[SharedProcess[ServiceProcess]]:
    """Share one service after the other among the tests of a file. At the end, each must stop as usual."""
    kind: str = request.param
    directory = tmp_path_factory.mktemp(kind)
    shared = SharedProcess(lambda: ServiceProcess(kind, http_redis.url, directory, **settings))
    try:
        yield shared
        if (process := shared.living()) is not None:
            assert process.end() == 0, process.log()
    finally:
        shared.end()


@pytest.fixture
def service(shared: SharedProcess[ServiceProcess]) -> Iterator[ServiceProcess]:
    yield from lent(shared)
