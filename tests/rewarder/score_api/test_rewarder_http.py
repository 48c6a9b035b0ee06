"""The rewarder's routes over real HTTP: valid requests are answered, invalid ones get a message."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.rewarder.built_ins.built_in_rewards import BUILT_INS
from tests.conftest import RedisServer
from tests.kept_ports import kept_port
from tests.rewarder.conftest import RewarderProcess, shared_rewarder, user
from tests.shared_process import SharedProcess

KEY = {"Authorization": "Bearer key-of-the-test"}


@pytest.fixture(scope="module")
def shared(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedProcess[RewarderProcess]]:
    log_file = tmp_path_factory.mktemp("http") / "rewarder.log"
    with shared_rewarder(redis_server.url, log_file, HEADRACE_METRICS_PORT=str(kept_port())) as shared:
        yield shared


def score(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/score", json={"prompts": ["p", "p"], "completions": ["42", "41"], **body})


def test_every_route_but_health_asks_for_the_key(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        "/livez", "/readyz", "/v1/about", "/v1/rewards", "/v1/rewards/check", "/v1/rewards/{name}",
        "/v1/rewards/{name}/test", "/v1/score",
    }  # fmt: skip
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    for method, path in [*routes, ("get", "/openapi.json"), ("get", "/docs"), ("get", "/nowhere")]:
        reply = client.request(method, path, headers={"Authorization": "Bearer another"})
        assert reply.status_code == (200 if path in ("/livez", "/readyz") else 401), path


def test_the_openapi_document_is_3_1_and_names_the_problems(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"200", "400", "401", "413", "415", "422", "429"} <= set(document["paths"]["/v1/score"]["post"]["responses"])


def test_the_openapi_document_says_which_scope_the_key_of_a_route_needs(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    (scheme,) = document["components"]["securitySchemes"].items()
    assert (scheme[1]["type"], scheme[1]["scheme"]) == ("http", "bearer")
    paths = document["paths"]
    assert paths["/livez"]["get"]["security"] == paths["/readyz"]["get"]["security"] == []
    assert paths["/v1/score"]["post"]["security"] == [{scheme[0]: ["score"]}]
    assert paths["/v1/rewards"]["post"]["security"] == [{scheme[0]: ["operate"]}]
    for path, operations in paths.items():
        for operation in operations.values():
            assert path in ("/livez", "/readyz") or {"401", "403"} <= set(operation["responses"]), path


def test_a_wrong_method_gets_the_allowed_methods(client: httpx.Client) -> None:
    assert client.get("/v1/score").headers["allow"] == "POST"
    assert client.put("/v1/rewards").headers["allow"] == "GET, HEAD, POST"
    assert client.put("/v1/rewards/judge").headers["allow"] == "DELETE, GET, HEAD"
    assert client.put("/v1/rewards/check").headers["allow"] == "POST"


def test_the_built_ins_are_listed_with_what_they_need(client: httpx.Client) -> None:
    listed = {item["name"]: item for item in client.get("/v1/rewards").json()["reward_funcs"]}
    assert set(listed) == set(BUILT_INS)
    assert listed["accuracy_reward"]["required_columns"] == [["solution", "answer"]]
    assert "math-verify" in listed["accuracy_reward"]["summary"]


def test_reward_functions_are_listed_in_pages(client: httpx.Client) -> None:
    seen: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = client.get("/v1/rewards", params=params).raise_for_status().json()
        assert len(page["reward_funcs"]) <= 2
        seen += [item["name"] for item in page["reward_funcs"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert seen == sorted(BUILT_INS)
    refused = client.get("/v1/rewards", params={"cursor": "canary"})
    assert (refused.status_code, refused.json()["type"]) == (400, "/problems/bad-cursor")


def test_valid_functions_are_described_by_their_kind(client: httpx.Client) -> None:
    names = ["accuracy_reward", user("exact"), user("half_a_second"), user("one")]
    reply = client.post("/v1/rewards/check", json={"reward_funcs": names})
    assert reply.status_code == 200, reply.text
    found = reply.json()["reward_funcs"]
    assert [item["name"] for item in found] == names
    assert [item["kind"] for item in found] == ["built-in", "sync", "async", "sync"]
    assert found[1]["required_columns"] == [["answer"]]
    assert found[3]["summary"] == "1.0 for every completion."


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "acuracy_reward",
            "'acuracy_reward' is not a built-in reward. Did you mean 'accuracy_reward'? A function of your own",
        ),
        ("my_rewards.judge", "'my_rewards.judge' is not a built-in reward; did you mean 'my_rewards:judge'?"),
        (
            "my_rewards:judge",
            "no module named my_rewards: put my_rewards.py into one of the directories of HEADRACE_REWAR",
        ),
        ("os.path:no such", "'os.path:no such' is not of the form 'package.module:function'"),
        (user("exakt"), "module rewards_under_test has no function exakt. Did you mean exact? It has: one, exact,"),
        (user("NOT_A_FUNCTION"), "'NOT_A_FUNCTION' in module rewards_under_test is not a function; its type is int"),
        (
            "needy_rewards:one",
            "module needy_rewards imports no_such_package_anywhere, which is not installed where the",
        ),
        ("broken_rewards:f", "importing broken_rewards failed: KeyError: 'unknown' (broken_rewards.py, line 4)"),
        ("exiting_rewards:f", "importing exiting_rewards ended with SystemExit: 4"),
    ],
)
def test_a_function_that_cannot_be_used_gets_a_sentence(client: httpx.Client, name: str, says: str) -> None:
    reply = client.post("/v1/rewards/check", json={"reward_funcs": [user("one"), name]})
    assert reply.status_code == 422
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["type"] == "/problems/unusable-reward-functions"
    (error,) = reply.json()["errors"]
    assert error["field"] == name
    assert error["message"].startswith(says), error["message"]
    assert "Traceback" not in reply.text


def test_a_module_that_hangs_on_import_is_refused_and_the_service_goes_on(
    rewarder: RewarderProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    impatient = RewarderProcess(redis_server.url, tmp_path / "log", HEADRACE_CHECK_TIMEOUT_S="2")
    try:
        impatient.wait_until_ready()
        with httpx.Client(base_url=impatient.url(""), headers=KEY, trust_env=False, timeout=60) as client:
            reply = client.post("/v1/rewards/check", json={"reward_funcs": ["hanging_rewards:f"]})
            assert reply.status_code == 422
            assert reply.json()["detail"] == "importing hanging_rewards took longer than 2 s"
            assert score(client, reward_funcs=[user("one")]).json()["rewards"] == [1.0, 1.0]
    finally:
        impatient.kill()


def test_a_large_body_that_is_wrong_everywhere_gets_a_short_answer(client: httpx.Client) -> None:
    reply = score(client, reward_funcs=[user("one")], completion_ids=[["x"] * 1000] * 1000)
    assert reply.status_code == 422
    assert [error["field"] for error in reply.json()["errors"]] == ["completion_ids.0.0"]
    reply = score(client, reward_funcs=[1] * 64, prompts=[1] * 4096)
    assert reply.status_code == 422
    assert len(reply.json()["errors"]) == 100
    for num_fields, said in (
        (200, "100 fields"),
        (100_000, "100000 arrays, objects and object keys, or 2000000 values"),
    ):
        reply = score(client, **{f"field_{number}": 1 for number in range(num_fields)})
        assert reply.status_code == 422
        assert reply.json()["detail"] == f"The body has more than {said}."


def test_a_function_that_does_not_apply_is_left_out_of_the_sum(client: httpx.Client) -> None:
    reply = score(
        client,
        reward_funcs=["accuracy_reward", user("exact")],
        reward_weights=[3.0, 0.5],
        completions=[r"\boxed{42}", "no idea"],
        columns={"solution": ["42", "nobody knows"], "answer": [r"\boxed{42}", "no idea"]},
    )
    assert [item["outcome"] for item in reply.json()["outcomes"][1]] == ["not_applicable", "scored"]
    assert reply.json()["rewards"] == [3.5, 0.5]


def test_a_conversation_can_be_scored(client: httpx.Client) -> None:
    reply = score(
        client,
        reward_funcs=[user("roles")],
        prompts=[[{"role": "user", "content": "6 * 7?"}]],
        completions=[[{"role": "assistant", "content": "42"}]],
    )
    assert reply.json()["rewards"] == [1.0], reply.text


def test_an_unknown_function_in_a_batch_is_an_outcome(client: httpx.Client) -> None:
    reply = score(client, reward_funcs=["vanished:f", user("one")])
    assert [item["outcome"] for item in reply.json()["outcomes"][0]] == ["error", "scored"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"reward_funcs": []}, "reward_funcs: List should have at least 1 item"),
        ({"reward_funcs": ["think_format_reward"], "reward_func": "x"}, "did you mean reward_funcs?"),
        ({"reward_funcs": ["a"], "tmeout_s": 5}, "tmeout_s: unknown field; did you mean timeout_s?"),
        ({"reward_funcs": ["a"], "zzz": 5}, "zzz: unknown field; the known fields are prompts, "),
        ({"reward_funcs": ["think_format_reward"], "timeout_s": "5"}, "timeout_s: Input should be a valid number"),
        ({"reward_funcs": ["think_format_reward"], "completions": ["a"]}, "there are 2 prompts, but completions has 1"),
        ({"reward_funcs": ["think_format_reward"], "columns": {"a": [1]}}, "there are 2 prompts, but a has 1"),
        ({"reward_funcs": ["think_format_reward"], "reward_weights": [1.0, 2.0]}, "has 2 entries for 1 reward_funcs"),
        (
            {"reward_funcs": ["a"], "completions": [[], [{"role": "assistant", "content": "b"}]]},
            "completions: entry 0 is a list without messages; send text, or at least one message",
        ),
        (
            {"reward_funcs": ["a"], "prompts": [[{"role": "user", "content": "p"}], []]},
            "prompts: entry 1 is a list without messages",
        ),
    ],
)
def test_a_bad_body_gets_a_sentence(client: httpx.Client, body: dict[str, Any], says: str) -> None:
    reply = score(client, **body)
    assert reply.status_code == 422
    assert reply.headers["content-type"] == "application/problem+json"
    assert says in reply.json()["detail"]


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
@pytest.mark.parametrize("path", ["/v1/score", "/v1/rewards/check"])
def test_json_that_is_not_declared_as_json_is_a_415(client: httpx.Client, path: str, headers: dict[str, str]) -> None:
    reply = client.post(path, content='{"reward_funcs": ["accuracy_reward"]}', headers=headers)
    assert (reply.status_code, reply.json()["type"]) == (415, "/problems/not-json")
    assert reply.json()["detail"] == "Send JSON, with the header 'Content-Type: application/json'."


@pytest.mark.parametrize("body", [b"", b"{", b'{"timeout_s": NaN}', b'{"a": "\\ud800"}', b'"\xff"', b"[" * 100_000])
def test_a_body_that_is_not_json_is_a_400(client: httpx.Client, body: bytes) -> None:
    reply = client.post("/v1/score", content=body, headers={"Content-Type": "application/json; charset=utf-8"})
    assert (reply.status_code, reply.json()["type"]) == (400, "/problems/malformed-json")
    assert "errors" not in reply.json(), "the error has no field to name"


@pytest.mark.parametrize("body", ["[]", '"run"', "null", "7"])
def test_json_that_is_not_an_object_is_a_422(client: httpx.Client, body: str) -> None:
    reply = client.post("/v1/score", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["detail"]) == (422, "The body must be a JSON object.")


def test_a_missing_argument_of_a_function_is_named(client: httpx.Client) -> None:
    reply = score(client, reward_funcs=["soft_overlong_punishment_reward"])
    assert reply.json()["outcomes"][0][0]["detail"] == (
        "needs 'completion_ids', which only a run sets by itself: send it in the request, "
        "one list of token ids for each completion"
    )
    reply = score(client, reward_funcs=["soft_overlong_punishment_reward"], completion_ids=[[1], [2]])
    assert reply.json()["outcomes"][0][0]["detail"] == (
        "needs 'max_completion_length', which only a run sets by itself: send it in the request"
    )


ROW = '"prompts": ["p"], "completions": ["c"]'
THINK = '"reward_funcs": ["think_format_reward"]'


@pytest.mark.parametrize(
    "raw",
    [
        f'{{{THINK}, {ROW}, "timeout_s": NaN}}',
        f'{{{THINK}, {ROW}, "reward_weights": [1e999]}}',
        f'{{{THINK}, {ROW}, "columns": {{"a": [NaN]}}}}',
        f'{{{THINK}, "prompts": ["p"], "completions": ["secret \\ud800"]}}',
        f'{{"reward_funcs": ["secret \\ud800"], {ROW}}}',
        f'{{{THINK}, {ROW}, "columns": {{"\\ud800": [1]}}}}',
        f'{{{THINK}, {ROW}, "columns": {{"a": ["\\ud800"]}}}}',
        f'{{{THINK}, {ROW}, "columns": {{"a": [{"[" * 900 + "]" * 900}]}}}}',
        f'{{{THINK}, {ROW}, "columns": {{"a": [{"[" * 100_000 + "]" * 100_000}]}}}}',
        '{"secret": ',
        "[]",
        "",
    ],
    ids=lambda raw: raw[:70],
)
def test_a_body_meant_to_break_is_a_4xx_that_does_not_repeat_it(client: httpx.Client, raw: str) -> None:
    reply = client.post("/v1/score", content=raw, headers={"Content-Type": "application/json"})
    assert reply.status_code in (400, 422), reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    assert "secret" not in reply.text
    assert client.get("/livez").status_code == 200


def test_a_body_that_is_too_large_is_413(client: httpx.Client) -> None:
    assert score(client, reward_funcs=["a"], completions=["x" * 9_000_000, ""]).status_code == 413


def test_an_unknown_route_and_a_wrong_method_are_problems(client: httpx.Client) -> None:
    for reply, status in ((client.get("/v1/nothing"), 404), (client.get("/v1/score"), 405)):
        assert (reply.status_code, reply.headers["content-type"]) == (status, "application/problem+json")
    assert client.get("/v1/score").headers["allow"] == "POST"


def test_the_metrics_count_outcomes_by_function(rewarder: RewarderProcess, client: httpx.Client) -> None:
    score(client, reward_funcs=["think_format_reward"])
    port = next(
        value.partition(b"=")[2].decode()
        for value in Path(f"/proc/{rewarder.process.pid}/environ").read_bytes().split(b"\0")
        if value.startswith(b"HEADRACE_METRICS_PORT=")
    )
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=120).text
    assert 'headrace_reward_outcomes_total{function="think_format_reward",outcome="scored"}' in text
    assert 'headrace_reward_seconds_bucket{function="think_format_reward",le="0.001",outcome="scored"}' in text
    assert 'headrace_replica_info{replica_id="rewarder-0"} 1.0' in text
    assert "headrace_reward_groups_in_flight 0.0" in text
    for queue, lane in (("workers", "run"), ("workers", "http"), ("requests", "http")):
        assert f'headrace_reward_queue_depth{{lane="{lane}",queue="{queue}"}} 0.0' in text
    assert 'headrace_reward_calls_in_flight{function="think_format_reward"} 0.0' in text
    assert 'headrace_reward_value_mean{function="think_format_reward"} 0.0' in text
    assert 'headrace_reward_value_std{function="think_format_reward"} 0.0' in text
