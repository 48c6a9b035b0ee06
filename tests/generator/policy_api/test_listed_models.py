"""/v1/models in front of handlers that return something else than a list."""

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from services.generator.policy_api.openai_routes import MODELS_PATH, OpenAiRoutes

pytestmark = pytest.mark.unit


async def listed(answer: Response) -> httpx.Response:
    routes = OpenAiRoutes(lambda: None, policy_version=lambda: 7)
    routes.answer_with(answer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(routes), base_url="http://generator") as client:
        return await client.get(MODELS_PATH)


@pytest.mark.parametrize(
    "error", [PlainTextResponse("Internal Server Error", 500), JSONResponse({"error": {"message": "no"}}, 404)]
)
async def test_an_error_is_handed_on_as_it_is(error: Response) -> None:
    answer = await listed(error)
    assert (answer.status_code, answer.content) == (error.status_code, error.body)
    assert answer.headers["content-type"] == error.headers["content-type"]
    assert answer.headers["x-headrace-policy-version"] == "7"


async def test_a_list_gets_the_version_on_each_card() -> None:
    answer = await listed(JSONResponse({"object": "list", "data": [{"id": "policy"}, {"id": "m"}]}))
    assert answer.json()["data"] == [{"id": "policy", "policy_version": 7}, {"id": "m", "policy_version": 7}]
