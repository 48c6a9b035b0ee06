"""Submitting a run: errors that show in its prompts and columns are reported before anything starts."""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from services.trainer.problems import Problem
from services.trainer.run_api.trainer_api import make_api
from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.run_validation import RunValidator
from shared.errors import UnavailableError, UserError
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.closed_directory import close_directory
from tests.eventually import eventually
from tests.trainer.api_rig import DatasetFile, serving
from tests.trainer.submit_checks.test_submit import refusal

Run = dict[str, Any]


@pytest.fixture
def word_model(model_dir: Path) -> Path:
    """Return a model whose tokenizer makes one token of every word and sign, and knows those of these tests."""
    words = ("<unk>", *map(str, range(10)), "+", "=", "one", "two", "three", "and", "Add", "them", "up")
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    return model_dir


@pytest.fixture
def held_out(dataset: DatasetFile) -> DatasetFile:
    """Return a file for evaluation."""
    return DatasetFile(dataset.path.with_name("held_out.jsonl"))


async def accepted(client: httpx.AsyncClient, run: Run) -> list[str]:
    reply = await client.post("/v1/runs", params={"dry_run": "1"}, json=run)
    assert reply.status_code == 200, reply.text
    warnings: list[str] = reply.json()["warnings"]
    return warnings


@pytest.mark.usefixtures("word_model")
async def test_a_limit_that_no_prompt_keeps_is_refused(client: httpx.AsyncClient, run: Run) -> None:
    assert await accepted(client, run | {"max_prompt_length": 4}) == []  # "7", "+", "1", "="
    errors = await refusal(client, run | {"max_prompt_length": 3})
    assert list(errors) == ["max_prompt_length"]
    assert "the shortest has at least 4 tokens" in errors["max_prompt_length"]


@pytest.mark.usefixtures("word_model")
async def test_a_limit_that_one_prompt_of_many_keeps_is_accepted(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    dataset.write(
        '{"prompt": "one and two and three", "solution": "6"}\n' * 1500 + '{"prompt": "4", "solution": "4"}\n'
    )
    assert await accepted(client, run | {"max_prompt_length": 1}) == []


@pytest.mark.usefixtures("word_model")
async def test_of_a_conversation_the_words_of_its_messages_count(
    client: httpx.AsyncClient, run: Run, word_model: Path
) -> None:
    (word_model / "chat_template.jinja").write_text("{{ messages }}")
    instructed = run | {"system_prompt": "Add them up"}
    assert await accepted(client, instructed | {"max_prompt_length": 7}) == []
    errors = await refusal(client, instructed | {"max_prompt_length": 6})
    assert "at least 7 tokens" in errors["max_prompt_length"]


@pytest.mark.usefixtures("word_model")
async def test_an_evaluation_set_without_a_prompt_that_fits_is_refused(
    client: httpx.AsyncClient, run: Run, held_out: DatasetFile
) -> None:
    held_out.write('{"prompt": "one and two and three", "solution": "6"}\n' * 3)
    evaluated = run | {"eval_dataset_name": str(held_out.path), "eval_steps": 1}
    errors = await refusal(client, evaluated | {"max_prompt_length": 4})
    assert f"every prompt of {held_out.path} is longer" in errors["max_prompt_length"]
    assert await accepted(client, evaluated | {"max_prompt_length": 5}) == []


@pytest.mark.usefixtures("word_model")
async def test_of_an_evaluation_set_only_the_prompts_that_are_asked_count(
    client: httpx.AsyncClient, run: Run, held_out: DatasetFile
) -> None:
    held_out.write('{"prompt": "one and two and three", "solution": "6"}\n' * 3 + held_out.good_rows)
    evaluated = run | {"eval_dataset_name": str(held_out.path), "eval_steps": 1, "max_prompt_length": 4}
    assert await accepted(client, evaluated | {"max_eval_prompts": 4}) == []
    assert "max_prompt_length" in await refusal(client, evaluated | {"max_eval_prompts": 3})


@pytest.mark.usefixtures("word_model")
async def test_prompts_that_fill_the_model_are_refused_or_counted(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    long, short = [f'{{"prompt": "{"one " * count}", "solution": "6"}}\n' for count in (512, 511)]
    dataset.write(long * 10)
    errors = await refusal(client, run)
    assert list(errors) == ["dataset_name"]
    assert "is too long for the 512 positions of the model: the shortest has at least 512" in errors["dataset_name"]
    errors = await refusal(client, run | {"max_prompt_length": 495, "vllm": {"max_model_len": 400}})
    assert "the 400 positions of vllm.max_model_len" in errors["dataset_name"]
    dataset.write(short + long * 9)
    (warning,) = await accepted(client, run)
    assert warning == (
        f"9 of 10 prompts of {dataset.path} have more than 511 tokens and are dropped: the 512 positions of the model "
        "leave no room for a completion"
    )
    dataset.write(short * 10)
    assert await accepted(client, run) == []


@pytest.mark.usefixtures("word_model")
async def test_prompts_of_which_the_tokenizer_knows_little_are_a_warning(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    dataset.write('{"prompt": "one plus two", "solution": "3"}\n' * 10)  # 6 of 10 characters
    assert await accepted(client, run) == []
    dataset.write('{"prompt": "one minus two", "solution": "-1"}\n' * 10 + '{"prompt": "why?", "solution": "3"}\n' * 10)
    (warning,) = await accepted(client, run)
    assert warning.startswith(
        f"the model's tokenizer knows only 40% of the characters in the prompts of {dataset.path}: the model sees"
    )


@pytest.mark.usefixtures("word_model")
async def test_of_a_run_that_only_evaluates_the_vocabulary_of_its_evaluation_counts(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile, held_out: DatasetFile
) -> None:
    dataset.write('{"prompt": "unused", "solution": "3"}\n')
    evaluated = run | {"eval_dataset_name": str(held_out.path), "eval_on_start": True, "max_steps": 0}
    assert not [warning for warning in await accepted(client, evaluated) if "tokenizer knows" in warning]


async def test_characters_that_a_tokenizer_leaves_out_count_as_unknown(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile, model_dir: Path
) -> None:
    tokenizer = Tokenizer(models.BPE({"7": 0, "=": 1}, []))
    tokenizer.save(str(model_dir / "tokenizer.json"))
    dataset.write('{"prompt": "7 + 1 = ?", "solution": "8"}\n' * 10)
    (warning,) = await accepted(client, run)
    assert "knows only 40% of the characters" in warning


@pytest.mark.usefixtures("word_model")
async def test_a_row_whose_group_is_larger_than_an_entry_is_refused(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    dataset.write(dataset.good_rows + f'{{"prompt": "{"one " * 200_000}", "solution": "6"}}\n')
    assert f"{dataset.path} line 11 " not in "".join(await accepted(client, run | {"num_generations": 2}))
    errors = await refusal(client, run | {"num_generations": 32})
    assert f"1 of 11 rows cannot be used; the first: {dataset.path} line 11 is too large" in errors["dataset_name"]
    assert "more than the 16 MiB of an entry in Redis" in errors["dataset_name"]
    assert await accepted(client, run | {"num_generations": 32, "max_prompt_length": 400}) == []
    dataset.write(dataset.good_rows + f'{{"prompt": "one", "solution": "{"6" * (17 << 20)}"}}\n')
    assert "line 11 is too large" in (await refusal(client, run))["dataset_name"]


async def test_a_row_with_a_value_that_cannot_be_read_is_refused(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    tables: Any = pa
    days = tables.array([0] * 10 + [10**8], tables.date32())
    file = dataset.path.with_name("train.parquet")
    pq.write_table(tables.table({"prompt": ["7 + 1 ="] * 11, "solution": ["8"] * 11, "day": days}), file)
    errors = await refusal(client, run | {"dataset_name": str(file)})
    assert f"1 of 11 rows cannot be used; the first: {file} row 10 has a value that" in errors["dataset_name"]


async def test_conversations_need_a_chat_template(client: httpx.AsyncClient, run: Run, model_dir: Path) -> None:
    errors = await refusal(client, run | {"prompt_as_message": True})
    assert "no chat template" in errors["dataset_name"]
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert await accepted(client, run | {"prompt_as_message": True}) == []


async def test_tools_need_conversations(client: httpx.AsyncClient, run: Run, model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    with_tools = run | {"tools": ["my_tools:add"]}
    errors = await refusal(client, with_tools)
    assert "set prompt_as_message: true" in errors["tools"]
    assert await accepted(client, with_tools | {"prompt_as_message": True}) == []


async def test_a_bad_row_of_a_directory_is_a_warning_in_an_agent_run_too(
    client: httpx.AsyncClient, run: Run, model_dir: Path, tmp_path: Path
) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text('{"prompt": "1 + 1 =", "solution": "2"}\n{"prompt": "", "solution": "2"}\n')
    with_tools = run | {"dataset_name": str(rows), "tools": ["my_tools:add"], "prompt_as_message": True}
    warnings = await accepted(client, with_tools)
    assert any("cannot be used; the first: " in warning for warning in warnings), warnings


async def test_options_of_a_chat_template_need_conversations(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile, model_dir: Path
) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    thinking = run | {"chat_template_kwargs": {"enable_thinking": False}}
    errors = await refusal(client, thinking)
    assert "the prompts are plain text" in errors["chat_template_kwargs"]
    assert await accepted(client, thinking | {"prompt_as_message": True}) == []
    dataset.write('{"prompt": [{"role": "user", "content": "1 + 1 ="}], "solution": "2"}\n' * 10)
    assert await accepted(client, thinking) == []


async def test_a_missing_column_is_refused_with_the_existing_columns(client: httpx.AsyncClient, run: Run) -> None:
    errors = await refusal(client, run | {"columns": ["solution", "level"]})
    assert errors == {"columns": "there is no column level; there are prompt, solution"}
    renamed = {"rename_columns": {"solution": "target"}, "columns": ["target", "prompt"]}
    assert await accepted(client, run | renamed) == [
        "the reward function accuracy_reward asks for the column solution, which "
        "the dataset does not have: it will fail for every group. Add the column, give the value in reward_kwargs, or "
        "give the argument a default"
    ]
    held_out = Path(run["dataset_name"]).with_name("held-out.jsonl")
    shutil.copyfile(run["dataset_name"], held_out)
    only_evaluates = {"eval_dataset_name": str(held_out), "max_steps": 0, "eval_on_start": True}
    (missing,) = await accepted(client, run | renamed | only_evaluates)
    assert "accuracy_reward asks for the column solution, which the evaluation set does not have" in missing
    assert "it will fail in every evaluation" in missing


async def test_a_missing_column_of_the_evaluation_set_is_a_warning(
    client: httpx.AsyncClient, run: Run, tmp_path: Path
) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "3 + 3 =", "target": "6"}\n')
    evaluating = run | {"eval_dataset_name": str(held_out), "eval_steps": 1}
    (missing,) = await accepted(client, evaluating)
    assert "accuracy_reward asks for the column solution, which the evaluation set does not have" in missing
    only_evaluates = {"max_steps": 0, "eval_on_start": True, "eval_steps": None}
    assert await accepted(client, evaluating | only_evaluates) == [missing]
    held_out.write_text('{"prompt": "3 + 3 =", "solution": "6"}\n')
    assert await accepted(client, evaluating) == []


async def test_a_name_that_renames_nothing_is_a_warning(client: httpx.AsyncClient, run: Run) -> None:
    warnings = await accepted(client, run | {"rename_columns": {"answer": "target"}})
    assert warnings == ["rename_columns: there is no column answer; there are prompt, solution"]


async def test_a_disk_that_does_not_answer_ends_the_checks_of_a_submit(
    settings: TrainerSettings, redis: Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back = threading.Event()

    def wait(*_: object, **__: object) -> list[tuple[str, str]]:
        is_back.wait(60)
        return []

    monkeypatch.setattr("services.trainer.submit_checks.run_validation.misplaced", wait)
    quick = settings.model_copy(update={"hub_timeout_s": 0.2})
    async with serving(make_api(quick, redis, stopping=asyncio.Event())) as client:
        refused = await client.post("/v1/runs", json=run)
    is_back.set()
    assert (refused.status_code, refused.json()["type"]) == (503, "/problems/files-not-checked")


async def test_sequence_level_ratios_in_a_loss_of_tokens_are_a_warning(client: httpx.AsyncClient, run: Run) -> None:
    run |= {"importance_sampling_level": "sequence"}
    (warning,) = await accepted(client, run | {"loss_type": "dapo"})
    assert warning.startswith("importance_sampling_level sequence with loss_type dapo weights each sequence by its ")
    assert await accepted(client, run | {"loss_type": "grpo"}) == []


async def test_in_a_mixture_a_column_is_looked_for_where_the_option_applies(
    client: httpx.AsyncClient, run: Run, dataset: DatasetFile
) -> None:
    second = dataset.path.with_name("second.jsonl")
    second.write_text('{"question": "3 + 3 =", "solution": "6", "level": 1}\n' * 10)
    del run["dataset_name"]
    first: Run = {"path": str(dataset.path)}
    other: Run = {"path": str(second), "rename_columns": {"question": "prompt"}}
    assert await accepted(client, run | {"datasets": [first, other], "columns": ["solution", "level", "source"]}) == []
    errors = await refusal(client, run | {"datasets": [first, other | {"columns": ["tag"]}], "columns": ["level"]})
    assert errors["columns"] == "there is no column level; there are prompt, solution, source"
    assert errors["datasets.1.columns"] == "there is no column tag; there are prompt, solution, level, source"
    own = {"columns": ["solution"]}
    errors = await refusal(client, run | {"datasets": [first | own, other | own], "columns": ["level"]})
    assert "is not used; leave it out" in errors["columns"]


@pytest.mark.parametrize(
    ("name", "setting"), [("train.jsonl", "dataset_name"), ("saved", "dataset_name"), ("model", "model")]
)
async def test_what_the_trainer_may_not_read_is_refused_with_the_reason(
    client: httpx.AsyncClient, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    closed = tmp_path / "closed"
    close_directory(monkeypatch, closed)
    for streams in (False, True):
        errors = await refusal(client, run | {setting: str(closed / name), "dataset_streaming": streams})
        assert list(errors) == [setting]
        assert errors[setting].startswith(f"{closed / name}")
        assert "cannot be read: Permission denied. Let user " in errors[setting]


async def test_an_error_of_the_hub_or_redis_behind_a_check_is_a_503_after_all_errors_of_the_run(
    settings: TrainerSettings, redis: Redis, run: Run
) -> None:
    def be_away(_config: Any) -> Any:
        raise UnavailableError("Redis does not answer")

    validator = RunValidator(settings, engine_check=be_away, dataset_check=be_away)
    async with serving(make_api(settings, redis, stopping=asyncio.Event(), validator=validator)) as client:
        body = run | {"vllm": {"max_num_seqs": 8}}
        reply = await client.post("/v1/runs", json=body)
        assert list(await refusal(client, body | {"model": "/no/model"})) == ["model"]
    assert reply.status_code == 503
    assert reply.json()["detail"] == "Redis does not answer. Try again in a moment."
    assert reply.headers["Retry-After"] == "5"


async def test_only_a_few_data_sets_are_read_at_a_time(settings: TrainerSettings, run: Run) -> None:
    reading, released = list[str](), threading.Event()

    def read(config: RunConfig) -> Any:
        reading.append(config.dataset_name or "")
        released.wait(120)
        raise UserError("it was read", field="dataset_name")

    validator = RunValidator(settings, dataset_check=read)
    checks = [asyncio.create_task(validator.validate(run)) for _ in range(6)]
    await eventually(lambda: len(reading) == 4)
    await asyncio.sleep(0.2)
    assert len(reading) == 4
    released.set()
    for check in checks:
        with pytest.raises(Problem):
            await check
    assert len(reading) == 6


async def test_a_tokenizer_that_breaks_inside_tokenizers_is_a_sentence(
    client: httpx.AsyncClient, run: Run, word_model: Path, dataset: DatasetFile
) -> None:
    tokenizer = Tokenizer.from_file(str(word_model / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    tokenizer.save(str(word_model / "tokenizer.json"))
    dataset.write(json.dumps({"prompt": "a" * 60, "solution": "2"}) + "\n")
    errors = await refusal(client, run | {"max_prompt_length": 8})
    assert "the model's tokenizer fails on a prompt" in errors["model"]


async def test_missing_surroundings_of_a_run_are_reported(
    client: httpx.AsyncClient, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    errors = await refusal(client, run | {"nnodes": 2, "push_to_hub": True})
    assert set(errors) == {"nnodes", "push_to_hub"}


async def test_an_option_that_changes_nothing_is_a_warning(client: httpx.AsyncClient, run: Run) -> None:
    (warning,) = await accepted(client, run | {"project": "mine"})
    assert warning.startswith("project has no effect: ")


@pytest.mark.parametrize(("setting", "value"), [("num_train_epochs", 1e308), ("max_steps", 2**53)])
async def test_a_run_that_would_never_end_is_refused(
    client: httpx.AsyncClient, run: Run, setting: str, value: float
) -> None:
    del run["max_steps"]
    assert list(await refusal(client, run | {setting: value})) == [setting]


async def test_a_query_is_refused_in_plain_words(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/runs", params={"limit": "many"})
    assert reply.status_code == 422
    assert reply.json()["detail"] == "limit: must be a whole number in digits"
