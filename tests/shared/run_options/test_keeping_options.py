"""Invalid options of checkpoints and of the hub, and the reasons."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

PLAIN: dict[str, Any] = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}
GOOD = ("better", "group/better", "Group_1/Qwen2.5-0.5B_grpo", "0/1")
BAD = (
    "a/b/c",
    "group/",
    "/better",
    ".hidden",
    "group/better.",
    "a--b",
    "a..b",
    "group/better.git",
    "group/bétter",
    "a b",
)


def uploading(**settings: Any) -> RunConfig:
    return parse_run_config(PLAIN | {"push_to_hub": True} | settings)


@pytest.mark.parametrize("repo_id", GOOD)
def test_a_repository_id_is_kept_as_it_is(repo_id: str) -> None:
    assert uploading(hub_model_id=repo_id).hub_model_id == repo_id


@pytest.mark.parametrize("repo_id", BAD)
def test_a_repository_id_that_the_hub_would_refuse_at_the_end_is_refused_at_the_beginning(repo_id: str) -> None:
    with pytest.raises(UserError, match="is not a repository id; write owner/name"):
        uploading(hub_model_id=repo_id)


def test_huggingface_hub_agrees_on_which_ids_are_good() -> None:
    validators = pytest.importorskip("huggingface_hub.utils")
    for repo_id in GOOD:
        validators.validate_repo_id(repo_id)
    for repo_id in BAD:
        with pytest.raises(ValueError, match=r"(?i)repo[ _]id"):
            validators.validate_repo_id(repo_id)


def test_a_run_whose_name_is_not_a_repository_says_where_to_upload() -> None:
    with pytest.raises(UserError, match="the hub has no repositories named 'a--b'; set hub_model_id"):
        uploading(name="a--b")
    assert uploading(name="a--b", hub_model_id="group/better").name == "a--b"


@pytest.mark.parametrize("option", [{"hub_model_id": "group/better"}, {"hub_private_repo": True}])
def test_options_of_an_upload_that_is_off_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is set, but push_to_hub is not"):
        parse_run_config(PLAIN | option)
