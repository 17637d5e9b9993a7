"""The HTTP side of the server, on Starlette and uvicorn: the extra ``agents``.

Anybody who can reach the port can connect. A connection without a request costs a file descriptor and no thread, for a
limited time; a request without the key of a session is answered before its body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mcontroller.errors import ConfigError, DataError
from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.server.chat_api import ChatCompletions
from trainer.rollout.server.chat_requests import parsed
from trainer.rollout.server.messages_api import Messages
from trainer.rollout.server.request_error import RequestError, reject
from trainer.rollout.server.responses_api import Responses
from trainer.rollout.server.sessions import ChatSession, Turn
from trainer.rollout.trajectories import TrajectoryRollout

logger = logging.getLogger(__name__)

Api = ChatCompletions | Messages | Responses
APIS: Mapping[str, type[Api]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
"""The paths that are served, also below a folder whose name is the API key."""
IDLE_S = 30
"""[s] Longest time in which the first header of a connection and the body of a request arrive, and between requests."""
CLOSE_S = 5.0
"""[s] Longest time to wait for the thread of the server when it is closed."""


class HttpServer:
    """Answers requests in a thread.

    Args:
        session_of: returns the open session of an API key, or raises a ``RequestError``.
        tokenizer: of the rollout.
        host: the address on which it listens.
        port: 0 for a free one.
        max_body: [bytes] the most of a request's body.
        timeout_s: [s] the longest time that the turns of a request take.

    Attributes:
        url: without a path.
    """

    def __init__(
        self,
        session_of: Callable[[str], ChatSession],
        tokenizer: TextTokenizer,
        *,
        host: str,
        port: int,
        max_body: int,
        timeout_s: float,
    ) -> None:
        self._session_of, self._tokenizer, self._max_body, self._timeout_s = session_of, tokenizer, max_body, timeout_s
        self._steps: WeakKeyDictionary[TrajectoryRollout, asyncio.Task[None]] = WeakKeyDictionary()
        routes = [
            Route(folder + path, partial(self._answer, api), methods=["POST"])
            for path, api in APIS.items()
            for folder in ("", "/{api_key}")
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _not_served})
        app.router.redirect_slashes = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=1024)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the chat server cannot listen at {host}, port {port}: {error}. Choose another port, or 0 for a free "
                "one, and an address of this machine",
                key="port",
                value=port,
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=_Connection,
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

    async def _answer(self, api: type[Api], http_request: Request) -> Response:
        try:
            session = self._session_of(_api_key(http_request))
            body = await self._body(http_request)
            with ExitStack() as running:
                session.begin()
                running.callback(session.end)
                with _errors(session):
                    answer = api(parsed(body), self._tokenizer)
                    turns = await session.submit(answer.request)
                    if answer.request.stream:
                        streaming = running.pop_all()
                        progress = self._progress(session, turns, streaming)
                        return _EventStream(_events(session, answer, turns, progress), streaming)
                    progress = self._progress(session, turns, running)
                    await _unless_disconnected(http_request, _drained(progress))
                    return JSONResponse(answer.answer(turns))
        except RequestError as error:
            return _error_response(error)
        except ClientDisconnect:
            return Response()  # which nobody gets

    async def _progress(self, session: ChatSession, turns: Sequence[Turn], running: ExitStack) -> AsyncGenerator[Turn]:
        async for turn in session.generate(turns, self._advance, timeout_s=self._timeout_s):
            yield turn
        running.close()  # so that the client can send its next request at once

    async def _advance(self, rollout: TrajectoryRollout) -> None:
        """Make a step for all sessions that wait for one, or wait for the one in flight."""
        step = self._steps.get(rollout)
        if step is None or step.done():
            step = self._steps[rollout] = asyncio.create_task(asyncio.to_thread(rollout.advance))
        await asyncio.shield(step)  # which the others wait for too

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            reject(f"the content type is {kind[:60]!r}; expected application/json", status=415)
        body, length = bytearray(), int(request.headers.get("content-length", 0))
        try:
            async with asyncio.timeout(IDLE_S):
                parts = aiter(request.stream())
                while (length := max(length, len(body))) <= self._max_body:
                    if (part := await anext(parts, None)) is None:
                        return bytes(body)
                    body += part
        except TimeoutError:
            reject(f"the body did not arrive within {IDLE_S} s", status=408)
        text = f"the body has {length} bytes or more, and the most are {self._max_body}"
        reject(text, status=413, code="request_too_large")


def _api_key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    sent = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return str(request.path_params.get("api_key", sent))


@contextlib.contextmanager
def _errors(session: ChatSession) -> Iterator[None]:
    """Raise errors as ``RequestError``; what fails for another reason than the request ends the session."""
    try:
        yield
    except (RequestError, ClientDisconnect):
        raise
    except (DataError, ConfigError) as error:
        reject(str(error), param=error.fields.get("field"))
    except Exception as error:
        logger.warning("a turn of session %r failed", session.name, exc_info=error)
        session.error = f"{type(error).__name__}: {error}"
        reject(f"session {session.name!r} has ended: {session.error}", status=500)


async def _events(
    session: ChatSession, answer: Api, turns: Sequence[Turn], progress: AsyncIterator[Turn]
) -> AsyncGenerator[str]:
    """Yield the events of a stream; if it fails, the last one is the error."""
    try:
        with _errors(session):
            yield answer.begin(turns)
            async for turn in progress:
                if text := turn.next_text():
                    yield answer.add_text(turn, text)
            yield answer.end(turns)
    except RequestError as error:
        yield answer.error(error.body())


async def _drained(progress: AsyncIterator[Turn]) -> None:
    async for _ in progress:
        pass


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for work, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: it has.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """A stream of events, which ends, with its request, when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], running: ExitStack) -> None:
        super().__init__(events)
        self._events, self._running = events, running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._running:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)


class _Connection(H11Protocol):
    """A connection that is closed if it sends no whole header of a request for ``IDLE_S``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.cycle is None:
            self.transport.abort()


async def _not_served(request: Request, error: Any) -> Response:
    message = f"{request.method[:20]} {request.url.path[:60]} is not served; served are POST {', '.join(APIS)}"
    return _error_response(RequestError(message, status=error.status_code, code="unknown_url", param=None))


def _error_response(error: RequestError) -> Response:
    """Return the answer for an error; the connection is closed, since the body may not have been read."""
    return JSONResponse(error.body(), error.status, {"connection": "close"})
