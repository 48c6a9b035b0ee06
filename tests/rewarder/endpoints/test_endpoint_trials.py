"""Trying reward endpoints over HTTP, with the rewarder in a separate process."""

import hashlib
import hmac
import json

import httpx
import pytest
import redis

from shared.redis.keys import REWARD_ENDPOINTS
from tests.conftest import RedisServer
from tests.kept_ports import kept_port
from tests.rewarder.endpoints.routes_rig import NAMES_OF_SECRETS, register


@pytest.mark.parametrize("name", ["accuracy_reward", "my_rewards:judge"])
def test_testing_a_reward_that_is_not_an_endpoint_explains_how_to_try_it(client: httpx.Client, name: str) -> None:
    reply = client.post(f"/v1/rewards/{name}/test", json={})
    assert (reply.status_code, reply.json()["detail"]) == (
        404,
        f"'{name}' is not a reward endpoint; see GET /v1/rewards. POST /v1/score tries it.",
    )


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
    register(client, f"http://127.0.0.1:{kept_port()}/", replace=True)
    (exchange,) = client.post("/v1/rewards/judge/test", json={}).json()["exchanges"]
    assert (exchange["answer"], exchange["error"]) == (None, "no connection: Connection refused")
