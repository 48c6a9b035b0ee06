"""A wrong variable gives a line that names it, the same in every process. Its value is never quoted."""

import pytest

from services.generator.simulated.simulation_settings import SimulationSettings
from services.trainer.settings import TrainerSettings
from shared.errors import UserError
from shared.settings import ServiceSettings, from_environment

pytestmark = pytest.mark.unit


def test_settings_that_are_right_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "8123")
    assert from_environment(ServiceSettings).port == 8123


def test_each_wrong_variable_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "many")
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "xml")
    with pytest.raises(UserError) as caught:
        from_environment(ServiceSettings)
    lines = sorted(str(caught.value).splitlines())
    assert [line.partition(":")[0] for line in lines] == ["HEADRACE_LOG_FORMAT", "HEADRACE_PORT"]


def test_an_error_inside_a_list_is_reported_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RANK_CPUS", '[0, "x"]')
    with pytest.raises(UserError, match=r"^HEADRACE_RANK_CPUS, 1: .*integer"):
        from_environment(TrainerSettings)


def test_a_table_that_is_not_json_is_a_one_line_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RANK_ENV", "NCCL_ALGO=canary")
    with pytest.raises(UserError, match=r"^HEADRACE_RANK_ENV: not JSON \(Expecting value") as caught:
        from_environment(TrainerSettings)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:6379", "it does not begin with redis://"),
        ("http://:canary@127.0.0.1:6379", "it does not begin with redis://"),
        ("redis://:canary@127.0.0.1:99999/0", "its port is not a number from 1 to 65535"),
        ("redis://:canary@127.0.0.1:0/0", "its port is 0"),
        ("redis://:canary@/0", "it names no host"),
        ("redis://:canary@127.0.0.1:6379/abc", "must be the number of a database"),
    ],
)
def test_an_impossible_redis_url_is_refused_without_showing_the_password(
    url: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    with pytest.raises(UserError, match=rf"^HEADRACE_REDIS_URL: .*{reason}") as caught:
        from_environment(ServiceSettings)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1", "redis://u:p@[::1]:6379/3", "rediss://r.example.com:6380/0", "unix:///run/redis.sock"]
)
def test_where_a_redis_can_be_is_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    assert from_environment(ServiceSettings).redis_url.get_secret_value() == url


@pytest.mark.parametrize("name", ["HEADRACE_API_KEY", "HEADRACE_INTERNAL_KEY"])
def test_a_key_with_a_space_is_refused_before_a_rank_cannot_read_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "two words")
    with pytest.raises(UserError, match=f"{name}: a key has no spaces") as refused:
        from_environment(TrainerSettings)
    assert "two words" not in str(refused.value)


def test_a_log_level_is_one_of_five_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "warning")
    assert from_environment(ServiceSettings).log_level == "WARNING"
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "LOUD")
    with pytest.raises(UserError, match=r"^HEADRACE_LOG_LEVEL: .*'DEBUG'"):
        from_environment(ServiceSettings)


def test_one_port_for_two_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "8123")
    monkeypatch.setenv("HEADRACE_METRICS_PORT", "8123")
    with pytest.raises(UserError, match=r"^HEADRACE_METRICS_PORT and HEADRACE_PORT are both 8123"):
        from_environment(ServiceSettings)


def test_requests_leave_connections_for_probes_and_watchers_leave_requests_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_MAX_REQUESTS", "100")
    monkeypatch.setenv("HEADRACE_MAX_CONNECTIONS", "100")
    with pytest.raises(UserError, match=r"HEADRACE_MAX_CONNECTIONS=100: .* Raise the latter to 134$"):
        from_environment(ServiceSettings)
    monkeypatch.setenv("HEADRACE_MAX_CONNECTIONS", "134")
    assert from_environment(ServiceSettings).http_limits().max_requests == 100
    monkeypatch.setenv("HEADRACE_MAX_EVENT_STREAMS", "100")
    with pytest.raises(UserError, match=r"HEADRACE_MAX_EVENT_STREAMS=100 leaves no requests for anything else"):
        from_environment(TrainerSettings)


def test_the_prefix_is_that_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SEED", "-1")
    with pytest.raises(UserError, match=r"^HEADRACE_SIMULATED_SEED: "):
        from_environment(SimulationSettings)


def test_an_error_of_several_variables_together_is_a_sentence_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOST", "0.0.0.0")
    monkeypatch.setenv("HEADRACE_API_KEY", "canary")
    monkeypatch.delenv("HEADRACE_INTERNAL_KEY", raising=False)
    with pytest.raises(UserError, match=r"^binding to 0\.0\.0\.0") as caught:
        from_environment(TrainerSettings)
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None, "pydantic's message contains the values"
