"""The client's uploads and downloads against the real trainer service, in a process that can be killed."""

import hashlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import file_transfer
from headrace.cli.command_line import main
from headrace.client import HeadraceApiError, HeadraceClient
from shared.access.named_keys import NamedKey, digest_of
from shared.errors import UserError
from tests.trainer.api_rig import KEY
from tests.trainer.service_rig import Service, Start, wait_until


@pytest.fixture
def service(start: Start, tmp_path: Path) -> Service:
    """Return a trainer that takes uploads, and whose runs finish at once."""
    keys = tmp_path / "api-keys"
    keys.write_text(NamedKey("notebook", digest_of(b"narrow"), frozenset({"read", "submit"})).line() + "\n")
    return start(
        HEADRACE_UPLOADS_DIR=str(tmp_path / "uploads"),
        HEADRACE_CODE_UPLOADS_DIR=str(tmp_path / "code"),
        HEADRACE_UPLOADS_KEEP_FREE_BYTES="0",
        HEADRACE_API_KEYS_FILE=str(keys),
        FAKE_RANK_PLAN="finish",
    )


@pytest.fixture
def client(service: Service) -> Iterator[HeadraceClient]:
    with HeadraceClient(f"http://127.0.0.1:{service.port}", KEY) as found:
        yield found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a directory like one of ``save_to_disk``, with a hidden file."""
    directory = tmp_path / "saved"
    (directory / "train").mkdir(parents=True)
    (directory / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (directory / "train" / "state.json").write_text("{}")
    (directory / "train" / "data-00000-of-00001.arrow").write_bytes(bytes(range(256)) * 50_000)
    (directory / ".git").mkdir()
    (directory / ".git" / "config").write_text("mine")
    return directory


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_a_directory_arrives_without_its_hidden_files_and_is_sent_once(
    client: HeadraceClient, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_transfer, "_PIECE_BYTES", 1_000_000)
    told: list[tuple[int, int]] = []
    where = client.upload(saved, on_progress=lambda done, total: told.append((done, total)))
    expected = {name: data for name, data in files_in(saved).items() if not name.startswith(".git")}
    assert files_in(Path(where)) == expected
    total = sum(map(len, expected.values()))
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 12
    told.clear()
    assert client.upload(saved, on_progress=lambda done, total: told.append((done, total))) == where
    assert told == [(total, total)]


def test_a_file_is_named_by_its_own_path(client: HeadraceClient, tmp_path: Path, run: dict[str, Any]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "solution": "2"}\n' * 8)
    where = client.upload(rows)
    assert re.fullmatch(re.escape(str(tmp_path / "uploads")) + r"/sha256-[0-9a-f]{64}/rows.jsonl", where)
    assert client.check(run | {"dataset_name": where}).derived["num_rows"] == 8


def test_the_commands_send_a_data_set_and_fetch_a_model(
    service: Service,
    run: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HEADRACE_URL", f"http://127.0.0.1:{service.port}")
    monkeypatch.setenv("HEADRACE_API_KEY", KEY)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "solution": "2"}\n' * 8)
    assert main(["upload", str(rows)]) == 0
    where = capsys.readouterr().out.removesuffix("\n")
    assert Path(where).read_bytes() == rows.read_bytes()
    code = tmp_path / "my rewards.py"
    code.write_text("def brevity(completions, **kwargs):\n    return [-float(len(text)) for text in completions]\n")
    assert main(["upload", "--code", str(code)]) == 0
    module = capsys.readouterr().out.removesuffix("\n")
    assert re.fullmatch("my_rewards_[0-9a-f]{24}", module)
    assert (tmp_path / "code" / f"{module}.py").read_text() == code.read_text()
    code.write_text("def brevity(:\n")
    assert main(["upload", "--code", str(code)]) == 1
    assert "my rewards.py, line 1: " in capsys.readouterr().err
    code.write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert main(["upload", "--code", str(code)]) == 0, "a byte order mark is no part of the text"
    capsys.readouterr()
    code.write_bytes(b"x = '\xe9'\n")
    assert main(["upload", "--code", str(code)]) == 1
    assert "utf-8" in capsys.readouterr().err
    assert main(["upload", "--code", str(rows)]) == 1
    assert "its name must end with .py" in capsys.readouterr().err
    assert main(["upload", str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err == f"headrace: {tmp_path}/missing cannot be uploaded: no such file or directory\n"

    run_id = service.submit(run | {"dataset_name": where, "name": "mine"})
    wait_until(lambda: service.status(run_id) == "finished")
    assert main(["download", "mine", "--to", str(tmp_path / "fetched")]) == 1
    assert "has left no final model" in capsys.readouterr().err
    with HeadraceClient(f"http://127.0.0.1:{service.port}", KEY) as client:
        model = Path(client.get(run_id)["run_dir"]) / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert main(["download", "mine", "--to", str(tmp_path / "fetched")]) == 0
    assert capsys.readouterr().out == f"downloaded the model of mine to {tmp_path}/fetched\n"
    assert files_in(tmp_path / "fetched") == {"config.json": b"{}"}


def test_an_upload_outlives_a_trainer_that_is_killed_and_started_again(
    service: Service, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_transfer, "_PIECE_BYTES", 200_000)
    big = tmp_path / "big.parquet"
    big.write_bytes(bytes(range(256)) * 40_000)
    half, goes_on = threading.Event(), threading.Event()

    def watch(done: int, total: int) -> None:
        if done > total // 2:
            half.set()
            goes_on.wait(120)

    found: list[str] = []
    with HeadraceClient(f"http://127.0.0.1:{service.port}", KEY) as client:
        sending = threading.Thread(target=lambda: found.append(client.upload(big, on_progress=watch)))
        sending.start()
        assert half.wait(120)
        service.process.kill()
        service.process.wait(timeout=120)
        start(
            HEADRACE_PORT=str(service.port),
            HEADRACE_UPLOADS_DIR=str(tmp_path / "uploads"),
            HEADRACE_UPLOADS_KEEP_FREE_BYTES="0",
        )
        goes_on.set()
        sending.join(timeout=120)
    (where,) = found
    assert Path(where).read_bytes() == big.read_bytes()


def test_a_file_that_changes_on_its_way_is_refused(
    client: HeadraceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_transfer, "_PIECE_BYTES", 1000)
    growing = tmp_path / "growing.jsonl"
    growing.write_bytes(b"a" * 5000)

    def change(done: int, _total: int) -> None:
        if done == 2000:
            growing.write_bytes(b"b" * 5000)

    with pytest.raises(UserError, match="has changed while it was uploaded"):
        client.upload(growing, on_progress=change)


def test_a_file_that_is_deleted_on_its_way_is_named(client: HeadraceClient, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"{}")
    with pytest.raises(UserError, match=r"rows.jsonl cannot be read: No such file or directory"):
        client.upload(source, on_progress=lambda _done, _total: source.unlink())


def test_a_key_without_the_scope_says_which_scope_it_lacks(service: Service, saved: Path) -> None:
    with (
        HeadraceClient(f"http://127.0.0.1:{service.port}", "narrow") as client,
        pytest.raises(HeadraceApiError, match=r"saved cannot be uploaded: .* scope upload; the key notebook has") as no,
    ):
        client.upload(saved)
    assert no.value.problem["missing_scope"] == "upload"


def test_what_is_not_there_cannot_be_uploaded(client: HeadraceClient, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        client.upload(tmp_path / "missing")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="there are no files"):
        client.upload(tmp_path / "nothing")


def test_a_final_model_comes_back_and_goes_on_where_it_broke_off(
    service: Service, client: HeadraceClient, run: dict[str, Any], tmp_path: Path
) -> None:
    run_id = service.submit(run)
    wait_until(lambda: service.status(run_id) == "finished")
    model = Path(client.get(run_id)["run_dir"]) / "model"
    with pytest.raises(HeadraceApiError, match="has left no final model"):
        client.download_model(run_id, tmp_path / "mine")
    (model / "templates").mkdir(parents=True)
    weights = bytes(range(256)) * 20_000
    (model / "model.safetensors").write_bytes(weights)
    (model / "config.json").write_text("{}")
    (model / "empty").write_bytes(b"")
    (model / "templates" / "a.jinja").write_text("a")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "other.txt").write_text("stays")
    # What an interrupted download leaves.
    (mine / f".model.safetensors.{hashlib.sha256(weights).hexdigest()[:12]}.part").write_bytes(weights[:1_000_000])
    told: list[int] = []
    assert client.download_model(run_id, mine, on_progress=lambda done, _total: told.append(done)) == mine
    assert files_in(mine) == files_in(model) | {"other.txt": b"stays"}
    assert told[-1] == len(weights) + 3
    (model / "config.json").write_text("[]")
    client.download_model(run_id, mine)
    assert (mine / "config.json").read_text() == "[]"


def test_a_model_that_gets_shorter_while_it_is_downloaded_is_told_so(
    service: Service, client: HeadraceClient, run: dict[str, Any], tmp_path: Path
) -> None:
    run_id = service.submit(run)
    wait_until(lambda: service.status(run_id) == "finished")
    model = Path(client.get(run_id)["run_dir"]) / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"w" * 1000)

    def shorten(_done: int, _total: int) -> None:
        (model / "model.safetensors").write_bytes(b"short")

    mine = tmp_path / "mine"
    with pytest.raises(HeadraceApiError, match=r"model.safetensors of the model has changed while it was downloaded"):
        client.download_model(run_id, mine, on_progress=shorten)
    assert files_in(mine) == {"config.json": b"{}"}
    client.download_model(run_id, mine)
    assert files_in(mine) == files_in(model)
