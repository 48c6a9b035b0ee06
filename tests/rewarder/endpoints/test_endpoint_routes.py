"""Registering, showing and deleting reward endpoints over HTTP, with the rewarder in a separate process."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.conftest import RedisServer
from tests.rewarder.conftest import RewarderProcess, wait_for
from tests.rewarder.endpoints.routes_rig import KEY, register


def test_a_registered_endpoint_is_listed_and_shown_and_used_with_other_rewards(
    client: httpx.Client, judge_url: str
) -> None:
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
    assert again.status_code == 200, "writing out a default is not a change"
    other = register(client, judge_url, timeout_s=5)
    assert (other.status_code, other.json()["type"]) == (409, "/problems/endpoint-exists")
    assert '"replace": true' in other.json()["detail"]
    assert client.get("/v1/rewards/judge").json()["version"] == again.json()["version"]
    replaced = register(client, judge_url, timeout_s=5, replace=True)
    assert (replaced.status_code, replaced.json()["endpoint"]["timeout_s"]) == (200, 5.0)
    assert replaced.json()["version"] != again.json()["version"]


def test_a_deleted_endpoint_is_gone_and_its_use_is_refused(client: httpx.Client, judge_url: str) -> None:
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


def test_built_ins_can_be_shown_but_neither_replaced_nor_deleted(client: httpx.Client, judge_url: str) -> None:
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
        ({"headers": {"Host": "inside"}}, "Host cannot be set"),
        ({"headers": {"accept-encoding": "gzip"}}, "accept-encoding cannot be set"),
        ({"headers": {"x-a": "b\r\nx-c: d"}}, "must be printable ASCII"),
        ({"headers": {"x-a": " b"}}, "begins or ends with a space"),
        ({"headers": {"x a": "b"}}, "a header's name has letters"),
        ({"headers": {"x-a": "b", "X-A": "c"}}, "X-A occurs twice"),
        ({"signing_secret": "no-such"}, "there is no secret 'no-such'"),
        ({"wire_format": "soap"}, "wire_format"),
        ({"openrlhf": {}}, "openrlhf is only for the wire format of that name, and wire_format is trl"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"max_retries": 11}, "max_retries"),
        ({"batch_size": 0}, "batch_size"),
        ({"speed": 1}, "speed: unknown field; the known fields are url, wire_format, "),
        ({"bach_size": 1}, "bach_size: unknown field; did you mean batch_size?"),
        (
            {"wire_format": "openrlhf", "openrlhf": {"label_colum": "a"}},
            "openrlhf.label_colum: unknown field; did you mean label_column?",
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


def test_endpoints_outlive_a_rewarder_and_another_one_sees_them(
    client: httpx.Client, judge_url: str, redis_server: RedisServer, settings: dict[str, Any], tmp_path: Path
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
