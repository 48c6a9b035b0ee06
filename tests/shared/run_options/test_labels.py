"""Name, tags and metadata of a run: small, printable, and refused with a sentence otherwise."""

import re
from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

PLAIN: dict[str, Any] = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}


def labelled(**labels: Any) -> RunConfig:
    return parse_run_config(PLAIN | labels)


def test_labels_are_kept_and_a_tag_counts_once() -> None:
    config = labelled(
        name="first.try", tags=["lr:1e-4", "team/a", "lr:1e-4"], metadata={"lr": 1e-4, "n": 3, "by": "Ada"}
    )
    assert config.tags == ["lr:1e-4", "team/a"]
    assert config.metadata == {"lr": 1e-4, "n": 3, "by": "Ada"}
    assert (labelled().name, labelled().tags, labelled().metadata) == (None, [], {})


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ({"name": "a/b"}, "name: use letters, digits"),
        ({"tags": "a"}, "tags: must be a list, and is text"),
        ({"tags": ["a", "a b"]}, "tags: tag 1 must be letters"),
        ({"tags": [f"t{number}" for number in range(17)]}, "tags: must be a list of at most 16 items"),
        ({"metadata": []}, "metadata: must be a table"),
        ({"metadata": {"a b": 1}}, "metadata: its names are letters"),
        ({"metadata": {"a": True}}, "metadata: a must be text or a number"),
        ({"metadata": {"a": {"b": 1}}}, "metadata: a must be text or a number"),
        ({"metadata": {"a": float("inf")}}, "metadata: a must be finite"),
        ({"metadata": {"a": float("nan")}}, "metadata: a must be finite"),
        ({"metadata": {"a": 10**400}}, "metadata: a must be at most 9007199254740992; write a larger whole number as"),
        ({"metadata": {"a": "x" * 257}}, "metadata: a must be one line of at most 256 characters"),
        ({"metadata": {"a": "two\nlines"}}, "metadata: a must be one line"),
        ({"metadata": {"a": "a line\n"}}, "metadata: a must be one line"),
        ({"metadata": {"a": "an ot\u202eher order"}}, "metadata: a must be one line"),
        ({"metadata": {str(number): number for number in range(33)}}, "metadata: must be a list of at most 32 items"),
    ],
)
def test_labels_that_are_large_or_not_printable_are_refused(labels: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        labelled(**labels)
    assert str(refused.value).startswith(sentence)


def test_the_schema_says_which_labels_are_taken() -> None:
    options = RunConfig.model_json_schema()["properties"]
    line = options["metadata"]["additionalProperties"]["anyOf"][0]["pattern"]
    assert re.search(line, "für Ada, 3 + 4")
    assert not re.search(line, "a\tb")
    assert re.search(options["tags"]["items"]["pattern"], "lr:1e-4")
    assert not re.search(options["tags"]["items"]["pattern"], "a b")
    for pattern in (options["metadata"]["propertyNames"]["pattern"], options["name"]["anyOf"][0]["pattern"]):
        assert re.search(pattern, "first.try")
        assert not re.search(pattern, "a/b")
