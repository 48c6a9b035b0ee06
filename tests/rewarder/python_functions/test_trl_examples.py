"""Reward functions written for TRL work here unchanged: from its package, its documentation and a recipe.

The package's functions are called where they are installed. The functions of documentation and recipe are extracted
from their documents, which are not in this repository (ORIGINALS), and run unchanged. Without the documents, only
similar functions, in user_code/trl_shaped_rewards.py, are tested in the same way.
"""

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import WeightedFunction, weighted_sum
from services.rewarder.trainer_state import TrainerState
from shared.arrays import pack_ids
from shared.messages import RewardOutcome
from shared.user_code.places import Places
from tests.rewarder.conftest import USER_CODE, pool_and_scorer

Score = Callable[..., Any]
OURS = "trl_shaped_rewards"
ORIGINALS = {
    "TRL_GRPO_DOC": "docs/source/grpo_trainer.md of github.com/huggingface/trl",
    "GRPO_COOKBOOK_NOTEBOOK": "notebooks/en/fine_tuning_llm_grpo_trl.ipynb of github.com/huggingface/cookbook",
}
"""By the environment variable with the document's path."""
SUPPLIED = """
def check_math_solution(prompt, completion):
    return "4" in completion


def test_code_solution(prompt, completion):
    return "def " in completion
"""
"""Definitions that the multi-task example of TRL's documentation expects its reader to add."""


def definitions(code: str) -> str:
    """Return the imports of plain modules and the function definitions in a piece of code, unchanged."""
    kept: list[str] = []
    for statement in ast.parse(code).body:
        text = ast.get_source_segment(code, statement) or ""
        is_import = isinstance(statement, ast.Import) or text.startswith("from math_verify import")
        if is_import or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            kept.append(text)
    return "\n\n".join(kept) + "\n"


def document(variable: str) -> str:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"set {variable} to the path of {ORIGINALS[variable]} to run the original")
    return Path(path).read_text(encoding="utf-8")


def from_documentation(directory: Path, function: str, parameter: str) -> str:
    """Write a module with the documentation's function of this name and parameter; return the function's full name."""
    section = document("TRL_GRPO_DOC").partition("### Using a custom reward function")[2].partition("\n### ")[0]
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        found = re.search(rf"def {function}\(([^)]*)\)", block)
        if found is not None and parameter in re.split(r"[,\s]+", found[1]):
            (directory / "from_trl_docs.py").write_text(definitions(block) + SUPPLIED, encoding="utf-8")
            return f"from_trl_docs:{function}"
    pytest.fail(f"the documentation has no {function}({parameter}, ...)")


def from_recipe(directory: Path, function: str) -> str:
    """Write a module with the recipe's function; return its full name."""
    cells = json.loads(document("GRPO_COOKBOOK_NOTEBOOK"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (code,) = [source for source in sources if f"def {function}(" in source]
    (directory / "from_recipe.py").write_text(definitions(code), encoding="utf-8")
    return f"from_recipe:{function}"


async def score(directory: Path, *names: str, completions: list[Any], **more: Any) -> list[tuple[RewardOutcome, ...]]:
    """Score with real workers and a real event loop."""
    tasks = RewardTasks(Places((str(USER_CODE), str(directory)), ("trl",)))
    prompts = more.pop("prompts", ["The sky is", "The sun is"])
    ids = [pack_ids(found) for found in more.pop("completion_ids")] if "completion_ids" in more else None
    call = RewardCall(prompts, completions, more, completion_ids=ids, trainer_state=TrainerState(1, 2))
    async with pool_and_scorer(RewarderMetrics(), tasks) as (_, scorer):
        return await scorer.score(call, [WeightedFunction(name) for name in names], timeout_s=100, lane="test")


def said(rows: list[tuple[RewardOutcome, ...]]) -> list[list[tuple[str, float | None]]]:
    return [[(outcome.outcome, outcome.value) for outcome in row] for row in rows]


def one(*values: float) -> list[list[tuple[str, float | None]]]:
    return [[("scored", value)] for value in values]


def assistant(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.fixture(params=["same shape", "original"])
def is_original(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "original")


async def test_length_by_completion_ids(is_original: bool, tmp_path: Path) -> None:
    name = from_documentation(tmp_path, "reward_func", "completion_ids") if is_original else f"{OURS}:length_in_tokens"
    ids = [[6303, 13], [304, 279, 12884, 13]]
    rows = await score(tmp_path, name, completions=[" blue.", " in the sky."], completion_ids=ids)
    assert said(rows) == one(2.0, 4.0)


async def test_length_by_characters(is_original: bool, tmp_path: Path) -> None:
    name = from_documentation(tmp_path, "reward_func", "completions") if is_original else f"{OURS}:length_in_characters"
    assert said(await score(tmp_path, name, completions=[" blue.", " in the sky."])) == one(6.0, 12.0)


async def test_think_and_answer_format(is_original: bool, tmp_path: Path) -> None:
    name = (
        from_documentation(tmp_path, "format_reward_func", "completions")
        if is_original
        else f"{OURS}:think_then_answer"
    )
    prompts = [[{"role": "user", "content": "What is (1 + 2) * 4?"}]] * 2
    completions = assistant("<think>3 times 4</think><answer>12</answer>", "3 times 4 is 12.")
    assert said(await score(tmp_path, name, prompts=prompts, completions=completions)) == one(1.0, 0.0)


async def test_boxed_reference(is_original: bool, tmp_path: Path) -> None:
    name = from_documentation(tmp_path, "reward_func", "ground_truth") if is_original else f"{OURS}:boxed_reference"
    completions = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
    assert said(await score(tmp_path, name, completions=completions, ground_truth=["2", "5"])) == one(1.0, 0.0)


async def test_two_tasks_each_with_its_function_and_none_for_the_other(is_original: bool, tmp_path: Path) -> None:
    names = [f"{OURS}:math_task", f"{OURS}:coding_task"]
    if is_original:
        names = [from_documentation(tmp_path, f"{kind}_reward_func", "task") for kind in ("math", "coding")]
    rows = await score(
        tmp_path,
        *names,
        prompts=["2+2?", "Add.", "2+2?", "Add."],
        completions=["4", "def add(a, b): ...", "5", "no"],
        task=["math", "coding", "math", "coding"],
    )
    nothing = ("not_applicable", None)
    assert said(rows) == [
        [("scored", 1.0), nothing],
        [nothing, ("scored", 1.0)],
        [("scored", -1.0), nothing],
        [nothing, ("scored", -1.0)],
    ]
    assert [weighted_sum(row) for row in rows] == [1.0, 1.0, -1.0, -1.0]


async def test_an_async_function(is_original: bool, tmp_path: Path) -> None:
    name = from_documentation(tmp_path, "async_reward_func", "completions") if is_original else f"{OURS}:awaited"
    assert said(await score(tmp_path, name, completions=["something", ""])) == one(1.0, 0.0)


async def test_the_recipe_s_accuracy_with_math_verify(is_original: bool, tmp_path: Path) -> None:
    name = from_recipe(tmp_path, "accuracy_reward") if is_original else f"{OURS}:latex_accuracy"
    completions = assistant(r"so $\frac{2}{6}$", r"so $\frac{1}{2}$", "no idea")
    golds = [r"it is $\frac{1}{3}$"] * 3
    rows = await score(tmp_path, name, prompts=["1/3?"] * 3, completions=completions, solution=golds)
    assert said(rows) == one(1.0, 0.0, 0.0)


@pytest.mark.slow
async def test_the_functions_of_trl_s_package(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    names = [f"trl.rewards:{name}" for name in ("accuracy_reward", "think_format_reward", "reasoning_accuracy_reward")]
    completions = assistant(
        r"<think>2/6</think> It is \boxed{\frac{2}{6}}.", r"It is \boxed{\frac{1}{2}}.", r"<think>\boxed{\frac{1}{3}}"
    )
    rows = await score(tmp_path, *names, prompts=["1/3?"] * 3, completions=completions, solution=[r"\frac{1}{3}"] * 3)
    assert [[outcome.value for outcome in row] for row in rows] == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
