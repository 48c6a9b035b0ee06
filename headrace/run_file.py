"""Reads run files (the settings of a run, in YAML or JSON) and configuration files of TRL's command line.

Paths in a run file are relative to its directory, so it can lie beside its data and be submitted from anywhere. Paths
in a configuration of TRL are relative to the working directory, as in TRL. The run API checks the values, so that every
client gets the same messages.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from shared.errors import UserError
from shared.run_options.data import LOCAL_SUFFIXES
from shared.run_options.trl.run_config_of_trl import run_config_of

_PATHS = ("model", "dataset_name", "eval_dataset_name")
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.\d[\d_]*$")


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the settings in a run file, with their paths made absolute.

    Raises:
        UserError: The file cannot be read, or is not a valid table of settings in YAML or JSON.
    """
    return with_absolute_paths(_read_table(path), path.resolve().parent)


def read_trl_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the run settings in a file for ``trl grpo --config``, and one sentence for each difference from TRL.

    If the file names a configuration of accelerate, the number of processes is read from there.

    Raises:
        UserError: The file cannot be read, or a run cannot do what an option asks for.
    """
    options = _read_table(path)
    launched = options.get("accelerate_config", options.get("config_file"))
    if "num_processes" not in options and isinstance(launched, str) and os.path.isfile(launched):
        del options["accelerate_config" if "accelerate_config" in options else "config_file"]
        of_launcher = _read_table(Path(launched))
        # accelerate starts one process for the type NO, which YAML reads as false.
        is_one = of_launcher.get("distributed_type") in ("NO", False)
        options["num_processes"] = 1 if is_one else of_launcher.get("num_processes", 1)
    config, notes = run_config_of(options)
    return with_absolute_paths(config, Path.cwd()), notes


def as_run_file(settings: Mapping[str, Any], comments: Sequence[str] = (), *, is_ascii: bool = False) -> str:
    """Return the text of a YAML run file with these settings, and the comments as its first lines.

    Args:
        settings: The run's settings.
        comments: Lines to write first, without the number sign.
        is_ascii: Whether to escape all other characters in the settings, as YAML does.
    """
    import yaml

    dumper = _with_exponents(yaml.SafeDumper)  # so that the text "1e-6" gets quotes
    text: str = yaml.dump(
        dict(settings), Dumper=dumper, sort_keys=False, allow_unicode=not is_ascii, default_flow_style=None, width=1000
    )
    return "".join(f"# {comment}\n" for comment in comments) + text


def _read_table(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory; name the run file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if path.suffix in LOCAL_SUFFIXES and path.suffix != ".json":
        raise UserError(f"{path} looks like a data file, not a run file; name it in one, with `dataset_name: {path}`")
    config: Any = _parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path)
    if not isinstance(config, dict) or not config:
        raise UserError(f"{path} must be a table of settings such as `model: NAME`")
    settings = {str(name): value for name, value in cast("dict[object, Any]", config).items()}
    for name, value in settings.items():
        _refuse_what_json_has_not(name, value, path)
    return settings


def _refuse_what_json_has_not(name: str, value: Any, path: Path) -> None:
    """Raise UserError for infinity, NaN or bytes: YAML has them, but the run API takes JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path}: {name} is {value!r}, which JSON does not have; write text in quotes ({error})"
        ) from error


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings in ``NAME=VALUE`` texts. Values are read as in a YAML run file.

    Raises:
        UserError: A text is not of this form, or its value is not YAML or does not exist in JSON.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UserError(f"{text!r} is not a setting; write NAME=VALUE, such as learning_rate=1e-4")
        settings[name.strip()] = parsed = _parse_yaml(value, Path(f"--set {name.strip()}"))
        _refuse_what_json_has_not(name.strip(), parsed, Path("--set"))
    return settings


def with_absolute_paths(settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Make relative paths in ``settings`` absolute, starting from ``directory``. ``settings`` is changed and returned.

    A model or data set is a path if it exists, begins with ``.`` or ``~``, or ends like a data file. Other names may be
    hub ids, and stay.

    Raises:
        UserError: A path names the home of a user that does not exist.
    """
    for name in _PATHS:
        _make_absolute(settings, name, directory)
    source: object = settings.get("resume_from_checkpoint")
    if isinstance(source, str) and ("/" in source or source.startswith((".", "~"))):  # else it is a run
        settings["resume_from_checkpoint"] = str((directory / _expanded(source)).resolve())
    mixture: Any = settings.get("datasets")
    if isinstance(mixture, list):
        for entry in cast("list[object]", mixture):
            if isinstance(entry, dict):
                _make_absolute(cast("dict[str, Any]", entry), "path", directory)
    rewards: object = settings.get("reward_funcs")
    if isinstance(rewards, list):
        settings["reward_funcs"] = [_absolute_directory(name, directory) for name in cast("list[object]", rewards)]
    elif rewards is not None:
        settings["reward_funcs"] = _absolute_directory(rewards, directory)
    return settings


def _absolute_directory(name: object, directory: Path) -> object:
    """Return the absolute path of a reward model's directory; any other reward name unchanged."""
    if not isinstance(name, str) or "/" not in name:
        return name
    path = directory / _expanded(name)
    return str(path.resolve()) if os.path.isdir(path) else name


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        user = text.split("/", 1)[0]
        raise UserError(f"{text[:200]!r} cannot be found: {user[:200]} is not the home of a user here") from error


def _make_absolute(settings: dict[str, Any], name: str, directory: Path) -> None:
    value = settings.get(name)
    if isinstance(value, str) and value:
        path = directory / _expanded(value)
        if os.path.exists(path) or value.startswith((".", "~")) or path.suffix in LOCAL_SUFFIXES:
            # The name of a file says its format, which that of a link's target may not.
            settings[name] = str(path.resolve() if os.path.isdir(path) else path.parent.resolve() / path.name)


def _parse_json(text: str, path: Path) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        _refuse_doubles(names, path)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    except RecursionError:
        raise UserError(f"{path} is nested too deeply for a run file") from None


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml

    def table(loader: Any, node: Any) -> Any:
        _refuse_doubles([str(key.value) for key, _ in node.value], path)
        return loader.construct_mapping(node)

    run_file_loader = _with_exponents(yaml.SafeLoader)
    run_file_loader.add_constructor("tag:yaml.org,2002:map", table)
    # A date stays the text that was written. vLLM has a library that makes this so for all YAML of its process.
    run_file_loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
    try:
        return yaml.load(text, run_file_loader)  # a SafeLoader, so it creates only plain values
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{where}: not YAML ({error.problem})") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML ({error})") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a run file: {error}") from error


def _with_exponents(base: Any) -> Any:
    """Return a subclass of a YAML loader or dumper that takes `1e-6` for a number. YAML 1.1 takes it for text."""
    made: Any = type(f"RunFile{base.__name__}", (base,), {})
    made.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return made


def _refuse_doubles(names: list[str], path: Path) -> None:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise UserError(f"{path}: {', '.join(doubles)} is set twice")
