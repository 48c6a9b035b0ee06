"""Every route of every service: refused without a key or with a key of another scope, allowed with the right scope."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute
from pydantic import SecretStr
from starlette.routing import Route as AppRoute
from starlette.routing import request_response

from services.generator.app import make_app
from services.generator.engine.engine_check import EngineChecker, make_check_router
from services.generator.policy_api.openai_routes import OpenAiRoutes
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.receive.weight_routes import make_router
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk
from services.rewarder.service import RewarderService
from services.rewarder.settings import RewarderSettings
from services.sessions.service import SessionsService
from services.sessions.settings import SessionsSettings
from services.trainer.run_api.api import create_app, guarded
from services.trainer.run_api.trainer_api import make_api
from services.trainer.settings import TrainerSettings
from shared.access.named_keys import NamedKey, digest_of
from shared.access.route_table import GENERATOR, REWARDER, SCOPES, SESSIONS, TRAINER, Route, RouteTable
from shared.redis.redis_connection import Redis
from shared.serving.http_guard import App
from shared.serving.http_limits import HttpLimits

TABLES = {"trainer": TRAINER, "rewarder": REWARDER, "generator": GENERATOR, "sessions": SESSIONS}
INTERNAL_KEY, API_KEY = "the-key-between-services", "the-key-with-every-scope"


def key_of(scope: str) -> str:
    return f"the key for {scope} alone"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "api-keys"
    keys = [NamedKey(scope, digest_of(key_of(scope).encode()), frozenset({scope})) for scope in SCOPES]
    path.write_text("".join(f"{key.line()}\n" for key in keys))
    return path


@pytest.fixture
async def apps(keys_file: Path, redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[dict[str, App]]:
    """Return all services as they are served, each with all routes of its process."""
    common: dict[str, Any] = {
        "redis_url": SecretStr(redis_url),
        "api_key": SecretStr(API_KEY),
        "api_keys_file": keys_file,
        "internal_key": SecretStr(INTERNAL_KEY),
    }
    api = make_api(TrainerSettings(**common, runs_dir=tmp_path / "runs"), redis, stopping=asyncio.Event())
    rewarder_settings = RewarderSettings(**common)
    rewarder = RewarderService(rewarder_settings)
    sessions_settings = SessionsSettings(**common)
    sessions = SessionsService(sessions_settings)
    settings = GeneratorSettings(**common)
    receiver = WeightReceiver(replica_id="generator-0")
    state = ServiceState(receiver)
    generator = make_app(
        settings,
        keyring=settings.keyring(),
        state=state,
        openai=OpenAiRoutes(state.why_policy_closed, policy_version=lambda: 0),
        weight_routes=make_router(receiver),
        turn_routes=make_turn_router(TurnDesk(state)),
        engine_check=make_check_router(
            EngineChecker({}, timeout_s=1, data=settings.places_of_data(), weights=settings.places_of_weights())
        ),
    )
    yield {
        "trainer": guarded(create_app(api), api.keyring, HttpLimits()),
        "rewarder": rewarder.guarded(rewarder_settings.keyring(), HttpLimits()),
        "generator": generator,
        "sessions": sessions.guarded(sessions_settings.keyring(), HttpLimits()),
    }
    await sessions.close()
    assert await rewarder.let_go()
    await rewarder.close()


def inside(app: Any) -> FastAPI:
    """Return the application behind the doors."""
    while not isinstance(app, FastAPI):
        app = app._app
    return app


def _error_type(route: Route) -> str:
    """Return the content type of errors: sessions answer their clients in the form of their protocol."""
    return "application/problem+json" if route.errors == "problem" else "application/json"


async def ask(app: App, method: str, path: str, key: str = "") -> httpx.Response:
    url = re.sub(r"\{\w+\}", "some-name", path)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=cast("Any", app), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.request(method, url, headers=headers, json={} if method == "POST" else None)


@pytest.mark.parametrize("service", TABLES)
def test_the_table_of_a_service_has_all_routes_of_its_application_and_no_other(
    service: str, apps: dict[str, App]
) -> None:
    routes = [cast("AppRoute", route) for route in inside(apps[service]).routes]
    has = {(method, route.path) for route in routes for method in (route.methods or ()) if method != "HEAD"}
    assert len(has) >= 5
    assert has == {(route.method, route.path) for route in TABLES[service].routes}


@pytest.mark.parametrize("service", TABLES)
async def test_every_route_is_closed_without_its_key(service: str, apps: dict[str, App]) -> None:
    for route in TABLES[service].routes:
        other_kind = API_KEY if route.needs == "internal" else INTERNAL_KEY
        for key in ("", "nonsense", other_kind) if route.needs is not None else ():
            refused = await ask(apps[service], route.method, route.path, key)
            assert refused.status_code == 401, (route, key)
            assert refused.headers["content-type"] == _error_type(route)
            assert refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("service", TABLES)
async def test_every_route_refuses_keys_of_other_scopes_and_names_the_missing_scope(
    service: str, apps: dict[str, App]
) -> None:
    for route, scope in itertools.product(TABLES[service].routes, SCOPES):
        if route.needs in (None, scope):
            continue
        refused = await ask(apps[service], route.method, route.path, key_of(scope))
        if route.needs in ("internal", "session"):
            assert refused.status_code == 401, (route, "no named key is one between services, or of a session")
            continue
        assert refused.status_code == 403, (route, scope)
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["missing_scope"] == route.needs
        assert refused.json()["detail"].startswith(f"This needs a key with the scope {route.needs}; the key {scope} ")
        assert key_of(scope) not in refused.text


@pytest.mark.parametrize("service", TABLES)
async def test_every_route_is_open_to_its_scope_and_to_the_key_that_has_all(service: str, apps: dict[str, App]) -> None:
    for route in TABLES[service].routes:
        # tests/sessions/session_api opens sessions with their own keys.
        keys: dict[str | None, list[str]] = {"internal": [INTERNAL_KEY], None: [""], "session": []}
        right = keys.get(route.needs, [API_KEY, key_of(str(route.needs))])
        for key in right:
            answer = await ask(apps[service], route.method, route.path, key)
            assert answer.status_code not in (401, 403, 405), (route, answer.text)
            is_missing_thing = answer.status_code == 404 and answer.json()["type"] != "/problems/not-found"
            assert answer.status_code != 404 or is_missing_thing, (route, answer.text)


@pytest.mark.parametrize("service", TABLES)
async def test_a_route_that_was_forgotten_in_the_table_is_closed(service: str, apps: dict[str, App]) -> None:
    app = inside(apps[service])

    async def forgotten() -> str:
        return "open"

    app.add_api_route("/v1/forgotten", forgotten)
    app.add_api_route("/internal/v1/forgotten", forgotten)
    assert (await ask(apps[service], "GET", "/v1/forgotten")).status_code == 401
    assert (await ask(apps[service], "GET", "/v1/forgotten", API_KEY)).status_code == 404
    assert (await ask(apps[service], "GET", "/internal/v1/forgotten", API_KEY)).status_code == 401
    assert (await ask(apps[service], "GET", "/internal/v1/forgotten", INTERNAL_KEY)).status_code == 404


@pytest.mark.parametrize("service", TABLES)
@pytest.mark.parametrize("path", ["/v1/about%0A", "/v1/about/", "//v1/about", "/v1/%2e%2e/v1/about", "/V1/about"])
async def test_a_path_that_is_nearly_one_of_a_route_is_not_that_route(
    service: str, path: str, apps: dict[str, App]
) -> None:
    assert (await ask(apps[service], "GET", path)).status_code == 401
    assert (await ask(apps[service], "GET", path, key_of("score"))).status_code == 404


@pytest.mark.parametrize("service", TABLES)
async def test_another_method_is_refused_with_the_allowed_methods(service: str, apps: dict[str, App]) -> None:
    assert (await ask(apps[service], "DELETE", "/v1/about")).status_code == 401
    refused = await ask(apps[service], "DELETE", "/v1/about", key_of("infer"))
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("service", TABLES)
def test_the_table_of_a_service_has_the_query_parameters_of_its_routes(service: str, apps: dict[str, App]) -> None:
    has = {
        (method, route.path): {
            parameter.alias: "list" in str(parameter.field_info.annotation)
            for parameter in get_flat_dependant(route.dependant).query_params
        }
        for route in inside(apps[service]).routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    tables = {
        (route.method, route.path): {name: name in route.lists for name in route.query or ()}
        for route in TABLES[service].routes
    }
    assert len(has) >= 4
    assert has == {which: tables[which] for which in has}


@pytest.mark.parametrize("service", TABLES)
async def test_an_unknown_query_parameter_is_refused_with_the_known_parameters(
    service: str, apps: dict[str, App]
) -> None:
    for route in TABLES[service].routes:
        if route.query is None:
            continue
        key = INTERNAL_KEY if route.needs == "internal" else API_KEY
        refused = await ask(apps[service], route.method, f"{route.path}?limt=3&can%0Aary", key)
        assert refused.status_code == 422, route
        assert refused.headers["content-type"] == _error_type(route)
        if route.needs == "session":
            assert "there is no such query parameter" in refused.json()["error"]["message"]
            continue
        assert [error["field"] for error in refused.json()["errors"]] == ["limt", "can\N{REPLACEMENT CHARACTER}ary"]
        for name in route.query:
            assert name in refused.json()["detail"]
        if route.needs is not None:
            unknown = await ask(apps[service], route.method, f"{route.path}?limt=3", "nonsense")
            assert unknown.status_code == 401, "without a key, the answer reveals nothing"


async def test_a_query_parameter_is_given_once_unless_it_is_a_list(apps: dict[str, App]) -> None:
    refused = await ask(apps["trainer"], "GET", "/v1/runs?name=a&tag=x&limit=3&tag=y&name=b&limit=4&nome=c", API_KEY)
    assert refused.status_code == 422
    assert refused.json()["detail"] == (
        "name, limit: there are 2 values, and this query parameter takes one; "
        "nome: there is no such query parameter; this route takes cursor, limit, name, sort, status, tag"
    )
    assert [error["field"] for error in refused.json()["errors"]] == ["name", "limit", "nome"]
    assert (await ask(apps["trainer"], "GET", "/v1/runs?name=a&tag=x&tag=y", API_KEY)).status_code == 200


async def test_vllms_own_routes_judge_their_query_parameters_themselves(apps: dict[str, App]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (await ask(apps["generator"], "POST", f"{path}?limt=3", API_KEY)).status_code == 503


@pytest.mark.parametrize("service", TABLES)
async def test_head_is_answered_as_get_is_without_a_body(service: str, apps: dict[str, App]) -> None:
    for route in TABLES[service].routes:
        if route.method != "GET":
            continue
        key = INTERNAL_KEY if route.needs == "internal" else API_KEY
        got, head = [await ask(apps[service], method, route.path, key) for method in ("GET", "HEAD")]
        assert (head.status_code, head.content) == (got.status_code, b""), route
        same, other = ({**answer.headers, "x-request-id": ""} for answer in (got, head))
        assert same.keys() == other.keys(), route
        assert same.get("content-type") == other.get("content-type"), route
        if route.needs is not None:
            assert (await ask(apps[service], "HEAD", route.path)).status_code == 401
    not_there = await ask(apps[service], "HEAD", "/v1/nothing", API_KEY)
    assert (not_there.status_code, not_there.content) == (404, b"")


def test_a_path_without_a_part_that_varies_comes_first() -> None:
    one = Route("check", "POST", "/v1/rewards/check", "score")
    many = Route("change", "POST", "/v1/rewards/{name}", "operate")
    for table in (RouteTable(one, many), RouteTable(many, one)):
        assert table.find("POST", "/v1/rewards/check").route == one
        found = table.find("POST", "/v1/rewards/judge")
        assert (found.route, found.subject) == (many, "judge")


@pytest.mark.parametrize("service", TABLES)
async def test_the_openapi_document_has_all_public_routes_with_their_names_scopes_and_problems(
    service: str, apps: dict[str, App]
) -> None:
    document = (await ask(apps[service], "GET", "/openapi.json", API_KEY)).json()
    assert document["openapi"].startswith("3.1")
    (scheme,) = document["components"]["securitySchemes"].items()
    assert (scheme[1]["type"], scheme[1]["scheme"]) == ("http", "bearer")
    public = {
        (route.path, route.method.lower()): route
        for route in TABLES[service].routes
        if route.needs != "internal" and route.path != "/openapi.json"
    }
    found = {(path, method): one for path, methods in document["paths"].items() for method, one in methods.items()}
    assert found.keys() == public.keys()
    for which, operation in found.items():
        needs = public[which].needs
        assert operation["operationId"] == public[which].name
        assert operation["security"] == ([] if needs is None else [{scheme[0]: [needs]}])
        assert ({"401", "403"} <= operation["responses"].keys()) == (needs is not None), which
        for status, answer in operation["responses"].items():
            if status >= "400" and needs == "session":
                named = {"openai": "OpenAiError", "anthropic": "AnthropicError"}[public[which].errors]
                error = {"schema": {"$ref": f"#/components/schemas/{named}"}}
                assert answer["content"] == {"application/json": error}, (which, status)
            elif status >= "400":
                problem = answer["content"]["application/problem+json"]
                assert problem["schema"] == {"$ref": "#/components/schemas/Problem"}, (which, status)
                if not which[0].endswith("completions"):
                    assert [*answer["content"]] == ["application/problem+json"], (which, status)


@pytest.mark.parametrize("service", TABLES)
async def test_every_reference_in_the_openapi_document_leads_somewhere_and_no_schema_is_of_internal_routes(
    service: str, apps: dict[str, App]
) -> None:
    answer = await ask(apps[service], "GET", "/openapi.json", API_KEY)
    referred = set(re.findall(r'"\$ref":\s*"([^"]+)"', answer.text))
    assert referred
    assert referred == {f"#/components/schemas/{name}" for name in answer.json()["components"]["schemas"]}
    assert not {"JoinRequest", "ReplicaInfo", "EngineVerdict"} & answer.json()["components"]["schemas"].keys()


OPERATIONS = {
    "trainer": """begin_upload delete_run edit_run get_about get_liveness get_model_file get_readiness get_run
        list_dead_letters list_evaluations list_metrics list_model_files list_rollouts list_runs pause_run
        replay_dead_letter resume_run stop_run stream_events submit_run upload_module
        upload_piece""",
    "rewarder": """check_rewards delete_reward get_about get_liveness get_readiness get_reward list_rewards
        register_reward score_completions test_reward""",
    "generator": """create_chat_completion create_completion generate_completions get_about get_health get_liveness
        get_readiness list_models""",
    "sessions": """check_tools count_message_tokens count_v1_message_tokens create_session_chat_completion
        create_session_message create_session_response create_session_v1_message end_session get_about get_liveness
        get_readiness get_session list_session_models open_session report_session_reward""",
}


@pytest.mark.parametrize("service", TABLES)
async def test_operation_ids_never_change_for_generated_clients_are_made_of_them(
    service: str, apps: dict[str, App]
) -> None:
    document = (await ask(apps[service], "GET", "/openapi.json", API_KEY)).json()
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert sorted(ids) == OPERATIONS[service].split()
    names = [route.name for route in TABLES[service].routes]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("service", TABLES)
async def test_a_failure_of_ours_is_a_problem_too(service: str, apps: dict[str, App]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a secret in a bug")

    app = inside(apps[service])
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path == "/v1/about":
            route.app = request_response(lambda _request: fail())  # type: ignore[arg-type,return-value]
    failed = await ask(apps[service], "GET", "/v1/about", API_KEY)
    assert (failed.status_code, failed.headers["content-type"]) == (500, "application/problem+json")
    assert failed.json()["type"] == "/problems/internal-error"
    assert "secret" not in failed.text


async def test_a_malformed_body_of_an_internal_route_is_a_problem(apps: dict[str, App]) -> None:
    for path in ("/internal/v1/weights/join", "/internal/v1/engine/check", "/internal/v1/turns"):
        refused = await ask(apps["generator"], "POST", path, INTERNAL_KEY)
        assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json"), path
