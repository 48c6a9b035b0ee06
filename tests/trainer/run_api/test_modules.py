"""Modules of clients over real HTTP: closed by default, never changed, bounded, confined, and named by runs."""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.trainer.checkpoints.manifest import MANIFEST_FILE
from services.trainer.run_api.trainer_api import make_api
from services.trainer.settings import TrainerSettings
from services.trainer.uploads.upload_expiry import expire_once
from shared.access.named_keys import NamedKey, digest_of
from shared.errors import UserError
from shared.redis.redis_connection import Redis
from shared.service.logs import AUDIT_LOGGER
from tests.trainer.api_rig import serving

SOURCE = "def brevity(completions, **kwargs):\n    return [1 / (1 + len(text)) for text in completions]\n"
MODULE = f"rewards_{hashlib.sha256(SOURCE.encode()).hexdigest()[:24]}"
LONG_AGO_S = 1_000_000_000


@pytest.fixture
def taking(settings: TrainerSettings, tmp_path: Path) -> TrainerSettings:
    """Return the settings of an API that takes code."""
    directory = tmp_path / "code"
    directory.mkdir()
    return settings.model_copy(update={"code_uploads_dir": directory, "uploads_keep_free_bytes": 0})


@pytest.fixture
def code(taking: TrainerSettings) -> Path:
    """Return the directory of uploaded code."""
    assert taking.code_uploads_dir is not None
    return taking.code_uploads_dir


@pytest.fixture
async def uploader(taking: TrainerSettings, redis: Redis) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of an API that takes code."""
    async with serving(make_api(taking, redis, stopping=asyncio.Event())) as client:
        yield client


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def make_old(directory: Path) -> None:
    for path in directory.iterdir():
        os.utime(path, (LONG_AGO_S, LONG_AGO_S), follow_symlinks=False)


async def send(client: httpx.AsyncClient, source: str = SOURCE, *, name: str = "rewards") -> httpx.Response:
    return await client.post("/v1/modules", json={"name": name, "source": source})


async def test_without_the_setting_code_is_refused_with_its_name(client: httpx.AsyncClient) -> None:
    refused = await send(client)
    assert (refused.status_code, refused.json()["type"]) == (404, "/problems/code-uploads-off")
    assert "HEADRACE_CODE_UPLOADS_DIR" in refused.json()["detail"]


async def test_a_module_is_named_by_its_content_and_never_changes(uploader: httpx.AsyncClient, code: Path) -> None:
    for _ in range(2):
        reply = await send(uploader)
        assert (reply.status_code, reply.json()["module"]) == (200, MODULE), reply.text
    other = (await send(uploader, SOURCE + "# better\n")).json()["module"]
    assert names_in(code) == {f"{MODULE}.py", f"{other}.py"}
    assert (code / f"{MODULE}.py").read_text() == SOURCE


async def test_a_file_that_is_there_with_other_content_stays(uploader: httpx.AsyncClient, code: Path) -> None:
    (code / f"{MODULE}.py").write_text("the operator's")
    refused = await send(uploader)
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/module-exists")
    assert (code / f"{MODULE}.py").read_text() == "the operator's"


@pytest.mark.parametrize("name", ["../rewards", "a/b", "a.b", "1st", "", "a" * 65, "r\u00e9", "a\n"])
async def test_names_that_are_no_module_are_refused(uploader: httpx.AsyncClient, code: Path, name: str) -> None:
    refused = await send(uploader, name=name)
    assert refused.status_code == 422
    assert "name" in refused.json()["detail"]
    assert not names_in(code)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "a", "source": ""}, 422),
        ({"name": "a", "source": "x" * 262_145}, 413),
        ({"name": "a", "source": "\u4e2d" * 100_000}, 413),
        ({"name": "a", "source": "# -*- coding: latin-1 -*-\nx = 1"}, 422),
        ({"name": "a", "source": "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n"}, 422),
        ({"name": "a", "source": "# a\x0cb\n# coding: latin-1\nx = '\u00e9'"}, 422),
        ({"name": "a", "source": "# coding: none-such\nx = 1"}, 422),
        ({"name": "a", "source": "x" * (1 << 21)}, 413),
        ({"name": "a", "source": ["x"]}, 422),
        ({"name": "a"}, 422),
        ({"name": "a", "source": "x", "path": "/etc"}, 422),
        ([], 422),
    ],
)
async def test_bodies_that_are_no_module_are_refused(
    uploader: httpx.AsyncClient, code: Path, body: Any, status: int
) -> None:
    assert (await uploader.post("/v1/modules", json=body)).status_code == status
    assert not names_in(code)


async def test_text_that_is_not_utf_8_is_refused(uploader: httpx.AsyncClient, code: Path) -> None:
    body = b'{"name": "a", "source": "\\ud800"}'
    refused = await uploader.post("/v1/modules", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400, refused.text
    assert not names_in(code)


async def test_an_upload_is_a_line_in_the_audit_log(
    uploader: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=AUDIT_LOGGER):
        await send(uploader)
    told = [record.getMessage() for record in caplog.records if record.name == AUDIT_LOGGER]
    assert told == [f"module.upload {MODULE} by api-key: done (200)"]


async def test_a_key_needs_the_scope_and_upload_is_another_one(
    taking: TrainerSettings, redis: Redis, tmp_path: Path
) -> None:
    keys = tmp_path / "api-keys"
    scopes: dict[str, frozenset[Any]] = {"data": frozenset({"read", "submit", "upload"}), "dev": frozenset({"code"})}
    keys.write_text("".join(NamedKey(name, digest_of(name.encode()), of).line() + "\n" for name, of in scopes.items()))
    api = make_api(taking.model_copy(update={"api_keys_file": keys}), redis, stopping=asyncio.Event())
    body = {"name": "rewards", "source": SOURCE}
    async with serving(api) as client:
        refused = await client.post("/v1/modules", json=body, headers={"authorization": "Bearer data"})
        taken = await client.post("/v1/modules", json=body, headers={"authorization": "Bearer dev"})
    assert (refused.status_code, refused.json()["missing_scope"]) == (403, "code")
    assert taken.status_code == 200


async def test_a_module_of_a_live_run_stays_and_others_expire(
    taking: TrainerSettings, redis: Redis, run: dict[str, Any], code: Path
) -> None:
    api = make_api(taking, redis, stopping=asyncio.Event())
    async with serving(api) as client:
        assert (await send(client)).status_code == 200
        unused = (await send(client, "x = 1\n")).json()["module"]
        (code / "rewards.py").write_text("the operator's")
        make_old(code)
        submitted = await client.post("/v1/runs", json=run | {"reward_funcs": [f"{MODULE}:brevity"]})
        assert submitted.status_code == 202, submitted.text
        assert (code / f"{MODULE}.py").stat().st_mtime > LONG_AGO_S, "a submit is a use"
        make_old(code)
        (store,) = api.client_files
        await expire_once(store, api.store, after_s=3600)
    assert names_in(code) == {f"{MODULE}.py", "rewards.py"}, f"{unused} has expired"


@pytest.mark.parametrize(
    "source",
    [
        "\ufeffx = 1",
        "# coding: utf-8\nx = 1",
        "# coding: utf_8\nx = 1",
        "# -*- coding: utf-8-unix -*-\nx = 1",
        "x = 1\n# coding: latin-1",
        "x = '\u00e9'",
    ],
)
async def test_text_that_python_reads_as_utf_8_is_kept_as_it_is(
    uploader: httpx.AsyncClient, code: Path, source: str
) -> None:
    module = (await send(uploader, source)).json()["module"]
    assert (code / f"{module}.py").read_bytes() == source.encode()


async def test_settings_with_names_of_no_module_neither_fail_a_submit_nor_stop_the_expiry(
    taking: TrainerSettings, redis: Redis, run: dict[str, Any], code: Path
) -> None:
    api = make_api(taking, redis, stopping=asyncio.Event())
    async with serving(api) as client:
        old = (await send(client)).json()["module"]
        (code / "dangling_0123456789abcdef01234567.py").symlink_to(code / "nowhere")
        (code / "directory_0123456789abcdef01234567.py").mkdir()
        (code / "left_0123456789abcdef01234567.py.uploading").write_text("x")
        make_old(code)
        submitted = await client.post(
            "/v1/runs", json=run | {"metadata": {"note": "a" * 231 + "_0123456789abcdef01234567"}}
        )
        assert submitted.status_code == 202, submitted.text
        (store,) = api.client_files
        await expire_once(store, api.store, after_s=3600)
    assert {f"{old}.py", "left_0123456789abcdef01234567.py.uploading"}.isdisjoint(names_in(code))


async def test_the_resume_of_a_failed_run_is_a_use(
    taking: TrainerSettings, redis: Redis, run: dict[str, Any], code: Path
) -> None:
    api = make_api(taking, redis, stopping=asyncio.Event())
    async with serving(api) as client:
        await send(client)
        submitted = await client.post("/v1/runs", json=run | {"reward_funcs": [f"{MODULE}:brevity"]})
        run_id = submitted.json()["run"]["run_id"]
        await api.store.set_status(run_id, "failed", reason="the disk was full")
        checkpoint = taking.runs_dir / run_id / "checkpoints" / "step_00000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST_FILE).touch()
        make_old(code)
        assert (await client.post(f"/v1/runs/{run_id}/resume")).status_code == 202
    assert (code / f"{MODULE}.py").stat().st_mtime > LONG_AGO_S


async def test_what_a_run_uses_stays_although_its_file_cannot_be_touched(
    taking: TrainerSettings, redis: Redis, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = make_api(taking, redis, stopping=asyncio.Event())
    assert api.modules is not None
    used, unused = api.modules.add("used", "x = 1\n"), api.modules.add("unused", "x = 2\n")
    make_old(code)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert api.modules.add("used", "x = 1\n") == used
    assert api.modules.expire([f"{used}:f"], after_s=3600) == 1
    assert names_in(code) == {f"{used}.py"}, unused


async def test_a_module_that_is_used_while_others_expire_stays(
    taking: TrainerSettings, redis: Redis, code: Path
) -> None:
    api = make_api(taking, redis, stopping=asyncio.Event())
    assert api.modules is not None
    for number in range(300):
        api.modules.add("old", f"x = {number}\n")
    make_old(code)
    store = api.modules
    expired, added = await asyncio.gather(
        asyncio.to_thread(store.expire, (), after_s=3600),
        asyncio.to_thread(lambda: [store.add("old", f"x = {number}\n") for number in range(300)]),
    )
    assert names_in(code) == {f"{module}.py" for module in added}
    assert 0 <= expired <= 300


def test_code_may_not_be_inside_the_runs_and_no_weights_are_written_there(
    settings: TrainerSettings, taking: TrainerSettings, code: Path
) -> None:
    given = json.loads(settings.model_dump_json(include={"runs_dir"}))
    with pytest.raises(ValueError, match=r"HEADRACE_CODE_UPLOADS_DIR=.* inside each other"):
        TrainerSettings(**given, code_uploads_dir=settings.runs_dir / "code")
    with pytest.raises(ValueError, match=r"HEADRACE_CODE_UPLOADS_DIR=.* and HEADRACE_UPLOADS_DIR=.* inside each other"):
        TrainerSettings(**given, uploads_dir=code / "data", code_uploads_dir=code)
    with pytest.raises(ValueError, match="HEADRACE_CODE_UPLOADS_DIR=code: give an absolute path"):
        TrainerSettings(**given, code_uploads_dir=Path("code"))
    assert TrainerSettings(**given, code_uploads_dir="").code_uploads_dir is None  # type: ignore[arg-type]
    roots = taking.model_copy(update={"weight_roots": str(code.parent)})
    with pytest.raises(UserError, match="not in a place"):
        roots.places_of_weights().require(str(code / "weights"), field="weight_dir")
