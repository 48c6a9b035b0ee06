"""Uploads over real HTTP: closed by default, resumed, bounded, confined, and named by runs."""

import asyncio
import hashlib
import json
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.trainer.run_api.trainer_api import make_api
from services.trainer.settings import TrainerSettings
from services.trainer.uploads.upload_expiry import expire_once
from shared.access.named_keys import NamedKey, digest_of
from shared.errors import UserError
from shared.redis.redis_connection import Redis
from shared.service.logs import AUDIT_LOGGER
from tests.http.raw_client import RawClient
from tests.small_disk import small_disk
from tests.trainer.api_rig import KEY, serving, wait_until

OCTETS = {"content-type": "application/octet-stream"}
LONG_AGO_S = 1_000_000_000


def files_in(directory: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}


def described(path: str, data: bytes) -> dict[str, Any]:
    return {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


async def begin(client: httpx.AsyncClient, files: dict[str, bytes]) -> dict[str, Any]:
    reply = await client.post("/v1/uploads", json={"files": [described(path, data) for path, data in files.items()]})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def put(
    client: httpx.AsyncClient, upload_id: str, data: bytes, *, of: bytes | None = None, offset: int = 0
) -> httpx.Response:
    sha256 = hashlib.sha256(data if of is None else of).hexdigest()
    url = f"/v1/uploads/{upload_id}/files/{sha256}"
    return await client.put(url, params={"offset": offset}, content=data, headers=OCTETS)


def _head(path: str, *, length: int) -> bytes:
    lines = (
        f"PUT {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {KEY}",
        "Content-Type: application/octet-stream",
    )
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


@pytest.fixture
def taking(settings: TrainerSettings, tmp_path: Path) -> TrainerSettings:
    """Return the settings of an API that takes uploads of up to 64 MiB."""
    directory = tmp_path / "uploads"
    directory.mkdir()
    more = {"uploads_dir": directory, "uploads_keep_free_bytes": 0, "max_upload_bytes": 64 << 20}
    return settings.model_copy(update=more)


@pytest.fixture
async def uploader(taking: TrainerSettings, redis: Redis) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of an API that takes uploads."""
    async with serving(make_api(taking, redis, stopping=asyncio.Event())) as client:
        yield client


async def test_without_the_setting_uploads_are_refused_with_its_name(client: httpx.AsyncClient) -> None:
    refused = await client.post("/v1/uploads", json={"files": [described("x", b"x")]})
    assert (refused.status_code, refused.json()["type"]) == (404, "/problems/uploads-off")
    assert "HEADRACE_UPLOADS_DIR" in refused.json()["detail"]
    assert (await put(client, f"sha256-{'0' * 64}", b"x")).json()["type"] == "/problems/uploads-off"


async def test_the_beginning_of_an_upload_is_a_line_in_the_audit_log(
    uploader: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=AUDIT_LOGGER):
        began = await begin(uploader, {"x": b"x"})
        await put(uploader, began["upload_id"], b"x")
    told = [record.getMessage() for record in caplog.records if record.name == AUDIT_LOGGER]
    assert told == [f"upload.begin {began['upload_id']} by api-key: done (200)"]


async def test_a_run_may_name_what_was_uploaded(
    uploader: httpx.AsyncClient, run: dict[str, Any], model_dir: Path
) -> None:
    rows = b'{"prompt": "1 + 1 =", "solution": "2"}\n' * 8
    model = files_in(model_dir)
    paths: list[str] = []
    for files in ({"train.jsonl": rows}, model):
        began = await begin(uploader, files)
        for data in {bytes(data) for data in files.values()}:
            assert (await put(uploader, began["upload_id"], data)).status_code == 200
        assert (await begin(uploader, files))["is_complete"]
        paths.append(began["path"])
    named = run | {"dataset_name": f"{paths[0]}/train.jsonl", "model": paths[1]}
    submitted = await uploader.post("/v1/runs", json=named)
    assert submitted.status_code == 202, submitted.text
    assert submitted.json()["derived"]["num_rows"] == 8


async def test_an_upload_whose_connection_broke_goes_on_after_the_bytes_that_came(uploader: httpx.AsyncClient) -> None:
    data = bytes(range(256)) * 20_000
    began = await begin(uploader, {"big.bin": data})
    path = f"/v1/uploads/{began['upload_id']}/files/{hashlib.sha256(data).hexdigest()}?offset=0"
    received = 0

    async def has_come() -> bool:
        nonlocal received
        received = int((await begin(uploader, {"big.bin": data}))["files"][0]["received"])
        return received > 0

    async with RawClient.to(uploader.base_url.port or 0) as raw:
        await raw.send(_head(path, length=len(data)) + data[:3_000_000])
        await wait_until(has_come)
    # Wait until the broken request has written all that came.
    while (
        answer := await put(uploader, began["upload_id"], data[received:], of=data, offset=received)
    ).status_code == 409:
        received = answer.json()["received"]
    assert 0 < received <= 3_000_000
    assert answer.json() == {"received": len(data), "is_whole": True, "is_complete": True}
    assert files_in(began["path"]) == {"big.bin": data}


async def test_a_wrong_hash_is_refused_and_the_file_can_be_sent_again(uploader: httpx.AsyncClient) -> None:
    began = await begin(uploader, {"x": b"right"})
    refused = await put(uploader, began["upload_id"], b"wrong", of=b"right")
    assert (refused.status_code, refused.json()["type"]) == (422, "/problems/wrong-hash")
    assert files_in(began["path"]) == {}
    assert (await put(uploader, began["upload_id"], b"right")).json()["is_complete"]


@pytest.mark.parametrize("path", ["../keys", "/etc/cron.d/x", "a/../../b", "a\\..\\b", "a\u0000b", "."])
async def test_a_path_that_leaves_the_upload_is_refused(uploader: httpx.AsyncClient, path: str, tmp_path: Path) -> None:
    refused = await uploader.post("/v1/uploads", json={"files": [described(path, b"x")]})
    assert (refused.status_code, refused.json()["type"]) == (422, "/problems/invalid-upload")
    assert not any((tmp_path / "uploads").iterdir())


@pytest.mark.parametrize("sha256", ["..", "%2e%2e%2fx", "A" * 64, "0" * 63])
async def test_a_file_that_is_no_hash_is_not_looked_for(uploader: httpx.AsyncClient, sha256: str) -> None:
    began = await begin(uploader, {"x": b"x"})
    refused = await uploader.put(
        f"/v1/uploads/{began['upload_id']}/files/{sha256}?offset=0", content=b"x", headers=OCTETS
    )
    assert refused.status_code in (404, 405, 422)


async def test_a_body_of_a_gigabyte_is_refused_before_it_comes(uploader: httpx.AsyncClient) -> None:
    began = await begin(uploader, {"x": b"x"})
    path = f"/v1/uploads/{began['upload_id']}/files/{hashlib.sha256(b'x').hexdigest()}?offset=0"
    async with RawClient.to(uploader.base_url.port or 0) as raw:
        await raw.send(_head(path, length=1 << 30) + b"x" * 1000)
        status, problem = await raw.answer()
    assert (status, problem["type"]) == (413, "/problems/body-too-large")
    assert (await begin(uploader, {"x": b"x"}))["files"][0]["received"] == 0


async def test_a_body_without_a_length_is_cut_off_at_the_limit(uploader: httpx.AsyncClient) -> None:
    data = bytes(20 << 20)
    began = await begin(uploader, {"big": data})

    async def without_a_length() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield data[: 1 << 20]

    url = f"/v1/uploads/{began['upload_id']}/files/{hashlib.sha256(data).hexdigest()}?offset=0"
    refused = await uploader.put(url, content=without_a_length(), headers=OCTETS)
    assert (refused.status_code, refused.json()["type"]) == (413, "/problems/body-too-large")
    assert (await begin(uploader, {"big": data}))["files"][0]["received"] <= 16 << 20


async def test_an_upload_larger_than_the_setting_is_refused_before_its_bytes(uploader: httpx.AsyncClient) -> None:
    files = [{"path": "big", "size": (64 << 20) + 1, "sha256": "0" * 64}]
    refused = await uploader.post("/v1/uploads", json={"files": files})
    assert (refused.status_code, refused.json()["type"]) == (413, "/problems/upload-too-large")
    assert "HEADRACE_MAX_UPLOAD_BYTES" in refused.json()["detail"]


async def test_other_routes_keep_their_smaller_limit(uploader: httpx.AsyncClient) -> None:
    refused = await uploader.post("/v1/uploads", content=b" " * (2 << 20), headers={"content-type": "application/json"})
    assert refused.status_code == 413


async def test_a_piece_needs_its_content_type(uploader: httpx.AsyncClient) -> None:
    began = await begin(uploader, {"x": b"x"})
    url = f"/v1/uploads/{began['upload_id']}/files/{hashlib.sha256(b'x').hexdigest()}?offset=0"
    refused = await uploader.put(url, content=b"x", headers={"content-type": "application/json"})
    assert (refused.status_code, refused.json()["type"]) == (415, "/problems/not-bytes")


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"files": []}', b'{"files": [{"path": "x"}]}', b"{", b'{"files": 1}'])
async def test_a_body_that_names_no_files_is_refused(uploader: httpx.AsyncClient, body: bytes) -> None:
    refused = await uploader.post("/v1/uploads", content=body, headers={"content-type": "application/json"})
    assert refused.status_code in (400, 422)
    assert refused.headers["content-type"] == "application/problem+json"


async def test_on_a_full_disk_the_answer_is_a_507_and_nothing_half_written_counts(
    taking: TrainerSettings, redis: Redis
) -> None:

    with small_disk(size_kib=512) as disk:
        full = taking.model_copy(update={"uploads_dir": disk})
        async with serving(make_api(full, redis, stopping=asyncio.Event())) as client:
            data = b"x" * 400_000
            began = await begin(client, {"x": data})
            (disk / "other").write_bytes(bytes(300_000))

            async def without_a_length() -> AsyncIterator[bytes]:
                yield data

            url = f"/v1/uploads/{began['upload_id']}/files/{hashlib.sha256(data).hexdigest()}?offset=0"
            refused = await client.put(url, content=without_a_length(), headers=OCTETS)
            assert (refused.status_code, refused.json()["type"]) == (507, "/problems/no-space-for-uploads")
            assert str(disk) in refused.json()["detail"]
            (disk / "other").unlink()
            assert (await begin(client, {"x": data}))["files"][0]["received"] == 0
            assert (await put(client, began["upload_id"], data)).json()["is_complete"]


async def test_a_key_without_the_scope_is_refused_with_its_name(
    taking: TrainerSettings, redis: Redis, tmp_path: Path
) -> None:

    keys = tmp_path / "api-keys"
    keys.write_text(NamedKey("notebook", digest_of(b"some-key"), frozenset({"read", "submit"})).line() + "\n")
    api = make_api(taking.model_copy(update={"api_keys_file": keys}), redis, stopping=asyncio.Event())
    async with serving(api) as client:
        refused = await client.post("/v1/uploads", json={"files": []}, headers={"authorization": "Bearer some-key"})
    assert (refused.status_code, refused.json()["missing_scope"]) == (403, "upload")
    assert "scope upload; the key notebook has read, submit" in refused.json()["detail"]


async def test_an_upload_of_a_live_run_stays_and_others_expire(
    taking: TrainerSettings, redis: Redis, run: dict[str, Any]
) -> None:

    api = make_api(taking, redis, stopping=asyncio.Event())
    async with serving(api) as client:
        rows = b'{"prompt": "1 + 1 =", "solution": "2"}\n'
        paths: list[Path] = []
        for name in ("used.jsonl", "unused.jsonl"):
            began = await begin(client, {name: rows * len(name)})
            await put(client, began["upload_id"], rows * len(name))
            paths.append(Path(began["path"]))
        submitted = await client.post("/v1/runs", json=run | {"dataset_name": f"{paths[0]}/used.jsonl", "max_steps": 1})
        assert submitted.status_code == 202, submitted.text
        for path in paths:
            os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        assert api.uploads is not None
        await expire_once(api.uploads, api.store, after_s=3600)
        assert [path.exists() for path in paths] == [True, False]


async def test_uploads_that_are_hashed_hold_up_neither_other_requests_nor_the_end_of_the_service(
    uploader: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, goes_on = hashlib.file_digest, threading.Event()
    are_daemons: set[bool] = set()

    def read_slowly(*given: Any) -> Any:
        are_daemons.add(threading.current_thread().daemon)
        goes_on.wait(120)
        return read(*given)

    files = {f"{number}.jsonl": b"{}" * (number + 1) for number in range(40)}  # more than there are threads
    began = await begin(uploader, files)
    monkeypatch.setattr(hashlib, "file_digest", read_slowly)
    waiting = [asyncio.create_task(put(uploader, began["upload_id"], data)) for data in files.values()]
    try:
        await wait_until(lambda: bool(are_daemons))
        shown = asyncio.create_task(uploader.get("/v1/about"))
        await asyncio.wait({shown, *waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert shown.done()
    finally:
        goes_on.set()
    assert {(await reply).status_code for reply in waiting} == {200}
    assert (await begin(uploader, files))["is_complete"]
    assert are_daemons == {True}


async def test_a_submit_is_a_use_of_an_upload(taking: TrainerSettings, redis: Redis, run: dict[str, Any]) -> None:

    async with serving(make_api(taking, redis, stopping=asyncio.Event())) as client:
        began = await begin(client, {"a.jsonl": b"{}"})
        await put(client, began["upload_id"], b"{}")
        os.utime(began["path"], (LONG_AGO_S, LONG_AGO_S))
        await client.post("/v1/runs", json=run | {"datasets": None, "dataset_name": f"{began['path']}/a.jsonl"})
        assert os.stat(began["path"]).st_mtime > LONG_AGO_S


def test_uploads_may_not_be_inside_the_runs(settings: TrainerSettings, tmp_path: Path) -> None:
    given = json.loads(settings.model_dump_json(include={"runs_dir"}))
    with pytest.raises(ValueError, match="inside each other"):
        TrainerSettings(**given, uploads_dir=settings.runs_dir / "uploads")
    (settings.runs_dir / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(settings.runs_dir / "inside")
    with pytest.raises(ValueError, match="inside each other"):
        TrainerSettings(**given, uploads_dir=tmp_path / "link" / "uploads")
    with pytest.raises(ValueError, match="HEADRACE_UPLOADS_DIR=uploads: give an absolute path"):
        TrainerSettings(**given, uploads_dir=Path("uploads"))
    assert TrainerSettings(**given, uploads_dir="").uploads_dir is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [("inf", "should be a finite number"), ("1e-9", "should be greater than or equal to 1"), ("nan", "finite number")],
)
def test_uploads_expire_after_a_time_that_can_be_shown_and_waited_for(
    settings: TrainerSettings, given: str, says: str
) -> None:
    plain = json.loads(settings.model_dump_json(include={"runs_dir"}))
    with pytest.raises(ValueError, match=says):
        TrainerSettings(**plain, upload_expiry_s=given)  # type: ignore[arg-type]


def test_a_run_may_read_uploads_and_not_write_weights_there(taking: TrainerSettings) -> None:
    path = str(taking.uploads_dir) + "/sha256-x/train.jsonl"
    roots = taking.model_copy(update={"data_roots": "/models", "weight_roots": str(taking.runs_dir.parent)})
    roots.places_of_data().require(path, field="dataset_name")
    with pytest.raises(UserError, match="not in a place"):
        roots.places_of_weights().require(path, field="weight_dir")


async def test_a_hash_of_another_form_is_refused_in_plain_words(uploader: httpx.AsyncClient) -> None:
    refused = await uploader.post("/v1/uploads", json={"files": [described("a", b"x") | {"sha256": "A"}]})
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert error["message"] == "must be text of 64 digits and letters from a to f, as sha256sum prints it"
