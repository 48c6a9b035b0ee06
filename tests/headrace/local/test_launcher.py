"""The launcher with a real embedded Redis and stand-in services: crashed services restart, and no process is left."""

import contextlib
import functools
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from headrace.local import process_table
from tests.headrace.launcher_rig import PATIENCE_S, ROOT, LauncherRig, wait_for


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherRig]:
    """Return a rig with a launcher for several tests, after each of which all services run."""
    rig = LauncherRig(tmp_path_factory.mktemp("up"))
    try:
        rig.launch_until_ready()
        yield rig
    finally:
        rig.end()


def redis_url_of(rig: LauncherRig) -> str:
    return str(rig.starts("trainer")[-1]["environment"]["HEADRACE_REDIS_URL"])


def open_redis(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=60, socket_connect_timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_and_leaves_no_process(rig: LauncherRig, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup, for one, has its commands ignore SIGHUP
    try:
        launcher = rig.launch_until_ready(num_generators=2)
    finally:
        signal.signal(number, before)
    processes = rig.processes_of(launcher)
    assert len(processes) == 6, "Redis, trainer, rewarder, sessions and two generators"
    launcher.send_signal(number)
    assert launcher.wait(timeout=PATIENCE_S) == 0
    assert not [process for process in processes if process_table.is_alive(process)]
    assert rig.stopped()[0] == "trainer"
    assert sorted(rig.stopped()) == ["generator", "generator", "rewarder", "sessions", "trainer"]
    assert rig.state.endpoint() is None


def test_launchers_that_start_at_once_have_ports_of_their_own(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ending:
        rigs: list[LauncherRig] = []
        for name in ("one", "two", "three"):
            (tmp_path / name).mkdir()
            rigs.append(LauncherRig(tmp_path / name))
            ending.callback(rigs[-1].end)
        launchers = [rig.launch() for rig in rigs]
        for rig, launcher in zip(rigs, launchers, strict=True):
            rig.wait_until_ready(launcher)
        for rig in rigs:
            wait_for(functools.partial(rig.starts, "generator"), "the generator, which is not waited for")
            assert [len(rig.starts(name)) for name in ("trainer", "rewarder", "generator")] == [1, 1, 1], rig.output()
            endpoint = rig.endpoint()
            for name, url in (("trainer", endpoint.api_url), ("rewarder", endpoint.rewarder_url)):
                assert httpx.get(url, trust_env=False, timeout=120).json() == {"pid": endpoint.processes[name].pid}


def test_the_output_says_where_the_api_and_its_key_are(up: LauncherRig) -> None:
    wait_for(lambda: "Next:" in up.output(), "the announcement")
    assert up.endpoint().api_url in up.output()
    assert str(up.state.api_key_file) in up.output()
    assert up.state.keys().api_key not in up.output()


def test_services_get_their_secrets_and_no_environment_or_command_line_shows_them(
    up: LauncherRig,
) -> None:
    keys, endpoint = up.state.keys(), up.endpoint()
    trainer = up.starts("trainer")[0]["environment"]
    assert trainer["HEADRACE_API_KEY"] == keys.api_key
    assert trainer["HEADRACE_INTERNAL_KEY"] == keys.internal_key
    assert "HEADRACE_INTERNAL_KEY" not in up.starts("rewarder")[0]["environment"]
    assert trainer["HEADRACE_RUNS_DIR"] == str(up.state.runs)
    assert trainer["HEADRACE_REWARDER_URL"] == endpoint.rewarder_url
    places = f"{up.state.path.parent}:{up.state.functions}"
    assert up.starts("rewarder")[0]["environment"]["HEADRACE_REWARD_PATH"] == places
    assert up.starts("generator")[0]["environment"]["HEADRACE_REPLICA_ID"] == "generator-0"
    sessions = up.starts("sessions")[0]["environment"]
    assert sessions["HEADRACE_INTERNAL_KEY"] == keys.internal_key
    assert sessions["HEADRACE_TOOL_PATH"] == places
    for process in process_table.descendants(endpoint.launcher.pid):
        shown = Path(f"/proc/{process.pid}/cmdline").read_text() + Path(f"/proc/{process.pid}/environ").read_text()
        assert not [key for key in (keys.api_key, keys.internal_key, keys.redis_password) if key in shown]


def test_redis_wants_its_password_and_keeps_an_append_only_file_on_loopback(up: LauncherRig) -> None:
    with open_redis(redis_url_of(up)) as known:
        settings = {name: known.config_get(name)[name] for name in ("appendonly", "appendfsync", "bind")}
        assert settings == {"appendonly": "yes", "appendfsync": "everysec", "bind": "127.0.0.1"}
    anonymous_url = redis_url_of(up).replace(up.state.keys().redis_password, "").replace(":@", "")
    with open_redis(anonymous_url) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_keys_are_readable_only_by_their_owner(up: LauncherRig) -> None:
    assert stat.S_IMODE(up.state.path.stat().st_mode) == 0o700
    assert up.state.redis_url() == redis_url_of(up)
    private = (up.state.endpoint_file, up.state.redis_url_file, up.state.redis / "valkey.conf")
    for path in [*(up.state.path / "keys").iterdir(), *private]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_the_keys_and_the_data_of_redis_survive_a_restart_of_the_launcher(rig: LauncherRig) -> None:
    launcher = rig.launch_until_ready()
    first = rig.state.keys()
    with open_redis(redis_url_of(rig)) as before:
        before.set("a-run", "its record")
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=PATIENCE_S)
    rig.launch_until_ready()
    assert rig.state.keys() == first
    assert rig.starts("trainer")[-1]["environment"]["HEADRACE_API_KEY"] == first.api_key
    with open_redis(redis_url_of(rig)) as after:
        assert after.get("a-run") == b"its record"


@pytest.mark.parametrize("name", ["trainer", "rewarder", "sessions", "generator-0"])
def test_a_killed_service_is_started_again(up: LauncherRig, name: str) -> None:
    kind = name.removesuffix("-0")
    os.kill(up.endpoint().processes[name].pid, signal.SIGKILL)
    wait_for(lambda: len(up.starts(kind)) == 2, f"a second start of {name}")
    wait_for(lambda: f"{name} was killed by SIGKILL" in up.output(), "the launcher to say so")
    assert up.starts(kind)[1]["environment"]["HEADRACE_PORT"] == up.starts(kind)[0]["environment"]["HEADRACE_PORT"]
    wait_for(lambda: up.endpoint().processes[name].pid == up.starts(kind)[1]["pid"], "the new pid to be written down")


def test_without_room_for_its_output_a_launcher_goes_on_and_ends_as_usual(rig: LauncherRig) -> None:
    launcher = rig.launch(output=Path("/dev/full"))
    rig.wait_until_ready(launcher)
    processes = rig.processes_of(launcher)
    os.kill(rig.endpoint().processes["rewarder"].pid, signal.SIGKILL)
    wait_for(lambda: len(rig.starts("rewarder")) == 2, "another rewarder")
    launcher.terminate()
    launcher.wait(timeout=PATIENCE_S)
    assert rig.stopped()[0] == "trainer", "it was asked to end, and not killed"
    assert not [process for process in processes if process_table.is_alive(process)]


def test_a_killed_redis_comes_back_on_its_port_with_its_data(up: LauncherRig) -> None:
    url, killed = redis_url_of(up), up.endpoint().processes["redis"]
    with open_redis(url) as before:
        before.set("a-run", "its record")
        before.execute_command("WAITAOF", 1, 0, 0)  # on a busy disk, a write may wait for the last one's fsync
    os.kill(killed.pid, signal.SIGKILL)
    wait_for(lambda: up.endpoint().processes["redis"] != killed, "another Redis")

    def read() -> bytes | None:
        try:
            with open_redis(url) as after:
                value = after.get("a-run")
        except (redis.ConnectionError, redis.BusyLoadingError):
            return None
        assert isinstance(value, bytes)
        return value

    assert wait_for(read, "the new Redis to answer") == b"its record"


def test_a_service_that_crashes_again_and_again_is_started_with_growing_pauses(rig: LauncherRig) -> None:
    rig.order("rewarder", exit=1, message="no memory")
    rig.launch_until_ready()
    wait_for(lambda: len(rig.starts("rewarder")) >= 3, "a third start")
    assert "rewarder ended with exit status 1 (no memory); starting it again in 0.5 s" in rig.output()
    assert "rewarder ended with exit status 1 (no memory); starting it again in 1.0 s" in rig.output()
    first, second, third = (start["at"] for start in rig.starts("rewarder")[:3])
    assert second - first >= 0.5
    assert third - second >= 1.0


@pytest.mark.parametrize("status", [2, 3])
def test_a_generator_that_refuses_is_not_started_again_and_the_rest_goes_on(rig: LauncherRig, status: int) -> None:
    rig.order("generator", exit=status, message="HEADRACE_ENGINE_ARGS: not JSON")
    launcher = rig.launch_until_ready()
    wait_for(lambda: "the other services keep running" in rig.output(), "the launcher to say so")
    assert "generator-0 gave up: HEADRACE_ENGINE_ARGS: not JSON" in rig.output()
    assert len(rig.starts("generator")) == 1
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=PATIENCE_S) == 0


def test_when_the_run_api_refuses_everything_ends_with_its_message(rig: LauncherRig) -> None:
    rig.order("trainer", exit=2, message="HEADRACE_RUNS_DIR is not writable")
    launcher = rig.launch()
    assert launcher.wait(timeout=PATIENCE_S) == 1
    assert "trainer gave up: HEADRACE_RUNS_DIR is not writable" in rig.output()
    assert "headrace cannot run without trainer" in rig.output()
    assert rig.state.endpoint() is None


@pytest.mark.parametrize("service", ["rewarder", "sessions"])
def test_when_a_service_that_submits_need_refuses_to_start_nothing_is_reported_as_up(
    rig: LauncherRig, service: str
) -> None:
    rig.order(service, exit=2, message="HEADRACE_REWARD_LIMITS: 'judge' is not a built-in reward")
    launcher = rig.launch()
    assert launcher.wait(timeout=PATIENCE_S) == 1
    assert f"{service} gave up: HEADRACE_REWARD_LIMITS: 'judge' is not a built-in reward" in rig.output()
    assert f"headrace cannot run without {service}" in rig.output()
    assert "headrace is up" not in rig.output()
    assert "the other services keep running" not in rig.output()
    assert rig.state.endpoint() is None


def test_a_rewarder_that_refuses_to_start_does_not_end_the_other_services_while_runs_may_be_in_progress(
    rig: LauncherRig,
) -> None:
    launcher = rig.launch_until_ready()
    rig.order("rewarder", exit=2, message="a secret is gone")
    os.kill(rig.endpoint().processes["rewarder"].pid, signal.SIGKILL)
    wait_for(lambda: "the other services keep running" in rig.output(), "the launcher to say so")
    assert "rewarder gave up: a secret is gone" in rig.output()
    assert launcher.poll() is None


def test_a_service_that_dies_while_the_trainer_still_saves_is_not_started_again(rig: LauncherRig) -> None:
    rig.order("trainer", saves=True)
    launcher = rig.launch_until_ready()
    launcher.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping" in rig.output(), "the launcher to begin")
    killed = rig.endpoint().processes["generator-0"]
    os.kill(killed.pid, signal.SIGKILL)
    assert not process_table.wait_until_gone([killed], timeout_s=PATIENCE_S)
    time.sleep(2)  # in which the launcher would start it again, after its first pause of 0.5 s
    rig.let_save("trainer")
    assert launcher.wait(timeout=PATIENCE_S) == 0
    assert rig.stopped()[0] == "trainer"
    assert sorted(rig.stopped()) == ["rewarder", "sessions", "trainer"]
    assert len(rig.starts("generator")) == 1


def test_a_second_launcher_on_one_state_directory_is_refused(up: LauncherRig) -> None:
    num_starts = len(up.starts("trainer"))
    assert up.launch().wait(timeout=PATIENCE_S) == 1
    assert f"headrace is already running on {up.state.path}" in up.output()
    assert len(up.starts("trainer")) == num_starts


def test_a_second_ctrl_c_kills_what_does_not_listen(rig: LauncherRig) -> None:
    rig.order("rewarder", deaf=True)
    launcher = rig.launch_until_ready()
    processes = rig.processes_of(launcher)
    launcher.send_signal(signal.SIGINT)
    wait_for(lambda: "generator" in rig.stopped(), "the others to end")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=PATIENCE_S) == 0
    assert "rewarder did not end in time and was killed" in rig.output()
    assert not [process for process in processes if process_table.is_alive(process)]


def test_processes_that_a_service_leaves_in_their_own_session_are_found_and_ended(rig: LauncherRig) -> None:
    rig.order("generator", child=True)
    launcher = rig.launch_until_ready()
    processes = wait_for(lambda: found if len(found := rig.processes_of(launcher)) == 6 else None, "the orphan to be")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=PATIENCE_S) == 0
    assert not [process for process in processes if process_table.is_alive(process)]


def test_when_the_launcher_is_killed_outright_its_services_end_and_the_next_one_ends_the_deaf(rig: LauncherRig) -> None:
    rig.order("rewarder", deaf=True)
    launcher = rig.launch_until_ready()
    left = rig.endpoint().processes
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(timeout=PATIENCE_S)
    listening = [process for name, process in left.items() if name != "rewarder"]
    assert not process_table.wait_until_gone(listening, timeout_s=PATIENCE_S)
    assert process_table.is_alive(left["rewarder"])
    rig.launch_until_ready()
    assert not process_table.is_alive(left["rewarder"])
    assert "ending 1 processes that an earlier launcher left behind" in rig.output()


def scale(state_dir: Path, count: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headrace", "scale", str(count), "--state-dir", str(state_dir)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_generators_come_and_go_while_everything_else_runs_on(rig: LauncherRig) -> None:
    rig.launch_until_ready()
    first = rig.endpoint().processes
    for count in (3, 2, 1):
        done = scale(rig.state.path, count)
        assert (done.returncode, done.stdout.split(";")[0]) == (0, f"generators: {count}"), done.stderr
        endpoint = rig.endpoint()
        generators = {f"generator-{index}" for index in range(count)}
        assert set(endpoint.processes) == {"redis", "trainer", "rewarder", "sessions", *generators}
        assert len(set(endpoint.generator_urls)) == count
        assert all(endpoint.processes[name] == mark for name, mark in first.items()), "the other processes still run"
        wait_for(lambda: len(rig.starts("generator")) == 3, "the new ones to start")
    assert {start["environment"]["HEADRACE_REPLICA_ID"] for start in rig.starts("generator")} == {
        f"generator-{index}" for index in range(3)
    }
    assert rig.stopped() == ["generator", "generator"]


def test_where_nothing_runs_there_is_nothing_to_scale(tmp_path: Path) -> None:
    done = scale(tmp_path, 2)
    assert done.returncode == 1
    assert "nothing is running" in done.stderr
