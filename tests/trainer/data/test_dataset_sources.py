"""Parquet files and the hub. JSON Lines are tested in test_dataset.py, which needs neither pyarrow nor datasets."""

import datetime
import decimal
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import packaged_modules
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.errors import HfHubHTTPError

from services.trainer.data.dataset import open_dataset, open_eval_dataset, open_prompts
from services.trainer.submit_checks.dataset_check import check_dataset
from shared.errors import UnavailableError, UserError
from shared.files.file_roots import FileRoots
from shared.run_options.run_config import RunConfig
from shared.run_options.run_places import misplaced


def config(name: str, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "dataset_name": name, "reward_funcs": ["accuracy_reward"], "shuffle_dataset": False} | settings
    )


def parquet(path: Path, rows: list[dict[str, Any]]) -> RunConfig:
    pq.write_table(cast(Any, pa.Table).from_pylist(rows), path)
    return config(str(path))


class HubBuilder:
    """Plays ``load_dataset_builder`` for a data set on the hub; ``load_dataset`` returns its rows."""

    def __init__(self, path: str, name: str | None, load_dataset: Callable[..., Any], files: list[str]) -> None:
        self.config = SimpleNamespace(data_files={"train": files})
        self._load = partial(load_dataset, path, name)

    def download_and_prepare(self) -> None:
        pass

    def as_dataset(self, *, split: str) -> Any:
        return self._load(split=split)


HubBuilder.__module__ = "datasets.packaged_modules.json.json"


def answer_as_the_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any], *files: str) -> None:
    named = list(files) or ["hf://datasets/owner/name@0123/train.jsonl"]

    def load_dataset_builder(path: str, name: str | None) -> HubBuilder:
        return HubBuilder(path, name, load_dataset, named)

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)


def test_a_parquet_row_keeps_its_types_and_times_become_text(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "answer": 4,
        "share": 0.5,
        "ok": True,
        "note": None,
        "tags": ["a", "b"],
        "more": {"k": [1, 2]},
        "day": datetime.date(2024, 2, 29),
        "at": datetime.datetime(2024, 2, 29, 12, 0, tzinfo=datetime.UTC),
        "price": decimal.Decimal("1.50"),
    }
    row = open_dataset(parquet(tmp_path / "train.parquet", [{"prompt": "2+2"} | values])).row_at(0)
    assert row.problem is None
    assert row.prompt == "2+2"
    assert row.columns == values | {"day": "2024-02-29", "at": "2024-02-29T12:00:00+00:00", "price": "1.50"}


def test_conversations_in_parquet_lose_the_nulls_that_the_columns_added(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "a", "name": "n"}, {"role": "user", "content": "b"}]
    row = open_dataset(parquet(tmp_path / "train.parquet", [{"prompt": messages}])).row_at(0)
    assert row.prompt == messages


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    (found,) = check_dataset(parquet(tmp_path / "train.parquet", [{"prompt": "a"}, {"prompt": None}])).sources
    assert (found.num_rows, found.num_bad) == (2, 1)
    assert (
        found.first_bad
        == f"{tmp_path / 'train.parquet'} row 1 has null as 'prompt', which must be text or a list of messages"
    )


def with_a_day_of_the_far_future() -> Any:
    """Return a table whose second row has a date that Python does not have."""
    tables: Any = pa
    return tables.table({"prompt": ["a", "b"], "day": tables.array([0, 10**8], tables.date32())})


def test_a_value_that_python_does_not_have_makes_its_row_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(with_a_day_of_the_far_future(), file)

    def load_dataset(*_args: object, **_kwargs: object) -> Any:
        return datasets.Dataset(with_a_day_of_the_far_future())

    answer_as_the_hub(monkeypatch, load_dataset)
    for name, where in ((str(file), f"{file} row 1"), ("owner/name", "owner/name split train row 1")):
        dataset = open_dataset(config(name))
        assert (dataset.row_at(0).problem, dataset.row_at(0).prompt) == (None, "a")
        assert dataset.row_at(1).problem == f"{where} has a value that cannot be read: date value out of range"


def test_a_value_that_python_does_not_have_makes_a_streamed_row_bad(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(with_a_day_of_the_far_future(), file)
    dataset = open_prompts(config(str(file), dataset_streaming=True, max_steps=1))
    assert (dataset.row_at(0).problem, dataset.row_at(0).prompt) == (None, "a")
    assert dataset.row_at(1).problem == f"{file} row 1 has a value that cannot be read: date value out of range"


def test_a_column_of_bytes_is_refused_with_what_to_do(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "image": b"\x00", "answer": 4}]
    (found,) = check_dataset(parquet(tmp_path / "train.parquet", rows)).sources
    assert "'image', which cannot be sent to a reward function; leave that column out" in found.first_bad
    left_out = parquet(tmp_path / "train.parquet", rows).model_copy(update={"columns": ["answer"]})
    assert open_dataset(left_out).row_at(0).columns == {"answer": 4}


@pytest.mark.parametrize("content", [b"not parquet at all", b"PAR1" + b"\x00" * 20 + b"PAR1", b""])
def test_a_file_that_is_not_parquet_is_explained(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        open_dataset(config(str(path)))


def test_a_split_of_a_dataset_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])

    answer_as_the_hub(monkeypatch, load_dataset)
    dataset = open_dataset(config("owner/name", dataset_config="main", dataset_train_split="test"))
    assert asked == [("owner/name", "main", "test")]
    assert (dataset.row_at(3).prompt, dataset.row_at(3).columns) == ("b", {"answer": 2})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DatasetNotFoundError("no"), "neither a file nor a dataset on the Hugging Face Hub"),
        (DatasetNotFoundError("Dataset 'owner/name' is a gated dataset on the Hub."), "accept its terms on the hub"),
        (RuntimeError("Dataset scripts are no longer supported"), "could not be loaded: Dataset scripts are no longer"),
        (KeyError(), "could not be loaded: KeyError"),
        (ValueError("Unknown split 'tain'. Should be one of ['train']."), "Unknown split 'tain'"),
        (ConnectionError("no route"), "could not be loaded: no route"),
        (DatasetGenerationError("torn"), "could not be loaded: torn"),
    ],
)
def test_whatever_the_hub_says_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def load_dataset(*args: object, **kwargs: object) -> Any:
        raise error

    answer_as_the_hub(monkeypatch, load_dataset)
    with pytest.raises(UserError, match="owner/name") as caught:
        open_dataset(config("owner/name"))
    assert said in str(caught.value)
    assert caught.value.field == "dataset_name"


def test_a_connection_that_breaks_off_is_tried_again_and_a_refused_token_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client: Any = importlib.import_module(HfHubHTTPError.__mro__[1].__module__)
    refused = client.Response(401, request=client.Request("GET", "https://hub"))
    errors = iter([client.ReadError("cut off"), HfHubHTTPError("Invalid credentials", response=refused)])

    def load_dataset(*args: object, **kwargs: object) -> Any:
        raise next(errors)

    answer_as_the_hub(monkeypatch, load_dataset)
    with pytest.raises(UnavailableError, match=r"broke off \(ReadError\)"):
        open_dataset(config("owner/name"))
    with pytest.raises(UserError, match="could not be loaded: Invalid credentials"):
        open_dataset(config("owner/name"))


def test_the_error_of_a_torn_file_in_a_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    with pytest.raises(UserError, match=r"could not be loaded: An error occurred .*: .*JSON"):
        open_dataset(config(str(tmp_path / "data")))


def test_a_name_without_a_slash_may_be_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset_builder(*args: object) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    with pytest.raises(UserError, match=r"^the trainer has no file or directory gsm.txt, and .* no route$"):
        open_dataset(config("gsm.txt"))


def test_of_a_data_set_of_the_hub_only_the_first_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_args: object, **_kwargs: object) -> Any:
        return datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}])

    answer_as_the_hub(monkeypatch, load_dataset)
    (found,) = check_dataset(config("owner/name"), max_hub_rows=2).sources
    assert (found.is_file, found.num_rows, found.num_checked, found.num_bad) == (False, 3, 2, 0)


def test_a_data_set_of_the_hub_and_a_file_are_mixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"problem": "h0", "solution": "1"}, {"problem": "h1", "solution": "2"}])

    answer_as_the_hub(monkeypatch, load_dataset)
    pq.write_table(cast(Any, pa.Table).from_pylist([{"prompt": "f0", "level": 3}]), tmp_path / "f.parquet")
    mixed = RunConfig.model_validate(
        {
            "model": "m",
            "reward_funcs": ["accuracy_reward"],
            "shuffle_dataset": False,
            "rename_columns": {"problem": "prompt"},
            "datasets": [
                {"path": "owner/name", "name": "main", "split": "all"},
                {"path": str(tmp_path / "f.parquet")},
            ],
        }
    )
    dataset = open_dataset(mixed)
    assert asked == [("owner/name", "main", "all")]
    rows = sorted(
        (str(row.prompt), row.columns["solution"], row.columns["level"]) for row in map(dataset.row_at, range(3))
    )
    assert rows == [("f0", None, 3), ("h0", "1", None), ("h1", "2", None)]


def test_a_split_to_evaluate_on_is_read_from_the_data_set_that_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        return datasets.Dataset.from_list([{"prompt": f"{path} {name} {split}"}])

    answer_as_the_hub(monkeypatch, load_dataset)
    dataset = open_eval_dataset(config("owner/name", dataset_config="main", dataset_test_split="test", eval_steps=5))
    assert dataset is not None
    assert dataset.row_at(0).prompt == "owner/name main test"


def test_a_directory_that_datasets_understands_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    dataset = open_dataset(config(str(tmp_path)))
    assert [dataset.row_at(n).prompt for n in range(2)] == ["a", "b"]


@pytest.mark.parametrize("form", ["parquet", "streamed parquet", "saved to disk"])
def test_values_of_several_types_are_read_as_datasets_reads_them(tmp_path: Path, form: str) -> None:
    rows = datasets.Dataset.from_list(
        [
            {"prompt": "a", "solution": 4, "tests": [{"in": 1}, {"in": 1, "out": 2}], "info": {"of": None}},
            {"prompt": "b", "solution": "Paris", "tests": [], "info": {"of": "x"}},
            {"prompt": "c", "solution": None, "tests": None, "info": None},
        ],
        on_mixed_types="use_json",
    )
    path, streaming = tmp_path / "train.parquet", dict[str, Any]()
    if form == "saved to disk":
        path = tmp_path / "saved"
        rows.save_to_disk(str(path))
    else:
        rows.to_parquet(str(path))
    if form == "streamed parquet":
        streaming = {"dataset_streaming": True, "max_steps": 1}
    read = open_prompts(config(str(path), **streaming))
    for number, row in enumerate(cast("list[dict[str, Any]]", list(rows))):
        assert read.row_at(number).columns == {name: value for name, value in row.items() if name != "prompt"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_media_in_columns_that_are_left_out_are_not_decoded(tmp_path: Path, is_streamed: bool) -> None:
    """Decoding a sound would need a library that is not installed, and decoding a broken image fails."""
    broken = {"bytes": b"not a file", "path": None}
    features: Any = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "solution": datasets.Json(),
            "image": datasets.Image(),
            "pages": datasets.List(datasets.Image()),
            "sound": datasets.Audio(),
        }
    )
    encoded = {"solution": ['{"x": 1}'], "image": [broken], "pages": [[broken]], "sound": [broken]}
    table = cast(Any, pa.Table).from_pydict({"prompt": ["a"]} | encoded, schema=features.arrow_schema)
    pq.write_table(table, tmp_path / "train.parquet")
    streaming: dict[str, Any] = {"dataset_streaming": True, "max_steps": 1} if is_streamed else {}
    row = open_prompts(config(str(tmp_path), columns=["solution"], **streaming)).row_at(0)
    assert (row.prompt, row.columns) == ("a", {"solution": {"x": 1}})
    problem = open_prompts(config(str(tmp_path), **streaming)).row_at(0).problem
    assert problem is not None
    assert "has a value of type bytes in 'image.bytes', " in problem


@pytest.mark.parametrize(
    "file",
    [
        "{other}/secret.jsonl", "file://{other}/secret.jsonl", "../other/secret.jsonl", "{other}/*.jsonl",
        "/proc/self/root{other}/secret.jsonl", "sub/../../other/secret.jsonl",
    ],
)  # fmt: skip
def test_the_readme_of_a_directory_cannot_have_files_read_that_are_not_in_it(tmp_path: Path, file: str) -> None:
    for name in ("data/sub", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other" / "secret.jsonl").write_text('{"prompt": "canary"}\n')
    named = file.replace("{other}", str(tmp_path / "other"))
    readme = f'---\nconfigs:\n- config_name: default\n  data_files: "{named}"\n---\n'
    (tmp_path / "data" / "README.md").write_text(readme)
    with pytest.raises(UserError) as caught:
        open_dataset(config(str(tmp_path / "data")))
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        "/etc/hosts.jsonl", "file:///etc/hosts.jsonl", "http://169.254.169.254/latest/user-data", "s3://bucket/x.jsonl",
        "zip://x.jsonl::/etc/x.zip", "simplecache::file:///etc/x.jsonl", "hf://datasets/owner/name@0/../../x.jsonl",
        "local:///etc/x.jsonl", "memory://x.jsonl", "hf://buckets/owner/name/x.jsonl",
        "hf://datasets/owner/private@0/x.jsonl", "hf://datasets/owner/name2@0/x.jsonl", "hf://datasets/owner/x.jsonl",
    ],
)  # fmt: skip
def test_the_readme_of_a_data_set_of_the_hub_cannot_name_files_of_the_machine_or_addresses(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def load_dataset(*_args: object, **_kwargs: object) -> Any:
        raise AssertionError("it was read")

    answer_as_the_hub(monkeypatch, load_dataset, "hf://datasets/owner/name@0123/train.jsonl", file)
    with pytest.raises(UserError, match="refers to files outside the dataset"):
        open_dataset(config("owner/name"))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Owner/Name", "hf://datasets/owner/name@0123/train.jsonl"),
        ("owner/name", "hf://datasets/owner/name@refs%2Fconvert%2Fparquet/default/train/0000.parquet"),
        ("owner/name", "zip://train.jsonl::hf://datasets/owner/name@0123/all.zip"),
        ("name", "hf://datasets/owner/name@0123/train.jsonl"),
    ],
)
def test_files_of_a_data_set_of_the_hub_are_its_own_in_any_revision_and_spelling(
    monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    def load_dataset(*_args: object, **_kwargs: object) -> Any:
        return datasets.Dataset.from_list([{"prompt": "a"}])

    answer_as_the_hub(monkeypatch, load_dataset, file)
    assert open_dataset(config(name)).row_at(0).prompt == "a"


def test_formats_that_can_name_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows.h5").write_bytes(b"\x89HDF")
    with pytest.raises(UserError, match="of the format hdf5, which is not supported"):
        open_dataset(config(str(tmp_path)))


def test_no_format_of_the_library_is_taken_for_a_data_set() -> None:
    formats: list[str] = list(cast(Any, packaged_modules)._PACKAGED_DATASETS_MODULES)
    roots = FileRoots((), "HEADRACE_DATA_ROOTS")
    accepted = [name for name in formats if not misplaced(config(name), data=roots, weights=roots)]
    assert accepted == []


def test_a_file_that_is_swapped_after_the_look_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.jsonl").write_text('{"prompt": "canary"}\n')
    rows = tmp_path / "data" / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    look = FileRoots.require

    def look_and_swap(self: FileRoots, path: str, **more: Any) -> None:
        look(self, path, **more)
        rows.unlink()
        rows.symlink_to(tmp_path / "secret.jsonl")

    monkeypatch.setattr(FileRoots, "require", look_and_swap)
    with pytest.raises(UserError, match="leads through a link out"):
        open_dataset(config(str(rows)), FileRoots((str(tmp_path / "data"),), "HEADRACE_DATA_ROOTS"))


def prompts(run: RunConfig) -> list[Any]:
    dataset = open_dataset(run)
    return [dataset.row_at(number).prompt for number in range(len(dataset))]


def test_directories_of_save_to_disk_are_data_sets(tmp_path: Path) -> None:
    of_rows: Any = cast(Any, datasets.Dataset).from_list
    train, test = of_rows([{"prompt": "a"}, {"prompt": "b"}]), of_rows([{"prompt": "c"}])
    train.save_to_disk(tmp_path / "one", num_shards=2)
    assert prompts(config(str(tmp_path / "one"))) == ["a", "b"]
    cast(Any, datasets.DatasetDict)({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    assert prompts(config(str(tmp_path / "both"))) == ["a", "b"]
    run = config(str(tmp_path / "both"), dataset_test_split="test", eval_steps=5)
    found = open_eval_dataset(run)
    assert found is not None
    assert found.row_at(0).prompt == "c"
    for name, sentence in (("one", "without splits"), ("both", "has no split dev; it has train, test")):
        with pytest.raises(UserError, match=sentence):
            open_dataset(config(str(tmp_path / name), dataset_train_split="dev"))


@pytest.mark.parametrize(
    ("train", "settings"),
    [
        ("one", {"eval_dataset_name": "one"}),
        ("one", {"dataset_test_split": "test"}),
        ("one", {"eval_dataset_name": "link"}),
        ("rows.jsonl", {"eval_dataset_name": "link.jsonl"}),
    ],
)
def test_training_rows_are_not_evaluated_under_another_name(
    tmp_path: Path, train: str, settings: dict[str, str]
) -> None:
    """A directory without splits has the same rows in each of them."""
    cast(Any, datasets.Dataset).from_list([{"prompt": "a"}]).save_to_disk(tmp_path / "one")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for name, link in (("one", "link"), ("rows.jsonl", "link.jsonl")):
        (tmp_path / link).symlink_to(tmp_path / name)
    named = {name: str(tmp_path / value) if name == "eval_dataset_name" else value for name, value in settings.items()}
    with pytest.raises(UserError, match=r"names training data \(.*\); an evaluation on it") as refused:
        check_dataset(config(str(tmp_path / train), eval_steps=5, **named))
    assert refused.value.field == next(iter(settings))


def test_offsets_that_lead_out_of_a_saved_data_set_are_refused(tmp_path: Path) -> None:
    cast(Any, datasets.Dataset).from_list([{"prompt": "sixteen letters!"}]).save_to_disk(tmp_path / "data")
    (arrow,) = (tmp_path / "data").glob("*.arrow")
    whole = arrow.read_bytes()
    text_at = whole.index(b"sixteen letters!")
    end_at = whole.rindex((16).to_bytes(4, "little"), 0, text_at)  # where the text ends, in the buffer of offsets
    arrow.write_bytes(whole[:end_at] + (4000).to_bytes(4, "little") + whole[end_at + 4 :])
    with pytest.raises(UserError, match="cannot be read as a data set of save_to_disk"):
        open_dataset(config(str(tmp_path / "data")))


def test_a_saved_data_set_cannot_name_files_outside_it(tmp_path: Path) -> None:
    cast(Any, datasets.Dataset).from_list([{"prompt": "canary"}]).save_to_disk(tmp_path / "secret")
    (arrow,) = (tmp_path / "secret").glob("*.arrow")
    saved = tmp_path / "data"
    saved.mkdir()
    (saved / "state.json").write_text(f'{{"_data_files": [{{"filename": "../secret/{arrow.name}"}}]}}')
    with pytest.raises(UserError, match="names a file in another directory"):
        open_dataset(config(str(saved)))
    (saved / "state.json").write_text(f'{{"_data_files": [{{"filename": "{arrow.name}"}}]}}')
    (saved / arrow.name).symlink_to(arrow)
    with pytest.raises(UserError, match="leads through a link out"):
        open_dataset(config(str(saved)), FileRoots((str(saved),), "HEADRACE_DATA_ROOTS"))
