"""Run files: valid ones, and common mistakes."""

import json
from pathlib import Path

import pytest

from headrace.run_file import as_run_file, parse_settings, read_run_file, read_trl_file
from shared.errors import UserError
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

MINIMAL = "model: org/model\ndataset_name: org/data\nreward_funcs: [accuracy_reward]\n"


def written(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_yaml_file_and_a_json_file_say_the_same(tmp_path: Path) -> None:
    from_yaml = read_run_file(written(tmp_path, "model: m\nmax_steps: 5\nreward_funcs:\n  - a\n  - b\n"))
    from_json = read_run_file(
        written(tmp_path, '{"model": "m", "max_steps": 5, "reward_funcs": ["a", "b"]}', name="run.json")
    )
    assert from_yaml == from_json == {"model": "m", "max_steps": 5, "reward_funcs": ["a", "b"]}


def test_a_date_is_text(tmp_path: Path) -> None:
    assert read_run_file(written(tmp_path, "name: 2026-11-20\n")) == {"name": "2026-11-20"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("3E-4", 3e-4), ("0.5", 0.5), ("-2.5e+3", -2500.0), (".5", 0.5), ("1_000", 1000)],
)
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path: Path, text: str, value: float) -> None:
    assert read_run_file(written(tmp_path, f"learning_rate: {text}\n")) == {"learning_rate": value}


@pytest.mark.parametrize("text", ["e5", "1.2.3", "run-1e5x", "none", "1e"])
def test_text_that_only_looks_like_a_number_stays_text(tmp_path: Path, text: str) -> None:
    assert read_run_file(written(tmp_path, f"name: {text}\n")) == {"name": text}


def test_the_content_of_a_yaml_file_is_accepted_as_a_run_config(tmp_path: Path) -> None:
    config = parse_run_config(read_run_file(written(tmp_path, MINIMAL + "learning_rate: 1e-6\nscale_rewards: none\n")))
    assert config.learning_rate == 1e-6
    assert config.scale_rewards == "none"


def test_paths_are_meant_from_the_file_and_not_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "train.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    path = written(tmp_path / "runs", "model: ../model\ndataset_name: train.jsonl\n")
    monkeypatch.chdir("/")
    assert read_run_file(path) == {
        "model": str(tmp_path / "model"),
        "dataset_name": str(tmp_path / "runs" / "train.jsonl"),
    }


def test_a_file_that_is_missing_is_named_in_full_so_that_the_refusal_says_where_it_was_looked_for(
    tmp_path: Path,
) -> None:
    config = read_run_file(written(tmp_path, "model: ./model\ndataset_name: train.jsonl\n"))
    assert config == {"model": str(tmp_path / "model"), "dataset_name": str(tmp_path / "train.jsonl")}


def test_the_files_of_a_mixture_and_of_an_evaluation_are_meant_from_the_run_file_too(tmp_path: Path) -> None:
    text = (
        "datasets:\n- {path: a.jsonl, fraction: 0.5}\n- {path: org/data, fraction: 0.5}\neval_dataset_name: b.parquet\n"
    )
    assert read_run_file(written(tmp_path, text)) == {
        "datasets": [{"path": str(tmp_path / "a.jsonl"), "fraction": 0.5}, {"path": "org/data", "fraction": 0.5}],
        "eval_dataset_name": str(tmp_path / "b.parquet"),
    }


@pytest.mark.parametrize(
    "text",
    ["model: ~no-such-user/m\n", "resume_from_checkpoint: ~no-such-user/m\n", "reward_funcs: [~no-such-user/m]\n"],
)
def test_the_home_of_a_user_that_does_not_exist_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="'~no-such-user/m' cannot be found: ~no-such-user is not the home of a user"):
        read_run_file(written(tmp_path, text))


def test_a_name_that_is_too_long_for_a_file_is_left_to_the_run_api(tmp_path: Path) -> None:
    settings = {"model": "m" * 300, "reward_funcs": [f"org/{'r' * 300}"]}
    assert read_run_file(written(tmp_path, json.dumps(settings), name="run.json")) == settings
    trl = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": "accuracy_reward", "config_file": "c" * 300}
    assert read_trl_file(written(tmp_path, json.dumps(trl), name="trl.json"))[0]["model"] == "m"


@pytest.mark.parametrize("text", ["datasets: train.jsonl\n", "datasets: [train.jsonl]\n", "datasets: [{path: 7}]\n"])
def test_an_invalid_mixture_is_left_for_the_run_api_to_refuse(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="datasets"):
        parse_run_config(read_run_file(written(tmp_path, text)) | {"model": "m", "reward_funcs": ["accuracy_reward"]})


def test_the_directory_of_a_reward_model_is_relative_to_the_run_file_and_other_rewards_are_unchanged(
    tmp_path: Path,
) -> None:
    (tmp_path / "models" / "rm").mkdir(parents=True)
    (tmp_path / "accuracy_reward").mkdir()
    text = "reward_funcs: [accuracy_reward, mine:length, models/rm, org/name@v1, 7]\n"
    assert read_run_file(written(tmp_path, text)) == {
        "reward_funcs": ["accuracy_reward", "mine:length", str(tmp_path / "models" / "rm"), "org/name@v1", 7]
    }


def test_a_single_reward_model_is_relative_to_the_run_file_too(tmp_path: Path) -> None:
    (tmp_path / "models" / "rm").mkdir(parents=True)
    found = read_run_file(written(tmp_path, "reward_funcs: models/rm\n"))
    assert found == {"reward_funcs": str(tmp_path / "models" / "rm")}


def test_a_link_keeps_its_name_which_says_its_format(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "3fa9").write_text("{}")
    (tmp_path / "train.jsonl").symlink_to(tmp_path / "blobs" / "3fa9")
    (tmp_path / "model").symlink_to(tmp_path / "blobs")
    found = read_run_file(written(tmp_path, "dataset_name: train.jsonl\nmodel: ./model\n"))
    assert found == {"dataset_name": str(tmp_path / "train.jsonl"), "model": str(tmp_path / "blobs")}


@pytest.mark.parametrize(("name", "text"), [("run.json", '{"model": "a"}'), ("run.yaml", "model: a\n")])
def test_a_byte_order_mark_is_no_part_of_a_run_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_run_file(tmp_path / name) == {"model": "a"}


def test_a_hub_id_is_unchanged(tmp_path: Path) -> None:
    assert read_run_file(written(tmp_path, MINIMAL))["model"] == "org/model"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("run.yaml", "model: a\nmodel: b\n", "model is set twice"),
        ("run.json", '{"model": "a", "model": "b"}', "model is set twice"),
        ("run.yaml", "model: [a\n", "line 2: not YAML"),
        ("run.json", '{"model": }', "line 1: not JSON"),
        ("run.yaml", "- model\n", "must be a table of settings"),
        ("run.json", "[]", "must be a table of settings"),
        ("run.yaml", "", "must be a table of settings"),
        ("run.yaml", "model: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("run.json", "[" * 100_000, "nested too deeply"),
        ("run.yaml", "model: a\nlearning_rate: .nan\n", "learning_rate is nan, which JSON does not have"),
        ("gsm.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n', "looks like a data file, not a run file"),
        ("run.yaml", "model: a\nname: !!binary aGk=\n", "write text in quotes"),
    ],
)
def test_a_file_that_is_not_a_run_file_is_refused_with_a_sentence(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as refusal:
        read_run_file(written(tmp_path, text, name))
    assert name in str(refusal.value)


def test_a_file_that_is_not_there_or_not_text_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory; name the run file in it"):
        read_run_file(tmp_path)
    with pytest.raises(UserError, match="there is no file"):
        read_run_file(tmp_path / "nothing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_run_file(tmp_path / "latin.yaml")


def test_settings_on_the_command_line_are_read_as_in_a_yaml_file() -> None:
    texts = ["learning_rate=1e-4", "loss_type=cispo", "max_staleness=0", "report_to=[tensorboard]", "delta=null"]
    assert parse_settings(texts) == {
        "learning_rate": 1e-4,
        "loss_type": "cispo",
        "max_staleness": 0,
        "report_to": ["tensorboard"],
        "delta": None,
    }


@pytest.mark.parametrize("text", ["learning_rate", "=3", "", "a=[1", "a=.inf", "a=[.nan]", "a=!!binary aGk="])
def test_an_assignment_that_cannot_be_a_setting_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match=r"write NAME=VALUE|not YAML|--set: a is .*, which JSON does not have"):
        parse_settings([text])


OF_TRL = """
model_name_or_path: org/model
dataset_name: data/train.jsonl
reward_funcs: [accuracy_reward]
learning_rate: 1e-5
gradient_accumulation_steps: 8
eval_strategy: no
"""


def test_a_configuration_of_trl_is_a_run_with_paths_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    config, notes = read_trl_file(written(tmp_path / "configs", OF_TRL))
    assert config["dataset_name"] == str(tmp_path / "data" / "train.jsonl")
    assert (config["model"], config["groups_per_step"], config["learning_rate"]) == ("org/model", 8, 1e-5)
    assert any(note.startswith("groups_per_step: 8, as 8 a process x 8 accumulated x 1 process") for note in notes)


@pytest.mark.parametrize(
    ("launcher", "groups"),
    [("distributed_type: MULTI_GPU\nnum_processes: 4\n", 32), ("distributed_type: NO\nnum_processes: 4\n", 8)],
)
def test_the_number_of_processes_comes_from_accelerates_configuration(
    tmp_path: Path, launcher: str, groups: int
) -> None:
    accelerate = written(tmp_path, launcher, "accelerate.yaml")
    config, _ = read_trl_file(written(tmp_path, OF_TRL + f"accelerate_config: {accelerate}\n"))
    assert config["groups_per_step"] == groups


def test_a_printed_run_file_is_read_as_the_same_run(tmp_path: Path) -> None:
    config, notes = read_trl_file(written(tmp_path, OF_TRL))
    text = as_run_file(config, notes)
    assert text.startswith("# ")
    assert read_run_file(written(tmp_path, text, "printed.yaml")) == config


def test_text_that_looks_like_a_number_is_printed_as_text(tmp_path: Path) -> None:
    settings = {"tags": ["1e-5", "10.5e3", "2e4"], "metadata": {"lr": "1e-5"}, "name": "3e4", "learning_rate": 1e-5}
    assert read_run_file(written(tmp_path, as_run_file(settings))) == settings


def test_the_example_in_the_documentation_is_what_is_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from-trl.md").read_text(encoding="utf-8")
    example = page.partition("$ cat config.yaml\n")[2].partition("```")[0]
    options, _, printed = example.partition("$ headrace submit --trl config.yaml --print\n")
    assert as_run_file(*read_trl_file(written(tmp_path, options))) == printed
