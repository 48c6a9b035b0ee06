"""Sessions over real HTTP with OpenAI's client: turns, repeated requests, keys, refusals."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from services.sessions.recording.recorded import Entry
from services.sessions.session import Session
from shared.service.logs import AUDIT_LOGGER
from shared.turns import ChatMessage, TurnRefusedError, TurnRequest
from tests.eventually import eventually
from tests.sessions.scripted import assistant, call, tool, user
from tests.sessions.session_api.serving import ADD, KEY, QUESTION, Service, serving

openai = pytest.importorskip("openai")


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **more)


async def ask_and_leave(service: Service, session: dict[str, Any]) -> None:
    """Ask for a turn, and disconnect while it is sampled."""
    headers = {"authorization": f"Bearer {session['api_key']}"}
    body = {"model": "any", "messages": QUESTION}
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=120) as client:
        asking = asyncio.create_task(client.post(f"{session['base_url']}/chat/completions", json=body))
        await eventually(lambda: service.generators.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_openais_client_plays_a_session_with_a_tool() -> None:
    def policy(request: TurnRequest) -> ChatMessage:
        return assistant("", call("add", '{"a": 2}')) if len(request.messages) == 1 else assistant("4")

    async with serving(policy) as service:
        session = await service.open()
        assert session["base_url"] == f"{service.url}/v1/sessions/{session['id']}"
        async with service.client(session) as client:
            first = await ask(client, QUESTION, tools=[ADD], tool_choice="required", temperature=0.0)
            assert first.choices[0].finish_reason == "tool_calls"
            said = first.choices[0].message
            second = await ask(client, [*QUESTION, said, tool("4", said.tool_calls[0].id)], tools=[ADD])
            assert second.choices[0].message.content == "4"
            assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
            assert [model.id async for model in client.models.list()] == ["policy"]
        seen = await service.view(session)
        assert (seen["state"], seen["turns"], seen["rows"]) == ("open", 2, 1)
    # The second request continues the recorded ids.
    assert service.generators.requests[1].num_recorded_messages == 2


async def test_the_opening_of_a_session_is_a_line_in_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=AUDIT_LOGGER):
        async with serving() as service:
            await service.open()
    told = [record.getMessage() for record in caplog.records if record.name == AUDIT_LOGGER]
    assert told == ["session.open run-test by api-key: done (201)"]


async def test_a_streamed_turn_is_the_same_turn() -> None:
    async with serving() as service, service.client(await service.open()) as client:
        pieces = [
            piece async for piece in await ask(client, QUESTION, stream=True, stream_options={"include_usage": True})
        ]
        text = "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices)
        assert (text, pieces[-1].usage.completion_tokens) == ("0", 2)
        whole = await ask(client, QUESTION)
        assert whole.id == pieces[0].id
    assert len(service.generators.requests) == 1


async def test_a_client_that_was_cut_off_in_mid_turn_gets_the_same_turn_when_it_asks_again() -> None:
    async with serving() as service:
        service.generators.may_answer.clear()
        session = await service.open()
        await ask_and_leave(service, session)
        assert len(service.generators.requests) == 1
        async with service.client(session) as client:
            again = [asyncio.create_task(ask(client, QUESTION)) for _ in range(2)]
            await asyncio.sleep(0.1)
            service.generators.may_answer.set()
            first, second = await asyncio.gather(*again)
            assert first.id == second.id == (await ask(client, QUESTION, temperature=1.0)).id
            other = await ask(client, QUESTION, seed=1)
            assert other.id != first.id
    assert len(service.generators.requests) == 2


async def test_a_client_that_has_gone_no_longer_counts_among_the_turns() -> None:
    async with serving(max_turns=1) as service:
        service.generators.may_answer.clear()
        session = await service.open()
        await ask_and_leave(service, session)
        async with service.client(session, max_retries=10) as client:  # the service may notice it a moment later
            again = asyncio.create_task(ask(client, QUESTION))
            refused, _ = await asyncio.wait({again}, timeout=4)
            assert not refused, "it waits for its turn"
            service.generators.may_answer.set()
            assert (await again).choices[0].message.content == "0"
    assert len(service.generators.requests) == 1


async def test_a_turn_whose_client_has_gone_counts_until_it_is_whole() -> None:
    async with serving(max_turns=1) as service:
        service.generators.may_answer.clear()
        session = await service.open()
        await ask_and_leave(service, session)
        async with service.client(session, max_retries=0) as client:
            for seed in range(20):  # the service may notice a moment later that the client has gone
                with pytest.raises(openai.RateLimitError):
                    await ask(client, QUESTION, seed=seed)
                await asyncio.sleep(0.05)
            service.generators.may_answer.set()
        async with service.client(session, max_retries=10) as client:
            assert (await ask(client, QUESTION)).choices[0].message.content == "0"
    assert len(service.generators.requests) == 1


async def test_a_session_that_is_over_refuses_turns_and_can_still_be_read() -> None:
    async with serving() as service:
        session = await service.open()
        async with service.client(session, max_retries=0) as client:
            await ask(client, QUESTION)
            await client.post("/reward", body={"reward": 0.5}, cast_to=httpx.Response)
            ended = (await client.post("/end", cast_to=httpx.Response)).json()
            assert (ended["state"], ended["reward"]) == ("over", 0.5)
            with pytest.raises(openai.APIStatusError) as refused:
                await ask(client, QUESTION)
            assert refused.value.status_code == 410
            assert refused.value.code == "session_over"
            assert "is over; open another one" in refused.value.message
        assert (await service.view(session))["turns"] == 1


async def test_the_turns_of_a_session_that_is_over_are_freed_and_still_counted() -> None:
    async with serving() as service:
        session = await service.open()
        async with service.client(session, max_retries=0) as client:
            first = await client.responses.create(model="policy", input="2+2?")
            await ask(client, QUESTION, seed=1)
            await client.post("/end", cast_to=httpx.Response)
            opened = service.sessions.find(session["id"], [session["api_key"]])
            await eventually(lambda: opened.session.recording.num_turns == 0, within_s=10)
            with pytest.raises(openai.APIStatusError) as refused:
                await client.responses.create(model="policy", input="And?", previous_response_id=first.id)
            assert refused.value.status_code == 410
        view = await service.view(session)
        assert (view["state"], view["turns"], view["rows"]) == ("over", 2, 2)


async def test_a_session_ends_at_its_deadline() -> None:
    async with serving() as service, service.client(await service.open(deadline_s=0.05), max_retries=0) as client:

        async def is_over() -> bool:
            try:
                await client.models.list()
            except openai.APIStatusError as error:
                return bool(error.status_code == 410)
            return False

        await eventually(is_over)


async def ignore(_number: int, _entry: Entry) -> None:
    """Store nothing."""


async def test_turns_of_clients_have_a_limit_and_those_of_rollouts_do_not_count() -> None:
    async with serving(max_turns=1) as service:
        service.generators.may_answer.clear()
        session = await service.open()
        rollout = Session("r", run_id="run-test", generators=service.generators, record=ignore)
        with service.sessions.opened(rollout, run_id="run-test", max_completion_length=64) as opened:
            of_rollout = {"base_url": opened.base_url, "api_key": opened.api_key}
            async with service.client(session, max_retries=0) as client, service.client(of_rollout) as program:
                waiting = [asyncio.create_task(ask(client, QUESTION))]
                await eventually(lambda: service.generators.requests)
                with pytest.raises(openai.RateLimitError) as refused:
                    await ask(client, [user("another")])
                assert (refused.value.code, refused.value.response.headers["retry-after"]) == ("too_many_turns", "1")
                waiting += [asyncio.create_task(ask(program, [user(f"{number}")])) for number in range(3)]
                await eventually(lambda: len(service.generators.requests) == 4)
                service.generators.may_answer.set()
                await asyncio.gather(*waiting)


async def test_a_session_ends_with_its_run() -> None:
    async with serving() as service:
        service.generators.may_answer.clear()
        async with service.sessions.serving("run-short", service.generators, max_completion_length=1):
            session = await service.open(run_id="run-short")
            client = service.client(session, max_retries=0)
            waiting = asyncio.create_task(ask(client, QUESTION))
            await eventually(lambda: service.generators.requests)
        async with client:
            for asking in (waiting, ask(client, QUESTION)):
                with pytest.raises(openai.APIStatusError) as refused:
                    await asking
                assert refused.value.status_code == 410


async def test_a_turn_under_way_when_its_session_ends_is_refused() -> None:
    async with serving() as service:
        service.generators.may_answer.clear()
        session = await service.open()
        async with service.client(session, max_retries=0) as client:
            waiting = asyncio.create_task(ask(client, QUESTION))
            await eventually(lambda: service.generators.requests)
            await client.post("/end", cast_to=httpx.Response)
            with pytest.raises(openai.APIStatusError) as refused:
                await waiting
            assert refused.value.status_code == 410


async def test_only_the_sessions_own_key_opens_it() -> None:
    async with serving() as service:
        mine, other = await service.open(), await service.open()
        unknown = {**mine, "base_url": f"{service.url}/v1/sessions/nothing"}
        shown = [{**mine, "api_key": key} for key in (other["api_key"], KEY, "internal", "nonsense")]
        for session in (*shown, unknown):
            async with service.client(session, max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await ask(client, QUESTION)
            assert refused.value.body["code"] == "key_required"
            assert "not the key of this session" in refused.value.message
        async with httpx.AsyncClient(trust_env=False) as http:
            no_key = await http.get(mine["base_url"])
        assert (no_key.status_code, no_key.headers["www-authenticate"]) == (401, "Bearer")
        # A session's key opens nothing else.
        for path in ("/v1/about", "/openapi.json", "/v1/sessions"):
            headers = {"authorization": f"Bearer {mine['api_key']}"}
            method = "POST" if path == "/v1/sessions" else "GET"
            refused_too = await service.http.request(method, path, headers=headers, json={"run_id": "run-test"})
            assert refused_too.status_code == 401, path
    assert service.generators.requests == []


async def test_bad_requests_are_errors_in_openais_form() -> None:
    def policy(request: TurnRequest) -> ChatMessage:
        raise TurnRefusedError("the conversation has 10000 tokens, and the context 100", kind="context_length")

    async with serving(policy) as service:
        session = await service.open()
        headers = {"authorization": f"Bearer {session['api_key']}", "content-type": "application/json"}
        chat = f"{session['base_url']}/chat/completions"
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=120) as http:

            async def refusal(path: str, content: bytes, **more: str) -> tuple[int, str, str]:
                response = await http.post(path, content=content, headers=more)
                assert response.headers["content-type"] == "application/json"
                error = response.json()["error"]
                assert error["message"]
                assert "Traceback" not in response.text
                return response.status_code, error["type"], error["code"]

            invalid = "invalid_request_error"
            assert await refusal(chat, b"{") == (400, invalid, "malformed_json")
            assert await refusal(chat, b"{}") == (400, invalid, "invalid_request")
            deep = b'{"messages":[{"role":"user","content":' + b"[" * 5000 + b"]" * 5000 + b"}]}"
            assert (await refusal(chat, deep))[0] == 400
            assert await refusal(chat, b'{"messages":[{"role":"user"}],"n":3}') == (400, invalid, "unsupported_option")
            assert await refusal(chat, b'{"messages":[{"content":"no role"}]}') == (400, invalid, "turn_refused")
            assert await refusal(chat, b"x" * (9 << 20)) == (413, invalid, "body_too_large")
            assert await refusal(chat, b"{}", **{"content-type": "text/plain"}) == (415, invalid, "not_json")
            assert await refusal(f"{session['base_url']}/nothing", b"{}") == (404, invalid, "not_found")
            assert await refusal(f"{session['base_url']}/reward", b'{"reward": "1"}') == (
                400,
                invalid,
                "invalid_request",
            )
            secret = await http.post(chat, content=b'{"messages":[{"role":"user","content":{"secret":"canary"}}]}')
            assert (secret.status_code, "canary" in secret.text) == (400, False)
            many = b'{"messages":[' + b",".join([b'{"role":"user","content":"hello"}'] * 10_000) + b"]}"
            assert await refusal(chat, many) == (400, invalid, "context_length_exceeded")


async def test_sessions_are_opened_only_for_runs_that_are_served_and_not_without_end() -> None:
    async with serving(max_sessions=2) as service:
        unknown = await service.http.post("/v1/sessions", json={"run_id": "run-nothing"})
        assert (unknown.status_code, unknown.json()["type"]) == (404, "/problems/run-not-served")
        for wrong in ({}, {"run_id": 1}, {"run_id": "run-test", "deadline_s": 1e9}, {"run_id": "run-test", "more": 1}):
            assert (await service.http.post("/v1/sessions", json=wrong)).status_code == 422
        first = await service.open()
        await service.open()
        full = await service.http.post("/v1/sessions", json={"run_id": "run-test"})
        assert (full.status_code, full.json()["type"]) == (429, "/problems/too-many-sessions")
        assert full.headers["retry-after"] == "10"
        assert "HEADRACE_MAX_OPEN_SESSIONS" in full.json()["detail"]
        assert first["expires_at"] > 1_700_000_000
        ended = await service.http.post(
            f"{first['base_url']}/end", headers={"authorization": f"Bearer {first['api_key']}"}
        )
        assert ended.json()["state"] == "over"
        await service.open()  # in its place


async def test_a_body_of_many_keys_is_refused_before_it_is_looked_at() -> None:
    async with serving() as service:
        many: dict[str, Any] = {"run_id": "run-test"} | {f"k{index}": [] for index in range(100_000)}
        refused = await service.http.post("/v1/sessions", json=many)
        assert (refused.status_code, refused.json()["detail"].partition(",")[0]) == (
            422,
            "The body has more than 100 arrays",
        )
