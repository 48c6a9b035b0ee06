"""Which part of a completion is code, and which values of a row are tests."""

import pytest

from services.rewarder.built_ins.code_execution import RowTests, code_of, read_tests
from services.rewarder.built_ins.time_limit import time_limit

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nbetter:\n```python3\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```bash\nls\n```\n```\na\n```", "a\n"),
        ("1. so:\n   ```python title=x\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("```python\n```", ""),
        ("```bash\nls\n```", None),
        ("```python\ncut off", None),
        ("```python\na\n```python\nb\n```\nc\n```", "a\n```python\nb\n"),
        ("```Python\na\n  ``` \nb", "a\n"),
        ("```python\r\nif a:\r\n    b\r\n```\r\nso", "if a:\n    b\n"),
        ("def f(): pass", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_counts(text: str, code: str | None) -> None:
    assert code_of(text) == code


def test_a_hundred_thousand_openings_are_read_in_one_pass() -> None:
    with time_limit(20):
        assert code_of("```python x\n" * 100_000) is None


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        (["assert f() == 1"], RowTests("asserts", ["assert f() == 1"])),
        ("assert f() == 1", RowTests("asserts", ["assert f() == 1"])),
        ('["assert f() == 1"]', RowTests("asserts", ["assert f() == 1"])),
        ([{"input": "1", "output": "2"}], RowTests("cases", [{"input": "1", "output": "2"}])),
        ([{"input": ["1", "2"], "output": "3", "id": 7}], RowTests("cases", [{"input": "1\n2", "output": "3"}])),
    ],
)
def test_tests_are_statements_or_cases(row: object, tests: RowTests) -> None:
    assert read_tests(row) == tests


@pytest.mark.parametrize(
    "row",
    [
        None, [], 3, [3], [None], [{"input": 1, "output": "1"}], ["a", {"input": "1"}], "[]",
        "", "  ", [""], ["", "# to do"], "pass", "'a'\n'b'",
    ],
)  # fmt: skip
def test_anything_else_is_none(row: object) -> None:
    assert isinstance(read_tests(row), str)


@pytest.mark.parametrize(
    "row",
    [
        '{"inputs": ["1"], "outputs": ["2"]}', '{"input": "1", "output": "2"}', "5", '"x"', "true",
        ['{"input": "1", "output": "2"}'], ["{'input': '1'}"], ['{"found": true}'], ["assert f() == 1", r"'\d'"],
    ],
)  # fmt: skip
def test_text_that_is_only_a_value_is_not_a_test_that_all_code_passes(row: object) -> None:
    assert isinstance(read_tests(row), str)


def test_an_entry_may_be_empty_or_call_something_without_an_assert() -> None:
    tests = ["", "# basic", "check(f)", "import numpy", "{f(1): 2}"]
    assert read_tests(tests) == RowTests("asserts", tests)


def test_an_input_must_fit_into_a_file_of_the_sandbox() -> None:
    rows = [[{"input": "\u00e9" * num_letters, "output": "1"}] for num_letters in (4 << 20, (4 << 20) + 1)]
    assert [isinstance(read_tests(row), RowTests) for row in rows] == [True, False]
