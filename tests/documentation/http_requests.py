"""Checks requests and answers on the pages against the tables of routes and the models of the bodies."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel

from services.rewarder.score_api.bodies import CheckRequest, RewardFunctions, ScoreReply, ScoreRequest
from services.rewarder.score_api.endpoint_bodies import RegisterRequest, TrialRequest
from services.sessions.session_api.session_routes import NewSession, SessionRequest
from services.trainer.run_api.edit_route import EDITABLE
from services.trainer.run_api.run_data_routes import Metrics, Rollouts
from services.trainer.run_api.run_view import RunDetail
from services.trainer.run_api.submit_route import SubmittedRun
from shared.access.route_table import GENERATOR, REWARDER, SESSIONS, TRAINER, Route
from shared.run_options.agents import AgentOptions
from shared.run_options.run_config import parse_run_config
from tests.documentation.page_blocks import ROOT

_SERVICES = {
    "$API": TRAINER,
    "http://127.0.0.1:8400": TRAINER,
    "$REWARDER": REWARDER,
    "$SESSIONS": SESSIONS,
    "$GENERATOR": GENERATOR,
}
_BODIES: Mapping[str, type[BaseModel]] = {
    "check_rewards": CheckRequest,
    "check_tools": AgentOptions,
    "open_session": SessionRequest,
    "register_reward": RegisterRequest,
    "score_completions": ScoreRequest,
    "test_reward": TrialRequest,
}
_ANSWERS: Mapping[str, type[BaseModel]] = {
    "check_rewards": RewardFunctions,
    "edit_run": RunDetail,
    "list_metrics": Metrics,
    "list_rollouts": Rollouts,
    "open_session": NewSession,
    "score_completions": ScoreReply,
    "submit_run": SubmittedRun,
}
_WITH_A_VALUE = ("-H", "-d", "-X")
_IN_DEPLOY = ("first-run.json", "demo/run.json")


def check_request(words: Sequence[str]) -> None:
    """Check the words after ``curl``, or after the function of docs/http-api.md that adds the key."""
    if words[-1] == "$@":  # the definition of that function
        return
    option = dict(itertools.pairwise(words))
    route = route_of(words)
    if (body := option.get("-d")) is None:
        return
    if not body.startswith("@"):
        check_body(route, json.loads(body))
    elif (name := body[1:]) in _IN_DEPLOY:
        check_body(route, json.loads((ROOT / "deploy" / name).read_text(encoding="utf-8")))
    else:
        assert Path(name).name == "run.json"


def route_of(words: Sequence[str]) -> Route:
    """Return the route of a request."""
    plain = [word for at, word in enumerate(words) if not word.startswith("-") and words[at - 1] not in _WITH_A_VALUE]
    option = dict(itertools.pairwise(words))
    (url,) = plain
    (start,) = [start for start in _SERVICES if url.startswith(f"{start}/")]
    parts = urlsplit(url.removeprefix(start))
    found = _SERVICES[start].find(option.get("-X", "POST" if "-d" in option else "GET"), parts.path).route
    assert found is not None, f"{url} is not a route"
    assert found.query is None or parse_qs(parts.query).keys() <= set(found.query), url
    return found


def check_body(route: Route, body: Any) -> None:
    """Check the body of a request as its service does."""
    if route.name == "submit_run":
        parse_run_config(body)
    elif route.name == "edit_run":
        assert set(body) <= set(EDITABLE)
    elif route.name in _BODIES:
        _BODIES[route.name].model_validate_json(json.dumps(body))
    else:
        assert route.name == "create_chat_completion", f"what is the body of {route.name}?"


def check_answer(route: Route, body: Any) -> bool:
    """Check that an answer, or a part of one, has only fields that the route's answers have."""
    kind = _ANSWERS.get(route.name)
    if kind is not None:
        _check_fields(body, kind)
    return kind is not None


def _check_fields(value: Any, kind: Any) -> None:
    kinds = [it for it in get_args(kind) if it is not type(None)]
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, inner in cast("dict[str, Any]", value).items():
            assert name in kind.model_fields, f"{kind.__name__} has no field {name}"
            _check_fields(inner, kind.model_fields[name].annotation)
    elif get_origin(kind) is list:
        for inner in cast("list[Any]", value or []):
            _check_fields(inner, kinds[0])
    elif value is not None and type(None) in get_args(kind):
        _check_fields(value, kinds[0])
