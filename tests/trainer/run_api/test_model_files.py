"""The final model of a run over HTTP: listed with hashes, sent in ranges, without anything else of the machine."""

import asyncio
import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

WEIGHTS = bytes(range(256)) * 10_000


@pytest.fixture
async def run_dir(client: httpx.AsyncClient, run: dict[str, Any]) -> Path:
    """Return the directory of a submitted run."""
    return Path((await client.post("/v1/runs", json=run)).json()["run"]["run_dir"])


@pytest.fixture
def model(run_dir: Path) -> Path:
    """Return the run's model, beside which something else is."""
    directory = run_dir / "model"
    (directory / "additional_chat_templates").mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(WEIGHTS)
    (directory / "config.json").write_text("{}")
    (directory / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    (directory / "link.json").symlink_to(run_dir / "config.json")
    (directory / "outside").symlink_to("/etc")
    return directory


def url(run_dir: Path, more: str = "") -> str:
    return f"/v1/runs/{run_dir.name}/model{more}"


async def test_a_model_is_listed_with_sizes_and_hashes(client: httpx.AsyncClient, run_dir: Path, model: Path) -> None:
    listed = (await client.get(url(run_dir))).json()
    expected = {
        "additional_chat_templates/tools.jinja": b"{{ x }}",
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
    }
    assert listed["files"] == [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in expected.items()
    ]
    (model / "config.json").write_text("[]")
    os.utime(model / "config.json", ns=(1, 1))
    changed = (await client.get(url(run_dir))).json()["files"][1]
    assert changed["sha256"] == hashlib.sha256(b"[]").hexdigest()


@pytest.mark.usefixtures("model")
async def test_a_file_is_sent_whole_or_in_ranges(client: httpx.AsyncClient, run_dir: Path) -> None:
    wanted = {"path": "model.safetensors"}
    whole = await client.get(url(run_dir, "/file"), params=wanted)
    assert (whole.status_code, whole.content, whole.headers["accept-ranges"]) == (200, WEIGHTS, "bytes")
    size = len(WEIGHTS)
    for header, first, end in [
        ("bytes=0-9", 0, 10),
        ("bytes=1000000-", 1_000_000, size),
        ("bytes=-7", size - 7, size),
        (f"bytes={size - 1}-{size + 50}", size - 1, size),
    ]:
        part = await client.get(url(run_dir, "/file"), params=wanted, headers={"range": header})
        assert (part.status_code, part.content) == (206, WEIGHTS[first:end]), header
        assert part.headers["content-range"] == f"bytes {first}-{end - 1}/{size}"
    for ignored in ("bytes=9-3", "bytes=0-1,4-5", "lines=1-2", "bytes=-"):
        assert (await client.get(url(run_dir, "/file"), params=wanted, headers={"range": ignored})).status_code == 200
    beyond = await client.get(url(run_dir, "/file"), params=wanted, headers={"range": f"bytes={size}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")
    assert beyond.json()["type"] == "/problems/no-such-range"
    head = await client.head(url(run_dir, "/file"), params=wanted)
    assert (head.headers["content-length"], head.content) == (str(size), b"")


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    "path",
    ["../config.json", "/etc/passwd", "outside/passwd", "link.json", "additional_chat_templates", "x", "..", "a\0b"],
)
async def test_nothing_but_the_models_own_files_is_sent(client: httpx.AsyncClient, run_dir: Path, path: str) -> None:
    refused = await client.get(url(run_dir, "/file"), params={"path": path})
    assert (refused.status_code, refused.json()["type"]) == (404, "/problems/no-such-file")


async def test_a_model_of_too_many_files_is_refused_and_not_listed_in_part(
    client: httpx.AsyncClient, run_dir: Path, model: Path
) -> None:
    for number in range(997):  # 3 are there
        (model / f"shard-{number}").touch()
    assert len((await client.get(url(run_dir))).json()["files"]) == 1000
    (model / "one-more").touch()
    refused = await client.get(url(run_dir))
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/too-many-files")
    assert refused.json()["detail"].startswith("The model has 1001 files, and a model of more than 1000 is not sent.")


@pytest.mark.usefixtures("model")
async def test_a_service_without_free_descriptors_does_not_say_that_a_file_is_missing(
    client: httpx.AsyncClient, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def out_of_descriptors(path: Any, *given: Any, **more: Any) -> int:
        if path == "config.json":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(path, *given, **more)

    monkeypatch.setattr(os, "open", out_of_descriptors)
    refused = await client.get(url(run_dir, "/file?path=config.json"))
    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/file-unavailable")
    assert "Too many open files" in refused.json()["detail"]


@pytest.mark.usefixtures("model")
async def test_clients_that_wait_for_the_hashes_of_a_model_do_not_hold_up_others(
    client: httpx.AsyncClient, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, goes_on = hashlib.file_digest, threading.Event()

    def read_slowly(*given: Any) -> Any:
        goes_on.wait(120)
        return read(*given)

    monkeypatch.setattr(hashlib, "file_digest", read_slowly)
    waiting = [asyncio.create_task(client.get(url(run_dir))) for _ in range(40)]  # more than there are threads
    try:
        shown = asyncio.create_task(client.get(f"/v1/runs/{run_dir.name}/metrics"))
        await asyncio.wait({shown, *waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert shown.done()
    finally:
        goes_on.set()
    assert (await shown).status_code == 200
    assert {len((await reply).json()["files"]) for reply in waiting} == {3}


async def test_a_run_without_a_model_says_when_there_will_be_one(client: httpx.AsyncClient, run_dir: Path) -> None:
    for path in (url(run_dir), url(run_dir, "/file?path=config.json")):
        refused = await client.get(path)
        assert (refused.status_code, refused.json()["type"]) == (404, "/problems/no-such-model")
        assert "The run is queued. Its final model is written when it ends" in refused.json()["detail"]
