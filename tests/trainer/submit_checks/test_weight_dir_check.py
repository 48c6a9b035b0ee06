"""A run whose weights could not be stored is refused at submit. A run that is only validated leaves no files."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from services.trainer.submit_checks.weight_dir_check import check_weight_dir

pytestmark = pytest.mark.unit

fsspec: Any = pytest.importorskip("fsspec")


def test_an_object_store_is_written_read_and_left_as_it_was() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("memory://bucket/other", b"stays")
    assert check_weight_dir("memory://bucket/weights") == []
    assert list(memory.find("memory://bucket")) == ["/bucket/other"]


def test_a_store_whose_package_is_missing_is_named() -> None:
    assert importlib.util.find_spec("gcsfs") is None
    ((field, why),) = check_weight_dir("gs://bucket/weights")
    assert field == "weight_dir"
    assert "gcsfs" in why
    assert "every generator need the package" in why


def test_a_store_that_does_not_answer_is_refused_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    ((field, why),) = check_weight_dir("s3://bucket/weights")
    assert field == "weight_dir"
    assert "weights cannot be written to s3://bucket/weights/check-" in why
    assert "127.0.0.1:9" in why


def test_a_directory_is_looked_at_and_not_made(tmp_path: Path) -> None:
    assert check_weight_dir(str(tmp_path / "not" / "there")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_weight_dir(str(tmp_path / "file" / "below")) == [
        (
            "weight_dir",
            f"the trainer cannot write to {tmp_path / 'file'}: fix its permissions, or choose another directory",
        )
    ]
