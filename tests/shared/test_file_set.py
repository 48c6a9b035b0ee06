"""Which files form a directory that may be sent, and its id."""

import hashlib

import pytest

from shared.files.file_set import MAX_FILES, SetFile, set_id, why_no_path, why_no_set

pytestmark = pytest.mark.unit

A, B = hashlib.sha256(b"a").hexdigest(), hashlib.sha256(b"b").hexdigest()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "1 to 512 characters"),
        ("a" * 513, "1 to 512 characters"),
        ("/etc/passwd", "relative"),
        ("../keys", "'..'"),
        ("model/../../keys", "'..'"),
        ("model/./x", "'.'"),
        ("model//x", "empty part"),
        ("model/", "empty part"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("..\\keys", "backslashes"),
        ("C:keys", "colons"),
        ("/".join("abcdefghi"), "8 parts"),
        ("é" * 128, "255 bytes"),
        ("\ud800", "Unicode"),
    ],
)
def test_a_path_that_leaves_the_directory_or_is_no_plain_name_is_refused(path: str, reason: str) -> None:
    assert reason in why_no_path(path)


@pytest.mark.parametrize("path", ["config.json", "train/data-00000-of-00001.arrow", "..data", "a b.jinja", "ä.json"])
def test_usual_paths_are_taken(path: str) -> None:
    assert why_no_path(path) == ""


def test_files_that_cannot_be_one_directory_are_refused() -> None:
    assert "no files" in why_no_set([])
    assert "twice" in why_no_set([SetFile("x", 1, A), SetFile("x", 1, A)])
    assert "both a file and a directory" in why_no_set([SetFile("x", 1, A), SetFile("x/y", 1, B)])
    assert "two sizes" in why_no_set([SetFile("x", 1, A), SetFile("y", 2, A)])
    assert "'..'" in why_no_set([SetFile("x", 1, A), SetFile("../y", 1, B)])
    assert "at most" in why_no_set(SetFile(f"{number}", 1, A) for number in range(MAX_FILES + 1))
    assert why_no_set([SetFile("x", 1, A), SetFile("z/y", 1, A)]) == ""


def test_the_id_of_a_set_names_its_content_in_any_order() -> None:
    files = [SetFile("x", 1, A), SetFile("y", 1, B)]
    expected = hashlib.sha256("".join(sorted([f"{A} 1 x\n", f"{B} 1 y\n"])).encode()).hexdigest()
    assert set_id(files) == set_id(files[::-1]) == f"sha256-{expected}"
    assert set_id([SetFile("x", 1, A), SetFile("z", 1, B)]) != set_id(files)
