"""A local server with the chat completions of OpenAI's API, which records the exact tokens of every session.

An agent that was written against such an endpoint needs another ``base_url`` and ``api_key``, and nothing else. A
request that continues the messages of its session continues its tokens: only what follows the policy's is encoded.
``AgentEpisode`` makes such an agent an episode of a run.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import json
import logging
import re
import secrets
import time
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mcontroller.config.imports import import_extra, import_object
from mcontroller.errors import ConfigError, DataError
from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.episode_loop import EpisodeRollout
from trainer.rollout.seeds import seed_of
from trainer.rollout.server.chat_requests import ChatRequest, RequestError, reject, same_conversation
from trainer.rollout.server.chat_tokens import conversation_tokens, tokens_after_reply
from trainer.rollout.trajectories import TrajectoryRollout
from trainer.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from trainer.rollout.server.http_server import HttpRequest

logger = logging.getLogger(__name__)

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def hermes_tool_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text around ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, and names and arguments.

    What is no JSON object with a name stays in the text. Arguments that are JSON in a text are returned as they are.
    """
    calls = []
    for match in CALL.finditer(text):
        call = _json_object(match[1]) or {}
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(name, str):
            is_encoded = isinstance(arguments, str) and _json_object(arguments) is not None
            calls.append((name, arguments if is_encoded else json.dumps(arguments)))
            text = text.replace(match[0], "", 1)
    return text.strip() if calls else text, calls


class ChatSession:
    """The requests of one agent, which has the key of the session.

    Attributes:
        name: of the session.
        api_key: of the agent's client. Nobody without it can take part in the session.
        trajectories: one, and another for each request that did not continue the messages and tools before it.
        error: why it has ended without a trajectory; None: it has not.
    """

    def __init__(self, rollout: Any, name: str, seed: int | None) -> None:
        self.rollout, self.name, self.seed = rollout, name, seed
        self.api_key = secrets.token_urlsafe()
        self.trajectories: list[Trajectory] = []
        self.messages: list[Mapping[str, Any]] = []
        self.tools: list[Any] = []
        self.calls = 0
        self.error: str | None = None
        self.is_closed = self.in_use = False
        self.submitted: Future[Trajectory] | None = None

    def cancel(self) -> None:
        """End the session: no request is accepted any more, and one that is running is cancelled."""
        self.is_closed = True
        if self.submitted is not None:
            self.submitted.cancel()

    def close(self) -> list[Trajectory]:
        """End the session, and return its trajectories.

        Raises:
            DataError: a request is running, a client has disconnected in the middle of one, or there was none.
        """
        if self.in_use:
            self.error = self.error or "a request is running"
        self.cancel()
        if self.error is None and not self.trajectories:
            self.error = "no request has arrived"
        if self.error is not None:
            raise DataError(f"session {self.name!r} has no trajectory: {self.error}", session=self.name)
        made, self.trajectories, self.messages = self.trajectories, [], []
        return made


class ChatServer:
    """Serves chat completions with tools on this machine, to clients that have the key of a session.

    Args:
        rollout: generates the turns. If it is not ``driven``, the requests make the slices. None: each session has one.
        tokenizer: its chat template renders the messages.
        tool_calls: returns the text and the tool calls, as names and JSON arguments, of what the policy wrote.
        port: 0 for a free one.
        max_body: [bytes] the most of a request.

    Attributes:
        base_url: for clients, whose API key is that of their session; ``url_of`` has the key in the path.

    Raises:
        ConfigError: the extra ``agents`` is not installed.
    """

    def __init__(
        self,
        rollout: TrajectoryRollout | None,
        tokenizer: TextTokenizer,
        *,
        tool_calls: Callable[[str], tuple[str, list[tuple[str, str]]]] = hermes_tool_calls,
        port: int = 0,
        max_body: int = 8 * 2**20,
    ) -> None:
        http_server = import_extra("trainer.rollout.server.http_server", "agents", "multi_turn.episode")
        self.rollout, self.tokenizer, self.tool_calls = rollout, tokenizer, tool_calls
        self._sessions: dict[str, ChatSession] = {}
        self._advancing = asyncio.Lock()
        self._http = http_server.HttpServer(self._answer, port=port, max_body=max_body)
        self.base_url = f"{self._http.url}/v1"

    def url_of(self, session: ChatSession) -> str:
        """Return the ``base_url`` of a client whose API key is not that of its session. It is as secret as the key."""
        return f"{self._http.url}/{session.api_key}/v1"

    def open(self, name: str, seed: int | None = None, rollout: Any = None) -> ChatSession:
        """Open a session.

        Args:
            name: of the session, for messages: letters, digits, ``-``, ``_`` and ``.``.
            seed: of the random numbers of its responses, 64 bits, signed. None: the rollout gives each one.
            rollout: generates its turns: an object with ``submit`` and ``driven``. None: the server's.

        Raises:
            DataError: a session of this name is open, or it has other characters.
        """
        for closed in [key for key, session in list(self._sessions.items()) if session.is_closed]:
            self._sessions.pop(closed, None)
        session = ChatSession(self.rollout if rollout is None else rollout, name, seed)
        is_name = re.fullmatch(r"[\w.-]+", name)
        if not is_name or self._sessions.setdefault(name, session) is not session:
            problem = "is open" if is_name else "is not of letters, digits, -, _ and ."
            raise DataError(f"session {name!r} {problem}: give each trajectory a session of its own", session=name)
        return session

    def close(self) -> None:
        """Stop to serve, and end the sessions; a request that is running is cancelled."""
        for session in list(self._sessions.values()):
            session.cancel()
        self._http.close()

    async def _answer(self, http_request: HttpRequest) -> tuple[str, bytes]:
        """Return the content type and the body of the answer to a request.

        Raises:
            RequestError: the key is not that of an open session, the request is malformed, or its turn has failed.
        """
        session = self._session_of(http_request.api_key)
        if session.in_use:
            reject(f"session {session.name!r} is in use by another request: open one for each agent")
        if session.error is not None:
            reject(f"session {session.name!r} has ended: {session.error}")
        session.in_use = True
        try:
            return await self._completed(session, await http_request.body(), http_request)
        finally:
            session.in_use, session.submitted = False, None

    def _session_of(self, api_key: str) -> ChatSession:
        for session in list(self._sessions.values()):
            if secrets.compare_digest(session.api_key.encode(), api_key.encode()) and not session.is_closed:
                return session
        reject(
            "the API key is not that of an open session: pass the api_key of the session that ChatServer.open returned",
            status=401,
            code="invalid_api_key",
        )

    async def _completed(self, session: ChatSession, body: bytes, http_request: HttpRequest) -> tuple[str, bytes]:
        """Return the answer to a request; what fails for another reason than the request ends the session."""
        try:
            request = ChatRequest.from_json(body)
            completion = await self._complete(session, request, http_request)
            if request.stream:
                return "text/event-stream", _as_events(completion, include_usage=request.include_usage)
            return "application/json", json.dumps(completion).encode()
        except RequestError:
            raise
        except (DataError, ConfigError) as error:
            reject(str(error), param=error.fields.get("field"))
        except Exception as error:
            logger.warning("a turn of session %r failed", session.name, exc_info=error)
            session.error = f"{type(error).__name__}: {error}"
            reject(f"session {session.name!r} has ended: {session.error}", status=500)

    async def _complete(self, session: ChatSession, request: ChatRequest, http_request: HttpRequest) -> dict[str, Any]:
        """Return the answer to a request, and record its turn."""
        trajectory, start = self._turn(session, request)
        await self._generate(session, http_request, trajectory, {"max_tokens": request.max_tokens, **request.sampling})
        session.trajectories[len(session.trajectories) - (start > 0) :] = [trajectory]
        made = trajectory.tokens[start:]
        text, calls = self.tool_calls(self.tokenizer.decode(made))
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = [
                # some templates ask for nine letters and digits
                {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(calls, session.calls)
            ]
        session.messages, session.tools = [*request.messages, message], request.tools
        session.calls += len(calls)
        reason = "tool_calls" if calls else "length" if trajectory.ended in ("length", "max_tokens") else "stop"
        usage = {"prompt_tokens": len(trajectory.prompt) + start, "completion_tokens": len(made)}
        return {
            "id": f"chatcmpl-{session.name}-{len(session.messages)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }

    def _turn(self, session: ChatSession, request: ChatRequest) -> tuple[Trajectory, int]:
        """Return the trajectory of a request, and the tokens of its response before this turn."""
        if session.tools != request.tools or not same_conversation(session.messages, request.messages):
            prompt = conversation_tokens(self.tokenizer, request.messages, request.tools)
            seed, count = session.seed, len(session.trajectories)
            if seed is not None and count:
                seed = seed_of(seed, "conversation", count)
            return Trajectory(array("q", prompt), seed=seed), 0
        trajectory = copy.deepcopy(session.trajectories[-1])
        messages = [*session.messages, *request.messages[len(session.messages) :]]
        stop = trajectory.tokens[-1] if trajectory.ended in ("stop", "turn") else None
        reply = len(session.messages) - 1
        trajectory.replied(tokens_after_reply(self.tokenizer, messages, reply, request.tools, stop))
        return trajectory, len(trajectory.tokens)

    async def _generate(
        self, session: ChatSession, http_request: HttpRequest, trajectory: Trajectory, options: Mapping[str, Any]
    ) -> None:
        """Generate a turn; a session whose client disconnects in the middle of one has ended."""
        submit = partial(session.rollout.submit, trajectory, **{"seed": trajectory.seed, **options})
        submitted: Future[Trajectory] = await asyncio.to_thread(submit)
        session.submitted = submitted
        if session.is_closed:
            submitted.cancel()
        gone = asyncio.create_task(http_request.disconnected())
        made = asyncio.create_task(self._made(session.rollout, submitted))
        try:
            await asyncio.wait((gone, made), return_when=asyncio.FIRST_COMPLETED)
        finally:
            submitted.cancel()
            gone.cancel()
            made.cancel()
        if session.is_closed:
            reject(f"session {session.name!r} was closed")
        if not made.done():
            session.error = "its client has disconnected in the middle of a request"
        elif made.cancelled():
            session.error = "its trajectory was cancelled"
        else:
            return made.result()
        reject(f"session {session.name!r} has ended: {session.error}")

    async def _made(self, rollout: Any, submitted: Future[Trajectory]) -> None:
        """Wait for a turn, and make slices if nobody else does: one request at a time."""
        while not (submitted.done() or rollout.driven):
            async with self._advancing:
                if not submitted.done():
                    await asyncio.to_thread(rollout.advance)
        await asyncio.wrap_future(submitted)


def _as_events(completion: Mapping[str, Any], *, include_usage: bool) -> bytes:
    """Return a completion as a stream of events: the whole message is one chunk."""
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    shared = {"index": 0, "logprobs": None}
    chunks = [
        {**head, "choices": [{**shared, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{**shared, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
    events = [*map(json.dumps, chunks), "[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events).encode()


class AgentEpisode:
    """An episode that runs an agent which was written against an OpenAI endpoint: a class for ``multi_turn.episode``.

    The endpoint is a ``ChatServer`` in the process of the episode. What the agent returns is dropped: its reward is
    that of the response, which are all its turns and what it put between them.

    Args:
        agent: ``async def agent(base_url, api_key, problem, **options)``, or its import path.
        options: other keyword arguments of the agent.

    Raises:
        ConfigError: the function cannot be imported, or is not async.
    """

    def __init__(self, agent: str | Callable[..., Any], **options: Any) -> None:
        function: Any = import_object(agent, "multi_turn.options.agent") if isinstance(agent, str) else agent
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"multi_turn.options.agent is {agent!r}, which is not async; expected async def agent(base_url, "
                "api_key, problem); asyncio.to_thread runs one that blocks",
                key="multi_turn.options.agent",
            )
        self._agent: Any = partial(function, **options)
        inspect.signature(self._agent).bind("", "", {})
        self._server: ChatServer | None = None
        self._sessions = itertools.count()

    async def __call__(self, rollout: EpisodeRollout, problem: Mapping[str, Any]) -> Trajectory:
        """Return the one conversation that the agent had.

        Raises:
            DataError: it made no request, one was cut off, or it began several conversations.
        """
        if self._server is None:
            self._server = ChatServer(None, rollout.tokenizer)
        session = self._server.open(f"episode-{next(self._sessions)}", rollout=_FromThreads(rollout))
        try:
            await self._agent(self._server.base_url, session.api_key, problem)
            made = session.close()
        finally:
            session.cancel()
        if len(made) > 1:
            raise DataError(
                f"the agent began {len(made)} conversations, and an episode is one: each request is to repeat the "
                "messages before it, as they were received, and the tools",
                session=session.name,
            )
        return made[0]


class _FromThreads:
    """The rollout of an episode, for the threads of a server."""

    driven = True

    def __init__(self, rollout: EpisodeRollout) -> None:
        self._rollout, self._loop = rollout, asyncio.get_running_loop()

    def submit(self, trajectory: Trajectory, **options: Any) -> Future[Trajectory]:
        async def turn() -> Trajectory:
            return await self._rollout.submit(trajectory, **options)

        return asyncio.run_coroutine_threadsafe(turn(), self._loop)


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON text; None if it is something else, or has values that no text can be made of."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
