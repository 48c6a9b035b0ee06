"""Answers HEAD wherever there is GET, with the same status and headers and without a body. Pure ASGI.

HEAD --> application, asked with GET --> status, headers --> client
                                         body        --> dropped; a stream is cut off at its first piece
"""

import asyncio

from shared.serving.http_guard import App, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware.

    Args:
        app: An application that handles only GET.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with GET instead of HEAD."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        is_cut_off = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_cut_off.is_set():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                if message.get("more_body", False):
                    is_cut_off.set()

        answering = asyncio.create_task(
            _run(self._app, {**scope, "method": "GET"}, receive, send_head), name="answering HEAD"
        )
        cutting = asyncio.create_task(is_cut_off.wait(), name="cutting off HEAD")
        try:
            await asyncio.wait({answering, cutting}, return_when=asyncio.FIRST_COMPLETED)
            if not is_cut_off.is_set():
                await answering
        finally:
            answering.cancel()
            cutting.cancel()
            await asyncio.gather(answering, cutting, return_exceptions=True)


async def _run(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)
