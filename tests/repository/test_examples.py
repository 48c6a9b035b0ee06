"""The shipped run files, on rows with the columns of their data sets on the hub, and the resulting rewards."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.rewarder.built_ins.accuracy import accuracy_reward
from services.rewarder.built_ins.think_format import think_format_reward
from services.trainer.data.dataset import open_dataset
from services.trainer.data.row_format import RowFormat
from services.trainer.submit_checks.dataset_check import check_dataset
from shared.messages import Completion, Prompt
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
GSM8K = Path(os.environ.get("GSM8K_JSONL", ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"))

GSM8K_ROW = {
    "question": "Tom has 3 bags of 4 apples and eats 2. How many are left?",
    "answer": "He has 3*4=<<3*4=12>>12 apples.\nAfter eating 12-2=<<12-2=10>>10 are left.\n#### 10",
}
NUMINA_SOLUTION = (
    "The probability is the share of even faces.\n```python\nfrom sympy import Rational\nprint(Rational(3, 6))\n```\n"
    "```output\n1/2\n```\nThe probability is \\(\\boxed{\\frac{1}{2}}\\)."
)
NUMINA_ROW = {
    "problem": "A fair die is thrown. Find the probability of an even number.",
    "solution": NUMINA_SOLUTION,
    "messages": [
        {"role": "user", "content": "A fair die is thrown. Find the probability of an even number."},
        {"role": "assistant", "content": NUMINA_SOLUTION},
    ],
}
DEEPMATH_ROW = {
    "prompt": [{"role": "user", "content": "Evaluate the integral of x squared from 0 to 1."}],
    "solution": "$\\dfrac{1}{3}$",
}


def example(name: str) -> RunConfig:
    return parse_run_config(yaml.safe_load((ROOT / "examples" / name).read_text(encoding="utf-8")))


def read(config: RunConfig, row: dict[str, Any]) -> tuple[Prompt, dict[str, Any]]:
    (source,) = config.train_sources().values()
    return RowFormat.of(config, source).read(row)


def accuracy(texts: list[str], columns: dict[str, Any]) -> list[float | None]:
    completions: list[Completion] = [[{"role": "assistant", "content": text}] for text in texts]
    repeated = {name: [value] * len(texts) for name, value in columns.items()}
    return [verdict.value for verdict in accuracy_reward(completions, **repeated)]


@pytest.mark.parametrize(
    ("name", "row", "question", "right", "wrong"),
    [
        ("gsm8k-qwen3-0.6b.yaml", GSM8K_ROW, "Tom has 3 bags", r"So \boxed{10}.", r"So \boxed{12}."),
        (
            "numinamath-tir-qwen2.5-0.5b.yaml",
            NUMINA_ROW,
            "A fair die",
            r"<think>3 of 6</think> \boxed{0.5}",
            r"\boxed{3}",
        ),
        ("deepmath-103k-qwen3-0.6b.yaml", DEEPMATH_ROW, "Evaluate", r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"),
    ],
)
def test_a_row_becomes_a_conversation_and_a_gold_answer(
    name: str, row: dict[str, Any], question: str, right: str, wrong: str
) -> None:
    config = example(name)
    prompt, columns = read(config, row)
    assert isinstance(prompt, list)
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert prompt[0]["content"] == config.system_prompt
    assert "\\boxed{}" in prompt[0]["content"]
    assert prompt[1]["content"].startswith(question)
    assert list(columns) == ["solution"]
    assert accuracy([right, wrong], columns) == [1.0, 0.0]


def test_answers_of_deepmath_that_are_not_mathematics_are_not_judged() -> None:
    assert accuracy([r"\boxed{Yes}", r"\boxed{No}"], {"solution": "Yes"}) == [None, None]


def test_thinking_first_is_what_the_numinamath_example_asks_for_and_rewards() -> None:
    config = example("numinamath-tir-qwen2.5-0.5b.yaml")
    assert "think_format_reward" in config.reward_funcs
    assert "between <think> and </think>" in str(config.system_prompt)
    assert think_format_reward(["<think>3 of 6</think> It is 1/2.", "It is 1/2."]) == [1.0, 0.0]


def test_every_example_evaluates_on_rows_it_does_not_train_on() -> None:
    paths = sorted((ROOT / "examples").glob("*.yaml"))
    assert paths
    for path in paths:
        config = example(path.name)
        found = config.eval_source()
        assert found is not None, path
        if found[1].is_file:
            assert found[1].path != config.dataset_name
            continue
        assert found[1].split == "test"
        assert config.dataset_train_split == "train"


@pytest.mark.skipif(not GSM8K.is_file(), reason="set GSM8K_JSONL to a .jsonl file of GSM8K to read its real rows")
def test_the_gsm8k_example_reads_real_rows_and_finds_their_gold_answers() -> None:
    settings = yaml.safe_load((ROOT / "examples" / "gsm8k-qwen3-0.6b.yaml").read_text(encoding="utf-8"))
    for of_the_hub in ("dataset_config", "dataset_test_split", "eval_on_start", "eval_steps", "num_generations_eval"):
        del settings[of_the_hub]
    settings["max_prompt_length"] = None  # tokens are counted with the model's own tokenizer
    config = parse_run_config(settings | {"dataset_name": str(GSM8K)})
    lines = [line for line in GSM8K.read_text(encoding="utf-8").splitlines() if line.strip()]
    summary = check_dataset(config)
    assert [(source.num_rows, source.num_bad) for source in summary.sources] == [(len(lines), 0)]
    assert summary.columns == ("prompt", "solution")
    dataset = open_dataset(config)
    for row in map(dataset.row_at, range(60)):
        original = json.loads(lines[row.position])
        gold = int(original["answer"].rpartition("#### ")[2].replace(",", ""))
        assert isinstance(row.prompt, list)
        assert row.prompt[1] == {"role": "user", "content": original["question"]}
        assert accuracy([rf"\boxed{{{gold}}}", rf"\boxed{{{gold + 1}}}"], row.columns) == [1.0, 0.0]
