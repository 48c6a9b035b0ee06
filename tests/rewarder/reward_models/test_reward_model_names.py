"""Which names are reward models, and where each model is. No torch."""

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.rewarder.reward_models.model_name import ModelPlace, is_reward_model, model_place
from services.rewarder.reward_models.model_settings import ModelSettings
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.user_code.worker_frames import Refused
from tests.rewarder.reward_models.conftest import serving

pytestmark = pytest.mark.unit

ANYWHERE = FileRoots(("/",), "HEADRACE_DATA_ROOTS")


@dataclass(frozen=True)
class RefusingRoots(FileRoots):
    """Refuses every directory after looking through it, and records the threads and the looks that overlap."""

    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    only_one: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    met: list[str] = field(default_factory=list[str])

    def require(self, path: str, *, field: str, whole: bool = False) -> None:
        """See FileRoots."""
        if not whole:
            super().require(path, field=field)
            return
        if not self.only_one.acquire(blocking=False):
            self.met.append(path)
        self.threads.append(threading.current_thread())
        threading.Event().wait(0.05)
        self.only_one.release()
        raise UserError(f"{path} has too many files")


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


async def test_directories_are_looked_through_one_at_a_time_and_not_on_the_event_loop(tmp_path: Path) -> None:
    roots = RefusingRoots((str(tmp_path),), "HEADRACE_DATA_ROOTS")
    async with serving(ModelSettings(roots=roots)) as models:
        found = await asyncio.gather(*(models.inspect(str(tmp_path)) for _ in range(4)))
    assert found == [Refused(f"{tmp_path} has too many files")] * 4
    assert len(roots.threads) == 4
    assert threading.current_thread() not in roots.threads
    assert not roots.met


def test_a_directory_that_is_allowed_is_looked_through_once(tmp_path: Path) -> None:
    looked: list[bool] = []

    class Counting(FileRoots):
        def require(self, path: str, *, field: str, whole: bool = False) -> None:
            looked.append(whole)
            super().require(path, field=field, whole=whole)

    assert model_place(str(tmp_path), Counting((str(tmp_path),), "HEADRACE_DATA_ROOTS")) == ModelPlace(str(tmp_path))
    assert looked == [False, True]
