"""TRL's scripts of agents, outside of its page about GRPO: which, with which arguments, and what they need.

Packages of OpenEnv environments are stand-ins: any name in them is a class that takes any arguments. A dry run imports
them and makes environments, but plays none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ACCEPTED: Final = "ACCEPTED"
"""Begins the line that a script prints for an accepted submit."""
_EXAMPLES: Final = "examples/scripts"
_MODULES: Final = (
    "browsergym_env",
    "carla_env",
    "echo_env",
    "echo_env/models",
    "openenv",
    "openenv/core",
    "openenv/core/containers",
    "openenv/core/containers/runtime",
    "openspiel_env",
    "openspiel_env/models",
    "textarena_env",
)
_STAND_IN: Final = """
class _Anything:
    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args, **kwargs):
        return _Anything()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything
"""
MODELS: Final = {
    "Qwen/Qwen3-1.7B": "qwen3",
    "Qwen/Qwen3-4B": "qwen3",
}
"""Models that only these scripts name."""


@dataclass(frozen=True)
class AgentScript:
    """A file of TRL's repository, or a snippet of one of its pages.

    Attributes:
        file: The file.
        arguments: The arguments with which it is started.
        snippets: Lines by which the snippets of a page are found; they are joined.
        beside: Files that it reads from its own directory.
        excluded: Why it is not started.
    """

    file: str
    arguments: tuple[str, ...] = ()
    snippets: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    excluded: str = ""


SCRIPTS: Final = {
    "openenv.md, quick start": AgentScript("docs/source/openenv.md", snippets=("class EchoToolEnv:",)),
    "openenv.md, Wordle": AgentScript(
        "docs/source/openenv.md", snippets=("class WordleEnv:", 'model="Qwen/Qwen3-1.7B"')
    ),
    "grpo_agent.py": AgentScript(
        f"{_EXAMPLES}/grpo_agent.py",
        ("--model_name_or_path", "Qwen/Qwen3-1.7B", "--output_dir", "out", "--max_completion_length", "1024",
         "--log_completions", "True", "--max_steps", "400"),
    ),
    "grpo_2048.py": AgentScript(f"{_EXAMPLES}/grpo_2048.py"),
    "async_grpo.py": AgentScript(f"{_EXAMPLES}/async_grpo.py"),
    "openenv/echo.py": AgentScript(f"{_EXAMPLES}/openenv/echo.py"),
    "openenv/catch.py": AgentScript(f"{_EXAMPLES}/openenv/catch.py", ("--env-mode", "space", "--env-host", "http://env")),
    "openenv/wordle.py": AgentScript(f"{_EXAMPLES}/openenv/wordle.py"),
    "openenv/sudoku.py": AgentScript(
        f"{_EXAMPLES}/openenv/sudoku.py", beside=(f"{_EXAMPLES}/openenv/sudoku_prompt.txt",)
    ),
    "openenv/multi_env.py": AgentScript(f"{_EXAMPLES}/openenv/multi_env.py"),
    "openenv/browsergym_llm.py": AgentScript(
        f"{_EXAMPLES}/openenv/browsergym_llm.py", ("--model-id", "Qwen/Qwen3-0.6B")
    ),
    "openenv/carla.py": AgentScript(f"{_EXAMPLES}/openenv/carla.py", ("--model", "Qwen/Qwen3-0.6B")),
    "openenv/browsergym.py": AgentScript("", excluded="observations are images"),
    "openenv/carla_vlm.py": AgentScript("", excluded="observations are images"),
    "openenv/carla_vlm_gemma.py": AgentScript("", excluded="observations are images"),
    "openenv/opencode.py": AgentScript("", excluded="a rollout worker of TRL's experimental trainer; write an agent"),
    "harbor/data_agent.py": AgentScript("", excluded="trl.experimental.harbor makes the environment"),
}  # fmt: skip


def make_beside(hub: Path) -> None:
    """Make the stand-ins of packages and of data sets that these scripts name, below ``hub``."""
    for module in _MODULES:
        directory = hub / module
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "__init__.py").write_text(_STAND_IN)
    _rows(hub / "qgallouedec" / "biogrid" / "train.jsonl", [{"Alt IDs Interactor A": "JNKK", "Taxid": 9606}])
    questions = [{"question": f"Does the gene JNKK interact with {name}?", "answer": "Yes"} for name in "ABCDEFGH"]
    _rows(hub / "qgallouedec" / "biogrid_qa" / "train.jsonl", questions)
    sums = [{"question": f"What is {number} + {number}?", "answer": f"#### {2 * number}"} for number in range(64)]
    _rows(hub / "openai" / "gsm8k" / "main" / "train.jsonl", sums)
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    (hub / "openai" / "gsm8k" / "README.md").write_text(card)


def _rows(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
