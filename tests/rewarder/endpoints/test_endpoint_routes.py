"""Registering, looking at, trying and deleting reward endpoints over HTTP, against the rewarder as its own process."""

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from shared.keys import REWARD_ENDPOINTS
from tests.conftest import RedisServer, free_port
from tests.rewarder.conftest import RewarderProcess, wait_for
from tests.rewarder.endpoints.conftest import SECRET

KEY = {"Authorization": "Bearer key-of-the-test"}
NAMES_OF_SECRETS = {"judge-key": SECRET, "judge-hmac": "hmac-secret-of-the-test"}


class Judge(BaseHTTPRequestHandler):
    """A TRL endpoint: the length of each completion; it sends the key and the signature that it was sent back."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps([float(len(text)) for text in body["completions"]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("X-Your-Key", self.headers.get("Authorization", ""))
        self.send_header("X-Your-Time", self.headers.get("X-Headrace-Timestamp", ""))
        self.send_header("X-Your-Signature", self.headers.get("X-Headrace-Signature", ""))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is http.server's
        """Be quiet."""


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/score"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("secrets")
    for name, value in NAMES_OF_SECRETS.items():
        (directory / name).write_text(value)
    (directory / "bound").write_text("a-secret-for-one-host")
    (directory / "bound.hosts").write_text("judge.example\n")
    return {
        "HEADRACE_REWARD_ALLOWED_NETWORKS": "127.0.0.1/32",
        "HEADRACE_REWARD_ALLOWED_PORTS": "80,443,1024-65535",
        "HEADRACE_REWARD_SECRETS_DIR": str(directory),
        "HEADRACE_LOG_LEVEL": "DEBUG",
    }


@pytest.fixture(scope="module")
def rewarder(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, settings: dict[str, str]
) -> Iterator[RewarderProcess]:
    rewarder = RewarderProcess(redis_server.url, tmp_path_factory.mktemp("http") / "rewarder.log", **settings)
    try:
        rewarder.wait_until_ready()
        yield rewarder
        assert rewarder.stop() == 0, rewarder.log()
        for secret in NAMES_OF_SECRETS.values():
            assert secret not in rewarder.log()
    finally:
        if rewarder.process.poll() is None:
            rewarder.kill()
        with redis.Redis.from_url(redis_server.url) as stored:
            stored.delete(REWARD_ENDPOINTS)


@pytest.fixture
def client(rewarder: RewarderProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rewarder.url(""), headers=KEY, trust_env=False, timeout=60) as client:
        for listed in client.get("/v1/rewards").json()["reward_funcs"]:
            if listed["kind"] == "endpoint":
                client.delete(f"/v1/rewards/{listed['name']}")
        yield client


def register(client: httpx.Client, url: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/rewards", json={"name": "judge", "url": url, "wire_format": "trl", **fields})


def test_what_was_registered_is_listed_shown_and_used_in_any_mix(client: httpx.Client, judge_url: str) -> None:
    reply = register(client, judge_url, summary="Longer is better.")
    assert (reply.status_code, reply.headers["location"]) == (201, "/v1/rewards/judge"), reply.text
    version = reply.json()["version"]
    assert len(version) == 12
    listed = client.get("/v1/rewards").json()["reward_funcs"]
    expected: dict[str, Any] = {
        "name": "judge",
        "kind": "endpoint",
        "summary": "Longer is better.",
        "required_columns": [],
    }
    assert expected | {"version": version, "warning": ""} in listed
    shown = client.get("/v1/rewards/judge").json()
    assert shown["endpoint"]["url"] == judge_url
    assert shown["endpoint"]["timeout_s"] == 30.0
    assert shown["state"] == {"breaker": "closed", "detail": "", "requests_in_flight": 0, "requests_queued": 0}
    checked = client.post("/v1/rewards/check", json={"reward_funcs": ["judge", "think_format_reward"]})
    found = [(item["kind"], item["version"]) for item in checked.json()["reward_funcs"]]
    assert found == [("endpoint", version), ("built-in", "")]
    body = {
        "reward_funcs": ["judge", "think_format_reward"], "reward_weights": [2.0, 1.0], "prompts": ["p"],
        "completions": ["<think>a</think>b"],
    }  # fmt: skip
    scored = client.post("/v1/score", json=body).json()
    assert scored["rewards"] == [2.0 * 17 + 1.0], scored
    assert [outcome["version"] for outcome in scored["outcomes"][0]] == [version, ""]


def test_registering_the_same_again_is_harmless_and_another_needs_replace(client: httpx.Client, judge_url: str) -> None:
    assert register(client, judge_url).status_code == 201
    again = register(client, judge_url, timeout_s=30)
    assert again.status_code == 200, "a default that is spelt out is no change"
    other = register(client, judge_url, timeout_s=5)
    assert (other.status_code, other.json()["type"]) == (409, "/problems/endpoint-exists")
    assert '"replace": true' in other.json()["detail"]
    assert client.get("/v1/rewards/judge").json()["version"] == again.json()["version"]
    replaced = register(client, judge_url, timeout_s=5, replace=True)
    assert (replaced.status_code, replaced.json()["endpoint"]["timeout_s"]) == (200, 5.0)
    assert replaced.json()["version"] != again.json()["version"]


def test_what_was_deleted_is_gone_and_who_names_it_is_told(client: httpx.Client, judge_url: str) -> None:
    register(client, judge_url)
    assert client.delete("/v1/rewards/judge").status_code == 204
    for reply in (client.delete("/v1/rewards/judge"), client.get("/v1/rewards/judge")):
        assert (reply.status_code, reply.json()["type"]) == (404, "/problems/no-such-reward")
    assert client.post("/v1/rewards/judge/test", json={}).status_code == 404
    checked = client.post("/v1/rewards/check", json={"reward_funcs": ["judge"]})
    assert checked.status_code == 422
    assert "endpoint judge: it was deleted; register it again" in checked.json()["detail"]
    never = client.post("/v1/rewards/check", json={"reward_funcs": ["jugde"]}).json()["detail"]
    assert "registered with POST /v1/rewards" in never


@pytest.mark.parametrize("name", ["accuracy_reward", "my_rewards:judge"])
def test_who_tests_what_is_no_endpoint_is_told_how_to_try_it(client: httpx.Client, name: str) -> None:
    reply = client.post(f"/v1/rewards/{name}/test", json={})
    assert (reply.status_code, reply.json()["detail"]) == (
        404,
        f"'{name}' is no reward endpoint: what is known of it is in GET /v1/rewards, and POST /v1/score tries it.",
    )


def test_built_ins_can_be_looked_at_and_neither_replaced_nor_deleted(client: httpx.Client, judge_url: str) -> None:
    shown = client.get("/v1/rewards/accuracy_reward").json()
    assert (shown["kind"], shown["endpoint"]) == ("built-in", None)
    assert client.delete("/v1/rewards/accuracy_reward").status_code == 409
    for name in ("accuracy_reward", "get_soft_overlong_punishment", "check", "Judge", "a:b", "a/b", "", "-a", "a" * 65):
        reply = register(client, judge_url, name=name)
        assert reply.status_code == 422, name


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.2/", "127.0.0.2 has an address that is loopback"),
        ("http://localhost.localdomain.example@10.0.0.1/", "a user or password"),
        ("http://10.0.0.1/", "10.0.0.1 has an address that is private"),
        ("http://169.254.169.254/latest/meta-data/", "cloud metadata"),
        ("http://[::1]/", "loopback"),
        ("http://0x0a000001/", "0x0a000001 has an address that is private"),
        ("http://2130706434/", "loopback"),
        ("http://[::ffff:127.0.0.2]/", "loopback"),
        ("http://[64:ff9b::7f00:2]/", "loopback"),
        ("file:///etc/passwd", "must begin with https://"),
        ("https://judge.example:22/", "HEADRACE_REWARD_ALLOWED_PORTS"),
        ("https://judge.example/?api_key=sk-do-not", "the URL has 'api_key' in its query"),
    ],
)
def test_a_url_that_may_not_be_called_is_refused_with_a_sentence(client: httpx.Client, url: str, says: str) -> None:
    reply = register(client, url)
    assert (reply.status_code, reply.headers["content-type"]) == (422, "application/problem+json"), reply.text
    assert says in reply.json()["detail"]
    assert client.get("/v1/rewards/judge").status_code == 404


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"headers": {"Authorization": "Bearer sk-do-not"}}, "put it into a secret of the rewarder"),
        ({"headers": {"x-api-key": "sk-do-not"}}, "put it into a secret of the rewarder"),
        ({"headers": {"authorization": {"secret": "no-such"}}}, "there is no secret 'no-such'"),
        ({"headers": {"authorization": {"secret": "../../etc/passwd"}}}, "headers.authorization"),
        ({"headers": {"authorization": {"secret": "bound"}}}, "secret 'bound' may not be sent to 127.0.0.1"),
        ({"headers": {"Host": "inside"}}, "Host is not yours to set"),
        ({"headers": {"accept-encoding": "gzip"}}, "accept-encoding is not yours to set"),
        ({"headers": {"x-a": "b\r\nx-c: d"}}, "must be printable ASCII"),
        ({"headers": {"x-a": " b"}}, "begins or ends with a space"),
        ({"headers": {"x a": "b"}}, "a header's name has letters"),
        ({"headers": {"x-a": "b", "X-A": "c"}}, "X-A is there twice"),
        ({"signing_secret": "no-such"}, "there is no secret 'no-such'"),
        ({"wire_format": "soap"}, "wire_format"),
        ({"openrlhf": {}}, "openrlhf is for that wire format, and wire_format is trl"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"max_retries": 11}, "max_retries"),
        ({"batch_size": 0}, "batch_size"),
        ({"speed": 1}, "speed: there is no such field; there are url, wire_format, "),
        ({"bach_size": 1}, "bach_size: there is no such field; did you mean batch_size?"),
        (
            {"wire_format": "openrlhf", "openrlhf": {"label_colum": "a"}},
            "openrlhf.label_colum: there is no such field; did you mean label_column?",
        ),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(
    client: httpx.Client, judge_url: str, fields: dict[str, Any], says: str
) -> None:
    reply = register(client, judge_url, **fields)
    assert reply.status_code == 422, reply.text
    assert says in reply.json()["detail"]
    assert "sk-do-not" not in reply.text


def test_on_a_full_redis_a_registration_says_at_once_what_makes_room(
    client: httpx.Client, judge_url: str, redis_server: RedisServer
) -> None:
    with redis.Redis.from_url(redis_server.url) as admin:
        admin.config_set("maxmemory", "1kb")
        try:
            reply = register(client, judge_url)
        finally:
            admin.config_set("maxmemory", "0")
    assert reply.status_code == 503
    assert reply.json()["detail"].startswith("registering a reward endpoint failed: Redis is full")
    assert "OOM" not in reply.text
    assert register(client, judge_url).status_code == 201


def test_a_secret_over_plain_http_to_a_stranger_is_refused(client: httpx.Client) -> None:
    reply = register(client, "http://judge.example/", headers={"authorization": {"secret": "judge-key"}})
    assert reply.status_code == 422
    assert "would be sent over plain http://" in reply.json()["detail"]


def test_a_trial_shows_both_sides_and_no_secret(
    client: httpx.Client, judge_url: str, redis_server: RedisServer
) -> None:
    header = {"secret": "judge-key", "prefix": "Bearer "}
    register(client, judge_url, headers={"Authorization": header, "x-team": "a"}, signing_secret="judge-hmac")
    reply = client.post("/v1/rewards/judge/test", json={})
    assert reply.status_code == 200, reply.text
    (exchange,) = reply.json()["exchanges"]
    assert exchange["request"]["url"] == judge_url
    headers = exchange["request"]["headers"]
    assert (headers["authorization"], headers["x-team"]) == ("Bearer [secret]", "a")
    assert headers["x-headrace-signature"] == "[secret]"
    assert headers["x-headrace-timestamp"] == exchange["answer"]["headers"]["x-your-time"], "or none could be checked"
    signed = f"{headers['x-headrace-timestamp']}.{exchange['request']['body']}".encode()
    expected = hmac.new(NAMES_OF_SECRETS["judge-hmac"].encode(), signed, hashlib.sha256).hexdigest()
    assert exchange["answer"]["headers"]["x-your-signature"] == f"v1={expected}"
    assert json.loads(exchange["request"]["body"])["completions"] == ["6 times 7 is 42.", "It is 41."]
    assert (exchange["answer"]["status"], exchange["answer"]["body"]) == (200, "[16.0, 9.0]")
    assert exchange["answer"]["headers"]["x-your-key"] == "Bearer [secret]", "it was sent back, and is not shown"
    assert exchange["latency_s"] > 0
    assert exchange["error"] == ""
    assert [item["value"] for item in reply.json()["outcomes"]] == [16.0, 9.0]
    shown = client.get("/v1/rewards/judge").text + client.get("/v1/rewards").text + reply.text
    with redis.Redis.from_url(redis_server.url) as stored:
        shown += str(stored.hgetall(REWARD_ENDPOINTS))
    assert "judge-key" in shown
    for secret in NAMES_OF_SECRETS.values():
        assert secret not in shown


def test_a_trial_of_one_s_own_rows_and_of_an_endpoint_that_is_down(client: httpx.Client, judge_url: str) -> None:
    register(client, judge_url, batch_size=1)
    rows = {"prompts": ["p", "p"], "completions": ["abc", "d"], "columns": {"answer": ["x", "y"]}}
    reply = client.post("/v1/rewards/judge/test", json=rows).json()
    assert [json.loads(exchange["request"]["body"])["answer"] for exchange in reply["exchanges"]] == [["x"], ["y"]]
    assert [item["value"] for item in reply["outcomes"]] == [3.0, 1.0]
    many = {"prompts": ["p"] * 17, "completions": ["c"] * 17}
    assert "would take 17 requests" in client.post("/v1/rewards/judge/test", json=many).json()["detail"]
    assert client.post("/v1/rewards/judge/test", json={**rows, "completions": ["a"]}).status_code == 422
    register(client, f"http://127.0.0.1:{free_port()}/", replace=True)
    (exchange,) = client.post("/v1/rewards/judge/test", json={}).json()["exchanges"]
    assert (exchange["answer"], exchange["error"]) == (None, "no connection: Connection refused")


def test_endpoints_outlive_a_rewarder_and_another_one_sees_them(
    client: httpx.Client, judge_url: str, redis_server: RedisServer, settings: dict[str, str], tmp_path: Path
) -> None:
    first = register(client, judge_url).json()
    other = RewarderProcess(redis_server.url, tmp_path / "log", **settings)
    try:
        other.wait_until_ready()
        with httpx.Client(base_url=other.url(""), headers=KEY, trust_env=False, timeout=60) as there:
            assert there.get("/v1/rewards/judge").json() == first
            register(client, judge_url, timeout_s=7, replace=True)
            wait_for(
                lambda: there.get("/v1/rewards/judge").json()["endpoint"]["timeout_s"] == 7.0, what="the other one"
            )
            client.delete("/v1/rewards/judge")
            wait_for(lambda: there.get("/v1/rewards/judge").status_code == 404, what="the deletion")
        other.kill()
    finally:
        other.kill()
