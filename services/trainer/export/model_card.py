"""Writes the README.md of an exported model: its base model, data, settings and metrics, as plain facts.

    config of the run, metrics of its last step --> header for the hub (base model, data sets, tags), text

Unknown facts are left out, as for a checkpoint that was copied away from its run.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from shared.run_options.data import LOCAL_SUFFIXES
from shared.run_options.lora import served_rank
from shared.run_options.run_config import RunConfig
from shared.user_code.places import HASH_DIGITS

FILE_NAME = "README.md"

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_ABSOLUTE = ("/", "~")
"""Beginnings of absolute paths."""
_OF_SCRIPT = re.compile(rf"^(?P<name>\w+)_[0-9a-f]{{{HASH_DIGITS}}}:(?P=name)$")
"""Name of a function that a script wrote, under a module named after its text."""
_ROWS_OF_SCRIPT = re.compile(r"^data-[0-9a-f]{12}\.(parquet|jsonl)$")
"""Name of a file with the rows that a script had in memory."""
_MAIN_SETTINGS = (
    *("loss_type", "learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs", "groups_per_step"),
    *("num_generations", "max_completion_length", "temperature", "beta", "epsilon", "max_staleness", "dtype", "seed"),
)
_TOLD_ELSEWHERE = {
    *("name", "model", "model_revision", "dataset_name", "dataset_config", "dataset_train_split", "datasets"),
    *(
        "resume_from_checkpoint",
        "reward_funcs",
        "reward_weights",
        "push_to_hub",
        "hub_model_id",
        "hub_private_repo",
        "report_to",
        "project",
        "weight_dir",
    ),
}
_MAIN_METRICS = (
    *("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio", "entropy", "kl"),
    *("frac_reward_zero_std", "grad_norm", "num_tokens"),
)
_GRPO = "[DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models](https://arxiv.org/abs/2402.03300)"


@dataclass(frozen=True)
class RunFacts:
    """The known facts about the run that made a model."""

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The submitted config with its defaults; empty if unknown."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last step in the weights; empty if unknown."""
    run_id: str | None = None
    step: int | None = None
    began_from: str | None = None
    """The checkpoint that the run began from, in words."""
    best: str = ""
    """The metric by which these weights are the best of the run, with its value; empty if they are not."""
    is_config_damaged: bool = False
    """Whether the config is unknown because its file cannot be read."""


def model_card(facts: RunFacts, *, title: str, is_adapter: bool = False) -> str:
    """Return the model card: Markdown after a YAML header for the Hugging Face Hub.

    Args:
        facts: The facts to report.
        title: Name of the model. The loading instructions use it as directory or hub id.
        is_adapter: Whether the model is a LoRA adapter without its base.
    """
    from huggingface_hub import ModelCardData

    base = _hub_id(facts.config.get("model"))
    data_sets = [found for source in _data_sets(facts.config) if (found := _hub_id(source)) is not None]
    header = ModelCardData(
        base_model=base,
        datasets=data_sets or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "headrace", *(["lora"] if is_adapter else []), "reinforcement-learning"],
    )
    return f"---\n{header.to_yaml()}\n---\n\n" + "\n".join(_text(facts, title, is_adapter)).rstrip() + "\n"


def _text(facts: RunFacts, title: str, is_adapter: bool) -> Iterator[str]:
    config = facts.config
    yield f"# {title}\n"
    made = f"optimizer step {facts.step} of" if facts.step is not None else "made by"
    run = f"run `{facts.run_id}`" if facts.run_id else "a run"
    yield f"Post-trained with GRPO ({_GRPO}) by headrace: {made} {run}.\n"
    if facts.began_from:
        yield f"The run began from {facts.began_from}.\n"
    if facts.best:
        yield f"Of the run's evaluated checkpoints, this is the best by {facts.best}.\n"
    if config:
        revision = f" at revision `{config['model_revision']}`" if config.get("model_revision") else ""
        yield f"* Base model: {_named(str(config.get('model')))}{revision}"
        yield f"* Data: {', '.join(_named(source) for source in _data_sets(config))}"
        yield f"* Rewards: {', '.join(_rewards(config))}\n"
    yield "## How to load it\n"
    auto = "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM"
    if is_adapter:
        yield "```python\nfrom peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n"
    else:
        yield "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f'model = {auto}.from_pretrained("{title}", dtype="auto")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{title}")\n```\n'
    if is_adapter:
        lora = f"--enable-lora --max-lora-rank {served_rank(int(config.get('lora_r', 16)))} --lora-modules"
        yield f"With vLLM: `vllm serve {_hub_id(config.get('model')) or 'BASE'} {lora} policy={title}`.\n"
    else:
        yield f"With vLLM: `vllm serve {title}`.\n"
    if config:
        yield "## Settings\n"
        yield from _table(("setting", "value"), _settings(config))
    if metrics := [(name, _number(value)) for name, value in _metrics(facts.metrics)]:
        yield f"## Metrics of step {facts.step}\n"
        yield from _table(("metric", "value"), metrics)


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of the most important settings, then of others that differ from their defaults."""
    for name in _MAIN_SETTINGS:
        if name in config:
            yield name, _value(config[name])
    for name, about in RunConfig.model_fields.items():
        is_told = name in _MAIN_SETTINGS or name in _TOLD_ELSEWHERE or name not in config
        if not is_told and config[name] != about.get_default(call_default_factory=True):
            yield name, _value(_without_directories(config[name]))


def _metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    rewards = sorted(name for name in metrics if name.startswith(("rewards/", "reward/")) and name.endswith("/mean"))
    for name in (*_MAIN_METRICS[:2], *rewards, *_MAIN_METRICS[2:]):
        value = metrics.get(name)
        if value is not None and math.isfinite(value):
            yield name, value


def _rewards(config: Mapping[str, Any]) -> Iterator[str]:
    names: list[str] = config.get("reward_funcs") or []
    weights: list[float] = config.get("reward_weights") or [1.0] * len(names)
    for name, weight in zip(map(_own_name, names), weights, strict=False):
        yield name if weight == 1 else f"{name} (weight {weight:g})"
    if not names:
        given: str | Mapping[str, str] | None = config.get("environment_factory")
        yield from (
            f"that of the environment {_own_name(str(it))}"
            for it in (given.values() if isinstance(given, Mapping) else [given])
        )


def _own_name(name: str) -> str:
    """Return a reward's name as Markdown code, without the module generated from a script or a private directory."""
    if name.startswith(_ABSOLUTE):
        return _named(name)
    of_script = _OF_SCRIPT.match(name)
    return f"`{of_script['name'] if of_script else name}`"


def _data_sets(config: Mapping[str, Any]) -> list[str]:
    listed: Iterable[Mapping[str, Any]] = config.get("datasets") or ()
    return [str(source["path"]) for source in listed] or (
        [str(config["dataset_name"])] if config.get("dataset_name") else []
    )


def _hub_id(name: Any) -> str | None:
    """Return the name if it is a hub id and not a path on this machine; otherwise None."""
    if not isinstance(name, str) or not _HUB_ID.match(name) or name.endswith(LOCAL_SUFFIXES):
        return None
    return None if Path(name).exists() else name


def _named(name: str) -> str:
    """Return the name as Markdown code. Only the last part of a local path is shown, because the rest is private."""
    if _ROWS_OF_SCRIPT.match(Path(name).name):
        return "rows of a script"
    return f"`{name}`" if _hub_id(name) else f"`{Path(name).name}` (a local path)"


def _without_directories(value: Any) -> Any:
    """Return a setting with the last part only of each local path in it."""
    if isinstance(value, str):
        return _named(value) if value.startswith(_ABSOLUTE) else value
    if isinstance(value, Mapping):
        return {key: _without_directories(part) for key, part in cast(Mapping[str, Any], value).items()}
    return [_without_directories(part) for part in cast(list[object], value)] if isinstance(value, list) else value


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    for name, value in rows:
        yield f"| `{name}` | {value} |"
    yield ""


def _value(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _number(value: float) -> str:
    return f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
