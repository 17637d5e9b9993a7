"""The HTTP side of the server of chat completions, on Starlette and uvicorn: the extra ``agents``.

Anybody who can reach the port can connect. A connection without a whole request costs a file descriptor and no thread,
for a limited time; a request without a key of the program is answered before its body is read.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainer.rollout.server.chat_requests import RequestError, reject

IDLE_S = 30
"""[s] Longest time in which a connection sends the header of a request, and a request its body."""
MAX_STRANGERS = 256
"""Most connections that have sent no whole header of a request yet: one more closes the oldest."""
EVENTS = "text/event-stream"
"""The content type of answers that are sent in parts."""
CLOSE_S = 5.0
"""[s] Longest time to wait for the thread of the server when it is closed."""


class HttpRequest:
    """A request, as far as it has arrived.

    Args:
        request: of Starlette.
        max_body: [bytes] the most of its body.

    Attributes:
        api_key: of the client, which is in the path or in the header.
    """

    def __init__(self, request: Request, max_body: int) -> None:
        self._request, self._max_body, self._is_read = request, max_body, asyncio.Event()
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        sent = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        self.api_key: str = request.path_params.get("api_key", sent)

    async def body(self) -> bytes:
        """Return the body.

        Raises:
            RequestError: it is longer than the limit, does not arrive in time, or is declared to be something else
                than JSON.
            ClientDisconnect: the client has disconnected.
        """
        kind = self._request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            reject(f"the content type is {kind[:60]!r}; expected application/json", status=415)
        self._check_length(int(self._request.headers.get("content-length", 0)))
        body = bytearray()
        try:
            async with asyncio.timeout(IDLE_S):
                async for part in self._request.stream():
                    body += part
                    self._check_length(len(body))
        except TimeoutError:
            reject(f"the body did not arrive within {IDLE_S} s", status=408)
        self._is_read.set()
        return bytes(body)

    def _check_length(self, length: int) -> None:
        if length > self._max_body:
            text = f"the body has {length} bytes or more, and the most are {self._max_body}"
            reject(text, status=413, code="request_too_large")

    async def disconnected(self) -> None:
        """Wait until the client has disconnected after the body."""
        await self._is_read.wait()
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


class HttpServer:
    """Serves ``POST`` requests in a thread.

    Args:
        answer: yields the content type and the parts of the answer to a request, on the event loop of the server, or
            raises a ``RequestError`` before the first; it is closed when the client disconnects.
        paths: that are served, also below a folder whose name is the API key.
        host: the address on which it listens.
        port: 0 for a free one.
        max_body: [bytes] the most of a request's body.

    Attributes:
        url: without a path.
    """

    def __init__(
        self,
        answer: Callable[[str, HttpRequest], AsyncGenerator[str]],
        paths: Collection[str],
        *,
        host: str,
        port: int,
        max_body: int,
    ) -> None:
        def endpoint(path: str) -> Callable[[Request], Any]:
            async def answered(request: Request) -> Response:
                http_request = HttpRequest(request, max_body)
                parts = answer(path, http_request)
                first = asyncio.ensure_future(anext(parts))
                gone = asyncio.ensure_future(http_request.disconnected())
                try:
                    await asyncio.wait((first, gone), return_when=asyncio.FIRST_COMPLETED)
                    if first.done() and (kind := first.result()) == EVENTS:
                        return _Parts(parts, media_type=kind)
                    if first.done():
                        return Response("".join([part async for part in parts]), media_type=kind)
                except RequestError as error:
                    return _error_response(error)
                except ClientDisconnect:
                    pass
                finally:
                    first.cancel()
                    gone.cancel()
                return Response()  # which nobody gets

            return answered

        async def rejected(request: Request, error: Any) -> Response:
            served = f"served are POST {', '.join(paths)}"
            message = f"{request.method[:20]} {request.url.path[:60]} is not served; {served}"
            return _error_response(RequestError(message, status=error.status_code, code="unknown_url", param=None))

        folders = ("", "/{api_key}")
        routes = [Route(folder + path, endpoint(path), methods=["POST"]) for path in paths for folder in folders]
        app = Starlette(routes=routes, exception_handlers={HTTPException: rejected})
        app.router.redirect_slashes = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        strangers: dict[_Connection, None] = {}
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=partial(_Connection, strangers),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        run = partial(asyncio.run, self._server.serve([listening]))
        self._thread = threading.Thread(target=run, name="chat server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to serve."""
        self._server.should_exit = True
        self._thread.join(CLOSE_S)


class _Parts(StreamingResponse):
    """An answer in parts, whose generator is closed when the client disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class _Connection(H11Protocol):
    """A connection that is closed if it sends no whole request for long, or its first one later than many others.

    Args:
        strangers: the connections without a first request, from the oldest.
        options: of uvicorn.
    """

    def __init__(self, strangers: dict[_Connection, None], **options: Any) -> None:
        super().__init__(**options)
        self._strangers = strangers
        self._time_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._update()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # a request whose body is malformed is answered here
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(RequestError(msg, status=400, code="invalid_http", param=None).body()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _update(self) -> None:
        is_serving = self.cycle is not None and not self.cycle.response_complete
        if is_serving or self.transport.is_closing():
            self._strangers.pop(self, None)
            if self._time_limit is not None:
                self._time_limit.cancel()
                self._time_limit = None
        elif self._time_limit is None:
            self._time_limit = self.loop.call_later(IDLE_S, self.transport.abort)
            if self.cycle is None:
                self._strangers[self] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.transport.abort()


def _error_response(error: RequestError) -> Response:
    """Return the answer for an error; the connection is closed, since the body may not have been read."""
    return Response(json.dumps(error.body()), error.status, {"connection": "close"}, media_type="application/json")
