"""The three services with a Redis of their own, shared by the tests of a file."""

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import RedisServer
from tests.http.service_process import SERVICES, ServiceProcess

Services = Callable[[str], ServiceProcess]


@pytest.fixture(scope="module")
def http_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return a server that nobody empties while the services use it."""
    server = RedisServer(tmp_path_factory.mktemp("http-redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module", params=SERVICES)
def service(
    request: pytest.FixtureRequest, http_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """Return one service after the other."""
    kind: str = request.param
    process = ServiceProcess(kind, http_redis.url, tmp_path_factory.mktemp(kind))
    yield process
    assert process.end() == 0, process.log()
