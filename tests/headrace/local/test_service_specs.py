"""The processes that `headrace up` starts, and their environments."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

from headrace.cli import up
from headrace.cli.command_line import main, make_parser
from headrace.keys.command import keys_file
from headrace.local import launcher
from headrace.local.detached import start_detached, wait_until_up
from headrace.local.launch_ports import hold_ports
from headrace.local.launcher import announcement
from headrace.local.service_specs import UpSettings, end_patience_s, service_specs
from headrace.local.state_dir import Endpoint, ProcessMark, StateDir
from headrace.local.supervised_process import ServiceSpec
from shared.errors import UserError
from shared.service.child_secrets import handed_on
from shared.settings import ServiceSettings, from_environment

pytestmark = pytest.mark.unit


def specs_of(settings: UpSettings) -> dict[str, ServiceSpec]:
    state = StateDir(settings.state_dir)
    state.make()
    ports = hold_ports(
        api_port=settings.api_port,
        metrics_port=settings.metrics_port,
        num_generators=settings.num_generator_processes,
    )
    with contextlib.closing(ports):
        specs = service_specs(settings, state, keys=state.keys(), ports=ports, redis_url="redis://127.0.0.1:1/0")
        return {spec.name: spec for spec in specs}


def specs_with_metrics(
    state_dir: Path, *, num_generators: int = 1, num_simulated: int = 0
) -> tuple[int, dict[str, ServiceSpec]]:
    """Return the first metrics port of a free row, and the specs."""
    for first in range(20_000, 30_000, 10):
        with contextlib.suppress(UserError):
            return first, specs_of(UpSettings(state_dir, num_generators, num_simulated, metrics_port=first))
    raise AssertionError("no row of ports is free")


def launches_seen(monkeypatch: pytest.MonkeyPatch) -> list[UpSettings]:
    """Launch nothing; return the list of launches that would have happened."""
    seen: list[UpSettings] = []

    def launch(settings: UpSettings, **_: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(launcher, "run", launch)
    return seen


def test_each_real_generator_is_a_separate_process(tmp_path: Path) -> None:
    specs = specs_of(UpSettings(tmp_path / "state", num_generators=2))
    assert specs.keys() == {"trainer", "generator-0", "generator-1", "rewarder", "sessions"}
    assert specs["generator-1"].command[1:] == ("-m", "services.generator")


def test_the_trainer_has_the_time_that_its_ranks_have_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_RANK_STOP_GRACE_S", raising=False)
    assert specs_of(UpSettings(tmp_path / "state"))["trainer"].stop_timeout_s == 30.0
    assert end_patience_s() == 75.0
    monkeypatch.setenv("HEADRACE_RANK_STOP_GRACE_S", "300")
    assert specs_of(UpSettings(tmp_path / "state"))["trainer"].stop_timeout_s == 315.0
    assert end_patience_s() == 360.0


def test_services_read_the_keys_file_that_the_keys_command_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = UpSettings(tmp_path / "state")
    arguments = make_parser().parse_args(["keys", "list"])
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(settings.state_dir))
    for file in (None, tmp_path / "named"):
        if file is not None:
            monkeypatch.setenv("HEADRACE_API_KEYS_FILE", str(file))
        specs = specs_of(settings)
        assert {spec.environment["HEADRACE_API_KEYS_FILE"] for spec in specs.values()} == {str(keys_file(arguments))}


def test_simulated_generators_share_one_process_and_one_port_and_are_all_there_is(tmp_path: Path) -> None:
    specs = specs_of(UpSettings(tmp_path / "state", num_simulated=200))
    assert specs.keys() == {"trainer", "simulated", "rewarder", "sessions"}
    spec = specs["simulated"]
    assert spec.command[1:] == ("-m", "services.generator.simulated", "--replicas", "200")
    assert spec.environment["HEADRACE_REPLICA_ID"] == "simulated"
    assert int(spec.environment["HEADRACE_PORT"]) > 0


def test_the_announcement_says_that_generators_are_simulated(tmp_path: Path) -> None:
    def said(num_simulated: int) -> str:
        urls = ("http://127.0.0.1:3",)
        endpoint = Endpoint(
            "http://127.0.0.1:1", "http://127.0.0.1:2", urls, ProcessMark(1, 1), {}, True, num_simulated
        )
        state = StateDir(tmp_path)
        state.write_endpoint(endpoint)
        assert state.endpoint() == endpoint
        return "\n".join(announcement(state, endpoint, metrics_port=0))

    assert "SIMULATED   50 simulated generators: tokens are random" in said(50)
    assert "simulated" not in said(0).lower()


def test_without_a_metrics_port_no_service_serves_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_METRICS_PORT", "9321")  # a setting of the launcher only, not of a service
    specs = specs_of(UpSettings(tmp_path / "state"))
    assert {spec.environment["HEADRACE_METRICS_PORT"] for spec in specs.values()} == {"0"}


def test_each_service_has_a_port_of_its_own_for_metrics_and_the_person_is_told(tmp_path: Path) -> None:
    first, specs = specs_with_metrics(tmp_path / "state", num_generators=2)
    ports = {name: int(spec.environment["HEADRACE_METRICS_PORT"]) - first for name, spec in specs.items()}
    assert ports == {"trainer": 0, "rewarder": 1, "sessions": 2, "generator-0": 3, "generator-1": 4}
    assert {name: spec.listeners["metrics"].number - first for name, spec in specs.items()} == ports
    first, simulated = specs_with_metrics(tmp_path / "state", num_simulated=200)
    assert simulated["simulated"].environment["HEADRACE_METRICS_PORT"] == str(first + 3)
    urls = ("http://127.0.0.1:3", "http://127.0.0.1:4")
    endpoint = Endpoint("http://127.0.0.1:1", "http://127.0.0.1:2", urls, ProcessMark(1, 1), {}, True)
    said = "\n".join(announcement(StateDir(tmp_path), endpoint, metrics_port=9321))
    assert [f":{port}/metrics" in said for port in range(9321, 9327)] == [True] * 5 + [False]


def test_an_invalid_metrics_port_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_METRICS_PORT", "many")
    assert main(["up", "--state-dir", str(tmp_path)]) == 1
    assert "HEADRACE_METRICS_PORT=many is not a port" in capsys.readouterr().err


def test_services_are_given_the_keys_here_and_not_files_with_keys_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "of-production"
    file.write_text("secret-of-production")
    for name in ("API_KEY", "INTERNAL_KEY", "REDIS_PASSWORD"):
        monkeypatch.setenv(f"HEADRACE_{name}_FILE", str(file))
    specs = specs_of(UpSettings(tmp_path / "state"))
    assert len(specs) == 4
    for spec in specs.values():
        with monkeypatch.context() as patch, handed_on(spec.secrets) as (variables, _):
            for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
                patch.delenv(name)
            for name, value in {**spec.environment, **variables}.items():
                patch.setenv(name, value)
            settings = from_environment(ServiceSettings)
        assert settings.api_key.get_secret_value() == StateDir(tmp_path / "state").keys().api_key
        assert settings.redis_url.get_secret_value() == "redis://127.0.0.1:1/0"


def test_services_of_a_script_under_torchrun_do_not_take_themselves_for_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun = ("RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in of_torchrun:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCH_HOME", "/torch")
    for spec in specs_of(UpSettings(tmp_path / "state")).values():
        assert spec.environment.keys().isdisjoint(of_torchrun)
        assert spec.environment["TORCH_HOME"] == "/torch"


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://trainer@redis.example:6379/0", "redis://trainer:p%40ss@redis.example:6379/0"),
        ("unix:///run/redis.sock", "unix://:p%40ss@/run/redis.sock"),
    ],
)
def test_a_redis_of_one_s_own_may_have_its_password_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, whole: str
) -> None:
    seen = launches_seen(monkeypatch)
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    (tmp_path / "password").write_text("p@ss\n")
    assert main(["up", "--state-dir", str(tmp_path / "state")]) == 0
    assert seen[0].redis_url == whole


def test_a_password_file_is_of_no_account_to_the_redis_that_is_brought_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = launches_seen(monkeypatch)
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", str(tmp_path / "nowhere"))
    assert main(["up", "--state-dir", str(tmp_path / "state")]) == 0
    assert seen[0].redis_url is None


def test_a_password_file_that_is_not_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", str(tmp_path / "nowhere"))
    assert main(["up", "--state-dir", str(tmp_path / "state")]) == 1
    assert f"HEADRACE_REDIS_PASSWORD_FILE: {tmp_path / 'nowhere'} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:6379", "redis://:a/b#c@h:6379/0"])
def test_an_address_of_redis_that_cannot_be_read_is_a_sentence_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    launches_seen(monkeypatch)
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    assert main(["up", "--state-dir", str(tmp_path / "state")]) == 1
    said = capsys.readouterr().err
    assert "redis" in said.lower()
    assert "a/b" not in said


def test_a_directory_whose_name_a_search_path_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches_seen(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--state-dir", "20:56"]) == 1
    assert capsys.readouterr().err.startswith(f"headrace: {tmp_path}/20:56 has a colon in its path")


def test_without_the_packages_of_its_services_up_says_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launches_seen(monkeypatch)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["up", "--simulate", "--state-dir", str(tmp_path / "state")]) == 1
    assert "`headrace up` needs fastapi; install with" in capsys.readouterr().err


def test_a_launcher_that_is_waited_for_ends_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Launched:
        is_ended = False

        def terminate(self) -> None:
            self.is_ended = True

    launched = Launched()

    def start(*_: object, **__: object) -> Launched:
        return launched

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(up, "start_detached", start)
    monkeypatch.setattr(up, "wait_until_up", interrupted)
    assert main(["up", "--detach", "--state-dir", str(tmp_path / "state")]) == 130
    assert launched.is_ended


def test_the_log_of_an_earlier_launcher_is_kept_and_only_the_new_ones_words_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = UpSettings(tmp_path)
    StateDir(tmp_path).make()
    log = StateDir(tmp_path).logs / "launcher.log"
    log.write_text("an earlier launcher crashed\n")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(2):
        process = start_detached(settings, outlives_us=True)
        process.wait(60)
        with pytest.raises(UserError, match=r"^the launcher ended with 1$"):
            wait_until_up(settings, process)
    assert log.read_text().startswith("an earlier launcher crashed\n")


@pytest.mark.parametrize(("arguments", "expected"), [([], 0), (["--simulate"], 1), (["--simulate", "50"], 50)])
def test_simulate_takes_a_number_or_is_one(arguments: list[str], expected: int) -> None:
    assert make_parser().parse_args(["up", *arguments]).simulate == expected


def test_simulated_and_real_generators_are_not_asked_for_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["up", "--simulate", "2", "--generators", "2"])
    assert "not allowed with" in capsys.readouterr().err
