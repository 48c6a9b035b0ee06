"""Checks whether a completion is JSON that matches a schema (jsonschema).

The schema is from ``reward_kwargs`` or from the row. Its references must point into the schema itself or to a standard
meta-schema. Nothing is fetched.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn, cast

import jsonschema
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable

from services.rewarder.built_ins.fenced_blocks import fenced_blocks
from services.rewarder.built_ins.time_limit import Patience, TimeIsUpError, out_of_time, time_limit
from services.rewarder.reward_call import CallError, Verdict, text_of
from services.rewarder.strict_body import refuse_deep_nesting
from shared.messages import Completion
from shared.user_code.error_text import printable

VALIDATION_TIMEOUT_S = 1.0
"""Limit for one completion, because a regular expression in a schema may backtrack without end."""


def json_schema_reward(
    completions: list[Completion], json_schema: dict[str, Any] | list[object], **_columns: object
) -> list[Verdict]:
    """Score each completion: 1.0 if it, or its last fenced block, is JSON that meets ``json_schema``, 0.0 if not."""
    is_of_run = isinstance(json_schema, dict)
    schemas = [json_schema] * len(completions) if isinstance(json_schema, dict) else json_schema
    patience = Patience()
    return [
        _judge(text_of(completion), schema, is_of_run=is_of_run, timeout_s=patience.limit(VALIDATION_TIMEOUT_S))
        for completion, schema in zip(completions, schemas, strict=True)
    ]


def check_schema(kwargs: Mapping[str, Any]) -> str | None:
    """Return the problem with the schema in ``reward_kwargs``, or None if it can be used."""
    schema = kwargs.get("json_schema")
    try:
        with time_limit(VALIDATION_TIMEOUT_S):
            why_not = None if schema is None else _why_no_schema(json.dumps(schema))
    except TimeIsUpError:
        why_not = out_of_time("checking it", VALIDATION_TIMEOUT_S)
    return f"cannot use its json_schema: {why_not}" if why_not else None


def _judge(text: str, schema: object, *, is_of_run: bool, timeout_s: float) -> Verdict:
    if schema is None:
        return Verdict("not_applicable", None, "the row has no schema")
    written = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        with time_limit(timeout_s):
            if why_not := _why_no_schema(written):
                return _unusable(why_not)
            wrong = _what_is_wrong(text, json.loads(written))
    except TimeIsUpError:
        return Verdict("timeout", None, out_of_time("validating it", timeout_s))
    except re.error as error:
        return _unusable(f"{error} in a pattern")
    except (RecursionError, OverflowError) as error:  # an endless schema, or a number too large for a float
        return Verdict("error", None, printable(f"validating it ended with {type(error).__name__}: {error}"))
    except Unresolvable as error:
        if is_of_run:
            raise CallError(f"has a schema with a reference to something outside it: {error}") from error
        return _unusable(f"it refers to something outside it: {error}")
    return Verdict("scored", 1.0) if wrong is None else Verdict("scored", 0.0, printable(wrong))


def _unusable(why: str) -> Verdict:
    return Verdict("not_applicable", None, printable(f"the row's schema cannot be used: {why}"))


def _what_is_wrong(text: str, schema: Any) -> str | None:
    try:
        value = json.loads(_json_of(text), parse_constant=_refuse)
    except (ValueError, RecursionError) as problem:
        return f"it is not JSON: {problem or type(problem).__name__}"
    validator = validator_for(schema)(schema, registry=REGISTRY)
    try:
        error: Any = next(validator.iter_errors(value), None)
    except RecursionError:
        with contextlib.suppress(ValueError):  # raised if the JSON and not the schema is to blame
            refuse_deep_nesting({"": value})
            raise
        return "it is nested too deep for its schema"
    return None if error is None else f"{error.json_path}: {error.message}"


def _json_of(text: str) -> str:
    blocks = [block.content for block in fenced_blocks(text) if block.language in ("", "json")]
    return blocks[-1] if blocks else text


@lru_cache(maxsize=256)
def _why_no_schema(written: str) -> str | None:
    """Return the problem with a JSON schema, or None if it is valid. Results are cached, but not a TimeIsUpError."""
    try:
        schema: Any = json.loads(written)
        if not isinstance(schema, dict):
            return f"it is not a table but {type(schema).__name__}"
        table = cast("dict[str, Any]", schema)
        validator_for(table).check_schema(table)
    except jsonschema.SchemaError as error:
        return f"{error.json_path}: {error.message}"
    except (ValueError, RecursionError, OverflowError) as error:
        return str(error) or type(error).__name__
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
