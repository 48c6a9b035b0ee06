"""Sessions over real HTTP in each protocol, with OpenAI's and Anthropic's own clients."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import httpx
import pytest

from shared.turns import ChatMessage, TurnRefusedError, TurnRequest
from tests.sessions.scripted import assistant, call, tool, user
from tests.sessions.session_api.serving import ADD, QUESTION, Service, serving

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

SYSTEM = "Use the tool."
PARAMETERS: dict[str, Any] = ADD["function"]["parameters"]
PATHS = ("chat/completions", "responses", "messages", "v1/messages")
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": QUESTION},
    "responses": {"input": "2+2?"},
    "messages": {"messages": QUESTION, "max_tokens": 9},
    "v1/messages": {"messages": QUESTION, "max_tokens": 9},
}


def adder(request: TurnRequest) -> ChatMessage:
    """Say something and call the tool twice, then answer."""
    if request.messages[-1]["role"] == "tool":
        return assistant("It is 42.")
    return assistant("Let me see.\n", call("add", '{"a":2,"b":"\\u00e9"}'), call("add", "{}", "call-1"))


@dataclass
class Client(ABC):
    """A client of one protocol, with the conversation as its program keeps it."""

    made: Any
    kept: list[Any]

    @abstractmethod
    async def ask(self) -> tuple[str, list[str]]:
        """Ask for a turn; return its text and the ids of its calls."""

    @abstractmethod
    def give(self, call_id: str, result: str) -> None:
        """Add the result of a call."""

    async def __aenter__(self) -> Self:
        await self.made.__aenter__()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.made.__aexit__(*failure)


class Chat(Client):
    async def ask(self) -> tuple[str, list[str]]:
        messages = [{"role": "system", "content": SYSTEM}, *self.kept]
        answer = await self.made.chat.completions.create(model="any", messages=messages, tools=[ADD])
        said = answer.choices[0].message
        self.kept.append(said)
        return said.content or "", [one.id for one in said.tool_calls or ()]

    def give(self, call_id: str, result: str) -> None:
        self.kept.append(tool(result, call_id))


class Responses(Client):
    async def ask(self) -> tuple[str, list[str]]:
        shown = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
        answer = await self.made.responses.create(model="any", instructions=SYSTEM, input=self.kept, tools=[shown])
        self.kept += answer.output
        return answer.output_text, [item.call_id for item in answer.output if item.type == "function_call"]

    def give(self, call_id: str, result: str) -> None:
        self.kept.append({"type": "function_call_output", "call_id": call_id, "output": result})


class StreamedResponses(Responses):
    async def ask(self) -> tuple[str, list[str]]:
        shown = {"type": "function", "name": "add", "parameters": PARAMETERS}
        async with self.made.responses.stream(
            model="any", instructions=SYSTEM, input=self.kept, tools=[shown]
        ) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            answer = await stream.get_final_response()
        assert text == answer.output_text
        self.kept += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        return text, [item.call_id for item in answer.output if item.type == "function_call"]


class Messages(Client):
    async def ask(self) -> tuple[str, list[str]]:
        return self._keep(await self.made.messages.create(**self._asked()))

    def give(self, call_id: str, result: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result}
        if isinstance(self.kept[-1], dict) and self.kept[-1]["role"] == "user":
            self.kept[-1]["content"].append(block)
        else:
            self.kept.append({"role": "user", "content": [block]})

    def _asked(self) -> dict[str, Any]:
        shown = {"name": "add", "input_schema": PARAMETERS}
        return {"model": "any", "max_tokens": 50, "system": SYSTEM, "messages": self.kept, "tools": [shown]}

    def _keep(self, answer: Any) -> tuple[str, list[str]]:
        self.kept.append({"role": "assistant", "content": answer.content})
        text = "".join(block.text for block in answer.content if block.type == "text")
        return text, [block.id for block in answer.content if block.type == "tool_use"]


class StreamedMessages(Messages):
    async def ask(self) -> tuple[str, list[str]]:
        async with self.made.messages.stream(**self._asked()) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            answer = await stream.get_final_message()
        said, calls = self._keep(answer)
        assert said == text
        return text, calls


class BetaMessages(Messages):
    """As programs ask that use Anthropic's newest features: the path has ``?beta=true``."""

    async def ask(self) -> tuple[str, list[str]]:
        return self._keep(await self.made.beta.messages.create(**self._asked()))


def client_of(kind: type[Client], service: Service, session: dict[str, Any], kept: list[Any]) -> Client:
    if issubclass(kind, Messages):
        made = anthropic.AsyncAnthropic(base_url=session["base_url"], api_key=session["api_key"], timeout=120)
    else:
        made = service.client(session)
    return kind(made, kept)


@pytest.mark.parametrize("kind", [Chat, Responses, StreamedResponses, Messages, StreamedMessages, BetaMessages])
async def test_a_client_plays_a_session_with_a_tool_in_one_row(kind: type[Client]) -> None:
    async with serving(adder) as service:
        session = await service.open()
        async with client_of(kind, service, session, [user("2+40?")]) as client:
            text, calls = await client.ask()
            assert (text, calls) == ("Let me see.\n", ["call-0", "call-1"])
            client.give("call-0", "42")
            client.give("call-1", "0")
            assert await client.ask() == ("It is 42.", [])
        view = await service.view(session)
        assert (view["turns"], view["rows"]) == (2, 1)
    first, second = service.generators.requests
    assert first.messages == [{"role": "system", "content": SYSTEM}, user("2+40?")]
    assert first.tools == [ADD]
    # The second request continues the recorded ids, and only the results of the tools are rendered.
    assert second.num_recorded_messages == 3
    assert second.messages[3:] == [tool("42"), tool("0", "call-1")]


async def test_the_same_request_gets_the_same_turn_in_every_protocol() -> None:
    async with serving(adder) as service:
        session = await service.open()
        for kind in (Chat, Responses, StreamedResponses, BetaMessages):
            async with client_of(kind, service, session, [user("2+40?")]) as client:
                assert (await client.ask())[1] == ["call-0", "call-1"]
        # Anthropic's protocol requires a limit of tokens, so with another limit it is another request.
        assert [request.max_tokens for request in service.generators.requests] == [0, 50]


async def test_a_conversation_goes_on_in_another_protocol() -> None:
    async with serving() as service:
        session = await service.open()
        kept: list[Any] = [user("a")]
        for kind in (Chat, Responses, Messages, Chat):
            async with client_of(kind, service, session, [*kept]) as client:
                said, _ = await client.ask()
            kept += [assistant(said), user("b")]
        assert (await service.view(session))["rows"] == 1
    assert [request.num_recorded_messages for request in service.generators.requests] == [0, 3, 5, 7]


async def test_a_response_that_continues_another_one_continues_its_conversation() -> None:
    async with serving() as service:
        session = await service.open()
        async with service.client(session, max_retries=0) as client:

            async def ask(said: str, **more: Any) -> Any:
                return await client.responses.create(model="any", input=said, instructions=SYSTEM, **more)

            first = await ask("a")
            second = await ask("b", previous_response_id=first.id)
            other = await ask("c", previous_response_id=first.id)
            assert (await ask("b", previous_response_id=first.id)).id == second.id
            assert [first.output_text, second.output_text, other.output_text] == ["0", "1", "1"]
            assert (await service.view(session))["rows"] == 2
            for unknown in ("resp_nothing", first.id + "0", second.id.replace("resp_", "resp_a")):
                with pytest.raises(openai.BadRequestError) as refused:
                    await ask("d", previous_response_id=unknown)
                assert refused.value.code == "previous_response_not_found"
    system = {"role": "system", "content": SYSTEM}
    assert service.generators.requests[1].messages == [system, user("a"), assistant("0"), user("b")]
    assert len(service.generators.requests) == 3


async def test_anthropics_client_counts_tokens_and_nothing_is_sampled() -> None:
    async with serving() as service:
        session = await service.open()
        async with anthropic.AsyncAnthropic(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=0
        ) as client:
            short = await client.messages.count_tokens(model="any", messages=QUESTION)
            longer = await client.messages.count_tokens(model="any", messages=QUESTION, system="Use the tool. " * 10)
            assert 0 < short.input_tokens < longer.input_tokens
            assert (await service.view(session))["turns"] == 0
            answered = await client.messages.count_tokens(model="any", messages=[*QUESTION, assistant("It is 4.")])
            assert answered.input_tokens > short.input_tokens
            container: Any = {"container": "c"}
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.count_tokens(model="any", messages=QUESTION, extra_body=container)
            assert refused.value.body["error"]["code"] == "unsupported_option"
            await service.http.post(
                f"{session['base_url']}/end", headers={"authorization": f"Bearer {session['api_key']}"}
            )
            with pytest.raises(anthropic.APIStatusError) as over:
                await client.messages.count_tokens(model="any", messages=QUESTION)
            assert over.value.status_code == 410
    assert service.generators.requests == []


@pytest.mark.parametrize("path", PATHS)
async def test_a_key_is_taken_in_either_header_and_no_other_key_is(path: str) -> None:
    async with serving() as service:
        session, other = await service.open(), await service.open()
        url = f"{session['base_url']}/{path}"
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            for key, status in ((session["api_key"], 200), (other["api_key"], 401), ("no", 401)):
                bearer = {"authorization": f"Bearer {key}"}
                for headers in ({"x-api-key": key}, bearer, {"x-api-key": key, "authorization": "Bearer no"},
                                bearer | {"x-api-key": "no"}):  # fmt: skip
                    assert (await http.post(url, json=BODIES[path], headers=headers)).status_code == status


@pytest.mark.parametrize("path", PATHS)
async def test_every_error_has_the_form_of_its_protocol(path: str) -> None:
    def policy(request: TurnRequest) -> ChatMessage:
        raise TurnRefusedError("the conversation has 10000 tokens, and the context 100", kind="context_length")

    async with serving(policy) as service:
        session = await service.open()
        key = {"x-api-key": session["api_key"], "content-type": "application/json"}
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:

            async def refusal(content: bytes, headers: dict[str, str] = key) -> tuple[int, str, str]:
                response = await http.post(f"{session['base_url']}/{path}", content=content, headers=headers)
                assert response.headers["content-type"] == "application/json"
                body = response.json()
                if path.endswith("messages"):
                    assert body["type"] == "error"
                assert body["error"]["message"]
                assert "Traceback" not in response.text
                return response.status_code, body["error"]["type"], body["error"]["code"]

            invalid, whole = "invalid_request_error", json.dumps(BODIES[path]).encode()
            too_large = "request_too_large" if path.endswith("messages") else invalid
            tools = b', "tools": [{"type": "web_search"}], "n": 2}'
            deep = b', "tools": [{"type": "function", "name": "a", "parameters": ' + b"[" * 5000 + b"]" * 5000 + b"}]}"
            assert await refusal(whole) == (400, invalid, "context_length_exceeded")
            assert await refusal(b"{") == (400, invalid, "malformed_json")
            assert await refusal(b"{}") == (400, invalid, "invalid_request")
            assert (await refusal(whole[:-1] + tools))[2] in ("unsupported_option", "unsupported_content")
            assert await refusal(whole[:-1] + deep) == (400, invalid, "malformed_json")
            assert await refusal(b"x" * (9 << 20)) == (413, too_large, "body_too_large")
            assert await refusal(whole, {**key, "content-type": "text/plain"}) == (415, invalid, "not_json")
            assert await refusal(whole, {**key, "x-api-key": "no"}) == (401, "authentication_error", "key_required")
            await http.post(f"{session['base_url']}/end", headers=key)
            assert await refusal(whole) == (410, invalid, "session_over")


async def test_an_answer_does_not_repeat_a_large_request() -> None:
    async with serving() as service:
        session = await service.open()
        headers = {"authorization": f"Bearer {session['api_key']}"}
        large = {"input": "a", "instructions": "\x7f" * 1_000_000, "tool_choice": [0.5] * 100_000, "stream": True}
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            answer = await http.post(f"{session['base_url']}/responses", json=large, headers=headers)
        assert answer.status_code == 200, answer.text[:500]
        assert len(answer.content) < 20_000


async def test_clients_raise_what_their_protocol_has_for_an_error() -> None:
    async with serving() as service:
        session = await service.open()
        wrong = {"base_url": session["base_url"], "api_key": "no", "max_retries": 0}
        async with anthropic.AsyncAnthropic(**wrong) as client:
            with pytest.raises(anthropic.AuthenticationError, match="not the key of this session"):
                await client.messages.create(model="any", max_tokens=9, messages=QUESTION)
        async with openai.AsyncOpenAI(**wrong) as client:
            with pytest.raises(openai.AuthenticationError, match="not the key of this session"):
                await client.responses.create(model="any", input="2+2?")
        right = wrong | {"api_key": session["api_key"]}
        async with anthropic.AsyncAnthropic(**right) as client:
            with pytest.raises(anthropic.NotFoundError):  # a route that is not there, and not a wrong key
                await client.messages.batches.list()
            with pytest.raises(anthropic.BadRequestError, match="last message of the assistant"):
                await client.messages.create(
                    model="any", max_tokens=9, messages=[*QUESTION, {"role": "assistant", "content": "It"}]
                )
        async with openai.AsyncOpenAI(**right) as client:
            with pytest.raises(openai.BadRequestError, match="'web_search'"):
                await client.responses.create(model="any", input="2+2?", tools=[{"type": "web_search"}])
    assert service.generators.requests == []
