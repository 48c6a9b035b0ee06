"""Asks the sessions service whether it can use a run's tools.

POST {sessions_url}/v1/tools/check   the run's options of agents, such as {"tools": [...]}
                                     -> 200, or 422
"""

from services.trainer.submit_checks.service_check import CheckingService, ask
from shared.run_options.agents import AgentOptions
from shared.service.tls import PUBLIC_TLS, PeerTls


async def check_tools(
    config: AgentOptions, *, sessions_url: str, api_key: str, timeout_s: float, tls: PeerTls = PUBLIC_TLS
) -> None:
    """Have the sessions service check the tools, MCP servers, environment or agent program of a run.

    Raises:
        Problem: 422 with the service's own sentence, or 503 if the sessions service cannot be used.
    """
    body = config.model_dump(mode="json", include=set(AgentOptions.model_fields), exclude_unset=True)
    service = CheckingService(
        "sessions service",
        "/v1/tools/check",
        "HEADRACE_SESSIONS_URL",
        option=config.agentic_option or "tools",
        what="tools",
    )
    await ask(service, body, url=sessions_url, api_key=api_key, timeout_s=timeout_s, tls=tls)
