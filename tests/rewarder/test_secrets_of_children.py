"""A rewarder's child processes never get a key or the address of Redis. Real processes, read from /proc."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shared.service.child_secrets import handed_on
from tests.rewarder.conftest import RewarderProcess, descendants, user

KEY = "canary-of-users"
RUNS_FOR_A_WHILE = "```python\nimport time\ntime.sleep(5)\nprint(1)\n```"


def seen_by(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0" + Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def test_no_child_of_a_rewarder_has_a_key_or_the_address_of_redis(
    start_rewarder: Callable[..., RewarderProcess], redis_url: str, bwrap: str
) -> None:
    rewarder = start_rewarder(
        HEADRACE_API_KEY=KEY,
        HEADRACE_INTERNAL_KEY="canary-of-services",
        HEADRACE_REDIS_URL=f"{redis_url}?client_name=canary-redis",
        HEADRACE_BWRAP=bwrap,
    )
    rewarder.wait_until_ready()
    body = {
        "reward_funcs": ["code_execution_reward", user("one")],
        "prompts": ["p"],
        "completions": [RUNS_FOR_A_WHILE],
        "columns": {"tests": [[{"input": "", "output": "1"}]]},
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    replies: list[httpx.Response] = []

    def score() -> None:
        replies.append(httpx.post(rewarder.url("/v1/score"), json=body, headers=headers, timeout=60, trust_env=False))

    asking = threading.Thread(target=score)
    asking.start()
    commands: set[str] = set()
    leaks: list[str] = []
    while asking.is_alive():
        for pid in descendants(rewarder.process.pid):
            seen = seen_by(pid)
            commands.add(seen.rpartition(b"\0\0")[2].replace(b"\0", b" ").decode(errors="replace")[:300])
            if b"canary" in seen:
                leaks.append(seen.decode(errors="replace"))
        time.sleep(0.02)
    asking.join()
    assert leaks == []
    assert any("forkserver" in command for command in commands), commands
    assert any("bwrap" in command for command in commands), commands
    assert replies[0].status_code == 200, replies[0].text


def test_an_async_function_finds_no_key_in_its_environment(
    start_rewarder: Callable[..., RewarderProcess], tmp_path: Path
) -> None:
    rewards = tmp_path / "rewards"
    rewards.mkdir()
    (rewards / "curious.py").write_text(
        "import os\n"
        "def _leaks(): return float(any('canary' in value for value in os.environ.values()))\n"
        "def looks(completions, **_): return [_leaks()]\n"
        "async def looks_on_the_loop(completions, **_): return [_leaks()]\n"
    )
    rewarder = start_rewarder(HEADRACE_API_KEY=KEY, HEADRACE_REWARD_PATH=str(rewards))
    rewarder.wait_until_ready()
    names = ["curious:looks", "curious:looks_on_the_loop"]
    body = {"reward_funcs": names, "prompts": ["p"], "completions": ["c"]}
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(rewarder.url("/v1/score"), json=body, headers=headers, timeout=60, trust_env=False)
    assert [outcome["value"] for outcome in reply.json()["outcomes"][0]] == [0.0, 0.0], reply.text


CURIOUS = """
import os
from pathlib import Path


def looks(completions, canary, **_):
    pid, found = os.getpid(), []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pid = int(stat[1])
        for name in ("environ", "mem", "maps", "auxv", *(f"fd/{number}" for number in range(256))):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    if name in ("environ", "fd/64", "fd/65", "fd/66") and canary[0].encode() in file.read(1_000_000):
                        found.append(f"{name} of {pid}")
                    if name == "mem" and is_mine(pid):
                        found.append(f"mem of {pid}")
            except OSError:
                pass
    return [float(len(found))] * len(completions)


def is_mine(pid):
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"services.rewarder" in command and b"forkserver" not in command
"""


@pytest.mark.parametrize("way", ["variables", "files in memory"])
def test_a_reward_function_reads_neither_keys_nor_memory_of_the_service(
    start_rewarder: Callable[..., RewarderProcess], redis_url: str, tmp_path: Path, way: str
) -> None:
    rewards = tmp_path / "rewards"
    rewards.mkdir()
    (rewards / "curious.py").write_text(CURIOUS)
    settings = {"HEADRACE_REWARD_PATH": str(rewards), "HEADRACE_REDIS_URL": redis_url}
    with handed_on({"HEADRACE_API_KEY_FILE": KEY} if way != "variables" else {}) as (variables, descriptors):
        settings |= {"HEADRACE_API_KEY": ""} | variables if variables else {"HEADRACE_API_KEY": KEY}
        rewarder = start_rewarder(pass_fds=descriptors, **settings)
    rewarder.wait_until_ready()
    body = {"reward_funcs": ["curious:looks"], "prompts": ["p"], "completions": ["c"], "columns": {"canary": [KEY]}}
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(rewarder.url("/v1/score"), json=body, headers=headers, timeout=60, trust_env=False)
    (outcome,) = reply.json()["outcomes"][0]
    assert (outcome["outcome"], outcome["value"]) == ("scored", 0.0), outcome
    assert KEY.encode() not in Path(f"/proc/{rewarder.process.pid}/environ").read_bytes()
