"""Which names are reward models, and where each model is. No torch."""

from pathlib import Path

import pytest

from services.rewarder.reward_models.model_name import ModelPlace, is_reward_model, model_place
from shared.errors import UserError
from shared.files.file_roots import FileRoots

pytestmark = pytest.mark.unit

ANYWHERE = FileRoots(("/",), "HEADRACE_DATA_ROOTS")


@pytest.mark.parametrize("name", ["org/name", "org/name@main", "/a/directory", "./here", "org/name.with-dots_1"])
def test_a_name_with_a_slash_is_a_reward_model(name: str) -> None:
    assert is_reward_model(name)


@pytest.mark.parametrize("name", ["accuracy_reward", "my_rewards:judge", "package.module:function", "judge", ""])
def test_functions_and_endpoints_are_none(name: str) -> None:
    assert not is_reward_model(name)


def test_a_directory_does_not_take_the_name_of_a_function_or_an_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    assert not is_reward_model("judge")
    assert is_reward_model("./judge")
    assert model_place("./judge", ANYWHERE) == ModelPlace(str(tmp_path / "judge"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("org/name", ModelPlace("org/name")),
        ("org/name@v1.0", ModelPlace("org/name", "v1.0")),
        ("org/name@refs/pr/3", ModelPlace("org/name", "refs/pr/3")),
    ],
)
def test_an_id_may_have_a_revision(name: str, place: ModelPlace) -> None:
    assert model_place(name, ANYWHERE) == place
    assert not place.is_directory


@pytest.mark.parametrize(
    "name", ["a/b/c", "org/..", "org/name@", "org/name@a b", "org/ name", "o/\ud800", "o/\0", "o/" + "n" * 400]
)
def test_an_impossible_name_is_refused_with_the_form_of_a_name(name: str) -> None:
    assert is_reward_model(name)
    with pytest.raises(UserError, match=r"is neither a directory nor a Hugging Face id \('org/name'") as caught:
        model_place(name, ANYWHERE)
    assert len(str(caught.value).encode()) < 600
