"""Files that a run may not name: a real run API, a key with the scope submit, and many spellings of forbidden paths."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisServer
from tests.http.attacked import CANARY, Judge, scoped_key, write_keys
from tests.http.service_process import ServiceProcess

_SPELLED = (
    "{}", "/{}", "//{}", "/.{}", "{root}/..{}", "{root}/../../../../../../..{}", "{root}/./..{}", "{root}//../..{}",
    "{}/", "{}/.", "/proc/self/root{}", "/proc/thread-self/root{}", "/proc/1/root{}", "/proc/self/task/1/root{}",
    "/proc/self/cwd{}", "file://{}", "file://localhost{}", "file:{}", "FILE://{}", "local://{}", "memory://{}",
    "zip://x::{}", "zip://x::file://{}", "tar://x::{}", "simplecache::{}", "simplecache::file://{}",
    "filecache::file://{}", "blockcache::file://{}", "cached::file://{}", "dir://{}", "reference://{}",
    "libarchive://{}", "git://{}", "github://o:r@{}", "hdfs://h{}", "webhdfs://h{}", "sftp://h{}", "smb://h{}",
    "ftp://h{}", "http://127.0.0.1:1{}", "https://127.0.0.1:1{}", "s3://bucket{}", "gs://bucket{}", "hf:/{}",
    "data:{}", "jlab://{}", "arrow_hdfs://{}", "abfs://c@a{}", "async_wrapper::file://{}", "{}#x", "{}?x", "{};x",
    "{}%00", "{}\0", "{}\0.jsonl", "{}\n", "{} ", " {}", "\u200b{}", "\ufeff{}", "{}\u2028", "{}\\", "~{}", "~/..{}",
    "~root{}", "$HOME/..{}", "${HOME}/..{}", "%HOME%{}", "{root}/$OLDPWD{}", "{root}/%2e%2e{}", "{root}/..%2f..{}",
    "{root}/\uff0e\uff0e{}", "{root}/\u2025{}", "{root}\\..\\..{}", "C:{}", "\\\\?\\{}", "{root}-too{}", "{root}/link",
    "{root}/link/secret.jsonl", "{root}/chain/secret.jsonl", "{root}/file.jsonl", "{root}/relative.jsonl",
    "{root}/proc", "{root}/proc/self/environ", "{root}/dangling", "{root}/up/up/link/secret.jsonl",
    "{root}/link/../outside/secret.jsonl",
)  # fmt: skip
_PLACES = (
    "/etc/passwd", "/etc/shadow", "/etc", "/proc/self/environ", "/proc/self/fd/0", "/dev/fd/3", "/dev/stdin",
    "/dev/shm", "/run", "/var/spool/cron", "/sys/kernel", "/", "", ".", "..", "./", "../", "-", "*", "**", "/*",
    "/**/*.jsonl", "/{etc,tmp}/*", "/et?/passwd", "/[e]tc/passwd", "json", "csv", "text", "parquet", "pandas", "arrow",
    "imagefolder", "webdataset", "harbor", "iceberg", "generator", "outside", "outside/secret.jsonl", "./outside",
    "org/../outside", "org/name/../../outside", "runs", "trainer.log", "api-keys",
)  # fmt: skip
_FIELDS = (
    *("model", "dataset_name", "eval_dataset_name", "datasets", "resume_from_checkpoint", "weight_dir", "vllm"),
    "reward_funcs",
)
_RUN = {"model": "{root}/model", "dataset_name": "{root}/rows.jsonl", "reward_funcs": ["nothing_of_that_name"]}


def lay_out(top: Path) -> None:
    for name in ("data/model", "outside/model", "runs"):
        (top / name).mkdir(parents=True)
    root, outside = top / "data", top / "outside"
    (root / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (outside / "secret.jsonl").write_text(json.dumps({CANARY: CANARY, "prompt": CANARY}) + "\n" + CANARY)
    (outside / "config.json").write_text(json.dumps({"model_type": CANARY, "auto_map": CANARY}))
    (outside / "README.md").write_text(f"---\nconfigs:\n- config_name: {CANARY}\n---\n")
    links: dict[str, str | Path] = {
        "link": outside, "chain": "link", "file.jsonl": outside / "secret.jsonl", "proc": "/proc", "up": ".",
        "relative.jsonl": "../outside/secret.jsonl", "dangling": outside / "nothing",
    }  # fmt: skip
    for name, target in links.items():
        (root / name).symlink_to(target)


@pytest.fixture(scope="module")
def attacked(
    http_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, ServiceProcess]]:
    top = tmp_path_factory.mktemp("files")
    lay_out(top)
    rewards = top / "of-rewarder"
    rewards.mkdir()
    roots = {"HEADRACE_DATA_ROOTS": str(top / "data"), "HEADRACE_WEIGHT_ROOTS": str(top / "data")}
    rewarder = ServiceProcess("rewarder", http_redis.url, rewards, **roots)
    trainer = ServiceProcess(
        "trainer",
        http_redis.url,
        top,
        HEADRACE_API_KEYS_FILE=str(write_keys(top / "api-keys")),
        HEADRACE_REWARDER_URL=f"http://127.0.0.1:{rewarder.port}",
        **roots,
    )
    yield top, trainer
    assert trainer.end() == 0, trainer.log()
    assert rewarder.end() == 0, rewarder.log()


def run_with(top: Path, field: str, path: str) -> dict[str, Any]:
    """Return a run with the path in ``field``."""
    run: dict[str, Any] = json.loads(json.dumps(_RUN).replace("{root}", str(top / "data")))
    match field:
        case "datasets":
            del run["dataset_name"]
            return run | {"datasets": [{"path": path}]}
        case "weight_dir":
            return run | {"weight_transport": "disk", "weight_dir": path}
        case "vllm":
            return run | {"vllm": {"speculative_config": {"method": "draft_model", "model": path}}}
        case "eval_dataset_name":
            return run | {"eval_dataset_name": path, "eval_steps": 1}
        case "reward_funcs":
            return run | {"reward_funcs": [path]}
        case _:
            return run | {field: path}


async def test_no_spelling_of_a_file_outside_of_the_roots_is_taken(attacked: tuple[Path, ServiceProcess]) -> None:
    top, trainer = attacked
    judge = Judge(top, trainer)
    secret = str(top / "outside" / "secret.jsonl")
    paths = [spelling.replace("{root}", str(top / "data")).replace("{}", secret) for spelling in _SPELLED]
    paths.append(str(top / "outside" / "model"))
    attempts = itertools.product(_FIELDS, dict.fromkeys([*paths, *_PLACES]))
    room = asyncio.Semaphore(8)

    async with trainer.client(scoped_key("submit")) as client:

        async def attempt(field: str, path: str) -> None:
            async with room:
                reply = await client.post("/v1/runs?dry_run=true", json=run_with(top, field, path))
            name = f"{field}: {path!r}"
            problem = judge.look_at(name, reply, statuses=(422,))
            named = {error["field"].partition(".")[0] for error in problem.get("errors", [])}
            is_inside = (top / "data") in (Path(path), *Path(path).parents) and "link" not in path
            if problem and field not in named and not (field in ("weight_dir", "vllm") and is_inside):
                judge.wrong.append(f"{name}: refused for {named}: {reply.text[:300]}")
            if "PATH=" in reply.text or "root:x:" in reply.text or "root:*:" in reply.text:
                judge.wrong.append(f"{name}: the answer holds a file: {reply.text[:300]}")

        await asyncio.gather(*(attempt(field, path) for field, path in attempts))
    judge.conclude(at_least=800)
    assert not list((top / "runs").iterdir())
