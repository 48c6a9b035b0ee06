"""Invalid keys, missing scopes, and paths and requests that are made to be misread."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.access.route_table import GENERATOR, REWARDER, SCOPES, SESSION, SESSIONS, TRAINER, RouteTable
from tests.conftest import RedisServer
from tests.http.attacked import Judge, authorizations, scoped_key, write_keys
from tests.http.raw_client import RawClient
from tests.http.service_process import INTERNAL_KEY, KEY, SERVICES, ServiceProcess

_TABLES: dict[str, RouteTable] = {
    "trainer": TRAINER,
    "rewarder": REWARDER,
    "generator": GENERATOR,
    "sessions": SESSIONS,
}


@pytest.fixture(scope="module", params=SERVICES)
def attacked(
    request: pytest.FixtureRequest, http_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    kind: str = request.param
    top = tmp_path_factory.mktemp(kind)
    keys = write_keys(top / "api-keys")
    process = ServiceProcess(kind, http_redis.url, top, HEADRACE_API_KEYS_FILE=str(keys))
    yield process
    assert process.end() == 0, process.log()


def concrete(path: str) -> str:
    for part in ("run_id", "entry", "name", "session_id"):
        path = path.replace("{" + part + "}", "0-1")
    return path


async def test_no_key_opens_what_it_has_no_scope_for(attacked: ServiceProcess) -> None:
    judge = Judge(attacked.log_file.parent, attacked)
    async with attacked.client("") as client:
        for route in _TABLES[attacked.kind].routes:
            if route.needs is None:
                continue
            path = concrete(route.path)
            shown = {scope: f"Bearer {scoped_key(scope)}" for scope in SCOPES} | {"internal": f"Bearer {INTERNAL_KEY}"}
            if attacked.kind == "rewarder":
                del shown["internal"]
            for scope, authorization in shown.items():
                reply = await client.request(route.method, path, headers={"Authorization": authorization}, content=b"{")
                name = f"{route.method} {path} with {scope}"
                is_closed = reply.status_code in (401, 403)
                if is_closed != (scope != route.needs):
                    judge.wrong.append(f"{name}: {reply.status_code}")
                if is_closed:
                    judge.look_at(name, reply, statuses=(401, 403))
    assert judge.wrong == []
    assert judge.num_attempts >= 30


async def test_a_key_that_is_shown_otherwise_is_none(attacked: ServiceProcess) -> None:
    judge = Judge(attacked.log_file.parent, attacked)
    base = f"http://127.0.0.1:{attacked.port}"
    routes = [route for route in _TABLES[attacked.kind].routes if route.needs not in (None, "internal")][:4]
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
        for route in routes:
            path = concrete(route.path)
            for name, headers in authorizations(KEY):
                reply = await client.request(route.method, path, headers=headers)
                judge.look_at(f"{path}, {name}", reply, statuses=(401, 431, 400))
            for query in ("key", "api_key", "token", "access_token", "authorization"):
                reply = await client.request(route.method, path, params={query: KEY})
                # The application checks a session's key, which is after the query.
                judge.look_at(f"{path}?{query}", reply, statuses=(422,) if route.needs == SESSION else (401,))
    assert judge.wrong == []
    assert judge.num_attempts >= 100


_PATHS = (
    "/livez/../v1/about", "/livez/..%2fv1/about", "/livez%2f..%2fv1%2fabout", "/livez/%2e%2e/v1/about",
    "/livez;/v1/about", "/livez/", "/livez/v1/about", "/livez//v1/about", "/livez%00/v1/about", "/livez%0a", "/LIVEZ",
    "/livez?/../v1/about", "//v1/about", "/./v1/about", "/v1/./about", "/v1//about", "/v1/about/", "/V1/about",
    "/v1/ABOUT", "/v1%2fabout", "/v1/about%20", "/v1/about%00", "/v1/about;a=b", "/v1/about.json", "/v1/about%3f",
    "/v1/about%23", "/%76%31/about", "/%2576%2531/about", "/v1/%61bout", "/v1/%2561bout", "/v1\\about", "/v1%5cabout",
    "/x/../v1/about", "/x/%2e%2e/v1/about", "/internal/../v1/about", "/internal/v1/about",
    "/internal/v1/../../v1/about", "/internal%2fv1%2fabout", "/v1/runs/..%2f..%2finternal%2fv1%2fabout",
    "/v1/runs/0-1%2fpause", "/v1/runs/0-1%252fpause", "/v1/runs/%2e%2e", "/v1/runs/..;/about",
    "/v1/rewards/%2e%2e/score", "/v1/rewards/check%2f..", "/openapi.json/", "/openapi.json%00.html",
    "/docs/..%2fopenapi.json", "/metrics", "/replicas/../v1/about", "/replicas/x/v1/about",
    "/replicas/%2e%2e/internal/v1/about", "/proc/self/environ", "/..%2f..%2fetc%2fpasswd", "/static/../../etc/passwd",
    "/.git/config", "/v1/runs/\u2025/about", "/v1/\uff41bout", "http://127.0.0.1/v1/about",
    "http://x/internal/v1/about", "https://x/v1/about", "x:80", "*",
)  # fmt: skip
_OVERRIDES = (
    "X-HTTP-Method-Override: GET", "X-HTTP-Method: GET", "X-Method-Override: GET", "X-Original-URL: /v1/about",
    "X-Rewrite-URL: /v1/about", "X-Forwarded-For: 127.0.0.1", "X-Forwarded-Host: localhost", "X-Forwarded-Prefix: /v1",
    "X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1", "X-Script-Name: /v1", "X-Envoy-Original-Path: /v1/about",
    "X-User: admin", "X-Remote-User: admin", "X-Internal-Key: x", "Upgrade: websocket", "Upgrade: h2c",
    "Connection: Authorization", "Host: localhost", "Expect: 200-ok",
)  # fmt: skip


async def said(attacked: ServiceProcess, data: bytes) -> bytes:
    async with RawClient.to(attacked.port) as client:
        await client.send(data)
        return await client.until_closed()


def judged(name: str, answer: bytes) -> list[str]:
    """Return the problems of the responses on one connection: more than one response, a success, or another format."""
    head, _, body = answer.partition(b"\r\n\r\n")
    wrong = [f"{name}: {answer[:300]!r}"]
    if answer.count(b"HTTP/1.1 ") != 1 or b"release" in body or not 400 <= int(head.split()[1]) < 500:
        return wrong
    return [] if b"problem+json" in head and {"title", "status"} <= json.loads(body).keys() else wrong


async def test_a_path_or_a_header_that_can_be_misread_leads_past_no_door(attacked: ServiceProcess) -> None:
    attempts = {path: f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" for path in _PATHS}
    attempts |= {f"{path}, 1.0": f"GET {path} HTTP/1.0\r\n\r\n" for path in _PATHS[:40]}
    for line in _OVERRIDES:
        attempts[line] = f"GET /v1/about HTTP/1.1\r\nHost: x\r\n{line}\r\nConnection: close\r\n\r\n"
        attempts[f"{line} to a POST"] = (
            f"POST /livez HTTP/1.1\r\nHost: x\r\n{line}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
    wrong: list[str] = []
    for name, data in attempts.items():
        wrong += judged(name, await said(attacked, data.encode()))
    # The probe needs no key, whatever its query string or method override header says.
    assert [one for one in wrong if not one.startswith(("/livez?/../v1/about", "x:80", "*"))] == []


_SECOND = b"GET /v1/about HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n" % KEY.encode()
_POST = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_CHUNKED = b"0\r\n\r\n"


def smuggled() -> Iterator[tuple[str, bytes]]:
    """Yield requests whose end two readers could see at different places, so that the rest would be another request."""
    length = b"Content-Length: %d\r\n" % (len(_CHUNKED) + len(_SECOND))
    codings = (
        b"chunked", b"Chunked", b" chunked", b"chunked ", b"xchunked", b"chunked, identity",
        b"identity, chunked", b"gzip",
        b"chunked\t", b"\x0bchunked", b"'chunked'", b"chunked;x", b"chunked, chunked", b"identity", b"",
    )  # fmt: skip
    for coding in codings:
        both = b"Transfer-Encoding: %s\r\n" % coding
        yield f"length, then {coding!r}", _POST + length + both + b"\r\n" + _CHUNKED + _SECOND
        yield f"{coding!r}, then length", _POST + both + length + b"\r\n" + _CHUNKED + _SECOND
        yield f"two codings {coding!r}", _POST + both + b"Transfer-Encoding: identity\r\n\r\n" + _CHUNKED + _SECOND
    for first, second in ((b"0", b"5"), (b"5", b"0"), (b"+0", b"0"), (b"-1", b"0"), (b"0x5", b"5"), (b"5,5", b"0")):
        lengths = b"Content-Length: %s\r\nContent-Length: %s\r\n" % (first, second)
        yield f"lengths {first!r} and {second!r}", _POST + lengths + b"\r\n" + b"hello" + _SECOND
    for wrong in (
        b"Content-Length : 5\r\n",
        b"Content-Length\r\n",
        b"Content_Length: 5\r\n",
        b" Content-Length: 5\r\n",
    ):
        yield repr(wrong), _POST + wrong + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + _SECOND
    for chunk in (
        b"-1\r\n\r\n",
        b"0x0\r\n\r\n",
        b"5\r\nhel",
        b"5;\n\r\n",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"0\n\n",
        b"\r\n0\r\n",
    ):
        yield f"chunk {chunk!r}", _POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + _SECOND
    yield "bare line feeds", (_POST + length + b"\r\n").replace(b"\r\n", b"\n") + _SECOND
    yield "folded", _POST + b"X: a\r\n Transfer-Encoding: chunked\r\n" + length + b"\r\n" + _CHUNKED + _SECOND
    yield "a NUL", _POST + b"X: a\0b\r\n" + length + b"\r\n" + _CHUNKED + _SECOND


async def test_a_request_of_which_two_readers_could_disagree_where_it_ends_is_the_last_on_its_connection(
    attacked: ServiceProcess,
) -> None:
    async def attempt(name: str, data: bytes) -> str:
        async with RawClient.to(attacked.port) as client:
            await client.send(data)
            answer = b""
            while b"HTTP/1.1 2" not in answer and (more := await client.some(within_s=2)):
                answer += more
        return f"{name}: {answer[-300:]!r}" if b"HTTP/1.1 2" in answer else ""

    found = await asyncio.gather(*(attempt(name, data) for name, data in smuggled()))
    assert [one for one in found if one] == []
    assert len(found) >= 60


@pytest.fixture(autouse=True)
def _outlives_it(attacked: ServiceProcess) -> Iterator[None]:
    yield
    judge = Judge(Path(attacked.log_file.parent), attacked)
    judge.conclude(at_least=0)
