"""A secret that children read from this process's memory is there for as long as it lives."""

import os
from pathlib import Path

import pytest

from shared.child_secrets import in_memory
from shared.secret_files import read_secret


def test_a_secret_has_one_file_and_another_secret_another() -> None:
    assert in_memory("one") == in_memory("one") != in_memory("two")
    assert read_secret(Path(in_memory("one")), variable="KEY") == "one"
    assert read_secret(Path(in_memory("two")), variable="KEY") == "two"


@pytest.mark.parametrize("replacement", ["nothing", "a file", "a pipe", "another secret"])
def test_a_descriptor_that_something_else_closed_is_replaced(replacement: str, tmp_path: Path) -> None:
    number = int(Path(in_memory("mine")).name)
    (tmp_path / "words").write_text("not a key")
    reading, writing = os.pipe()
    with (tmp_path / "words").open("rb") as file:
        others = {"a file": file.fileno(), "a pipe": reading, "another secret": int(Path(in_memory("mine too")).name)}
        if replacement == "nothing":
            os.close(number)
        else:
            os.dup2(others[replacement], number)
    try:
        assert read_secret(Path(in_memory("mine")), variable="KEY") == "mine"
    finally:
        os.close(reading)
        os.close(writing)
        if replacement != "nothing":
            os.close(number)
