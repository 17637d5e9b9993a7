"""A local server with the chat completions of OpenAI's API, which records the exact tokens of every session.

An agent that was written against such an endpoint needs another ``base_url`` and ``api_key``, and nothing else. A
request that continues the messages of its session continues its tokens: only what follows the policy's is encoded.
``AgentEpisode`` makes such an agent an episode of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import json
import re
import socket
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mcontroller.config.imports import import_object
from mcontroller.errors import ConfigError, DataError, MControllerError
from mcontroller.ppo.agents.episode_loop import EpisodeRollout
from mcontroller.ppo.agents.seeds import seed_of
from mcontroller.ppo.agents.trajectories import TrajectoryRollout
from mcontroller.ppo.agents.trajectory import Trajectory
from mcontroller.ppo.datasets.tokenizers import TextTokenizer

REPLY = "@@the-reply-of-the-policy@@"
"""Stands for the policy's message when a chat template is asked for what follows it."""
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
UNSUPPORTED = {"stream": False, "n": 1, "stop": None, "logprobs": False, "response_format": None}
"""Fields of a request that have one value here."""
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Fields of a request that change how it is sampled; ``checked_sampling`` has their rules."""
POLL_S = 0.05
"""[s] How often a request that waits looks whether its client is still there."""


def hermes_tool_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text around ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, and names and arguments.

    What is no JSON object with a name stays in the text.
    """
    calls = []
    for match in CALL.finditer(text):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            call = json.loads(match[1])
            calls.append((str(call["name"]), json.dumps(call.get("arguments", {}))))
            text = text.replace(match[0], "", 1)
    return text.strip() if calls else text, calls


class ChatSession:
    """The requests of one agent, in its name: ``api_key`` of the client, or the first part of the path.

    Attributes:
        name: of the session.
        trajectories: one, and another for each request that did not continue the messages before it.
    """

    def __init__(self, rollout: Any, name: str, seed: int | None) -> None:
        self.rollout, self.name, self.seed = rollout, name, seed
        self.trajectories: list[Trajectory] = []
        self.messages: list[Mapping[str, Any]] = []
        self.error: str | None = None
        self.is_closed = False
        self.in_use = threading.Lock()

    def close(self) -> list[Trajectory]:
        """End the session, and return its trajectories.

        Raises:
            DataError: a request is running, a client has disconnected in the middle of one, or there was none.
        """
        self.is_closed = True
        if self.in_use.locked():
            self.error = "a request is running"
        if self.error is None and not self.trajectories:
            self.error = "no request has arrived"
        if self.error is not None:
            raise DataError(f"session {self.name!r} has no trajectory: {self.error}", session=self.name)
        made, self.trajectories, self.messages = self.trajectories, [], []
        return made


class ChatServer:
    """Serves chat completions with tools, without streaming, on this machine.

    Args:
        rollout: generates the turns. If it is not ``driven``, the requests make the slices. None: each session has one.
        tokenizer: its chat template renders the messages.
        tool_calls: returns the text and the tool calls, as names and JSON arguments, of what the policy wrote.
        port: 0 for a free one.

    Attributes:
        base_url: for clients, which pass the session as their API key; ``url_of`` has it in the path.
    """

    def __init__(
        self,
        rollout: TrajectoryRollout | None,
        tokenizer: TextTokenizer,
        *,
        tool_calls: Callable[[str], tuple[str, list[tuple[str, str]]]] = hermes_tool_calls,
        port: int = 0,
    ) -> None:
        self.rollout, self.tokenizer, self.tool_calls = rollout, tokenizer, tool_calls
        self._sessions: dict[str, ChatSession] = {}
        handler = type("Handler", (_Handler,), {"chat": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self._root = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.base_url = f"{self._root}/v1"
        threading.Thread(target=self._http.serve_forever, args=(POLL_S,), name="chat server", daemon=True).start()

    def url_of(self, session: ChatSession) -> str:
        """Return the ``base_url`` of a client whose API key is not the name of its session."""
        return f"{self._root}/{session.name}/v1"

    def open(self, name: str, seed: int | None = None, rollout: Any = None) -> ChatSession:
        """Open a session.

        Args:
            name: of the session: letters, digits, ``-``, ``_`` and ``.``.
            seed: of the random numbers of its responses, 64 bits, signed. None: the rollout gives each one.
            rollout: generates its turns: an object with ``submit`` and ``driven``. None: the server's.

        Raises:
            DataError: there was a session of this name, or it has other characters.
        """
        if name in self._sessions or not re.fullmatch(r"[\w.-]+", name):
            problem = "was opened before" if name in self._sessions else "is not of letters, digits, -, _ and ."
            raise DataError(f"session {name!r} {problem}: give each trajectory a session of its own", session=name)
        session = ChatSession(self.rollout if rollout is None else rollout, name, seed)
        self._sessions[name] = session
        return session

    def close(self) -> None:
        """Stop to serve."""
        self._http.shutdown()
        self._http.server_close()

    def session_of(self, path: str, api_key: str) -> ChatSession:
        """Return the session of a request.

        Raises:
            DataError: there is no such session, or it was closed.
        """
        name = path.split("/")[1] if not path.startswith("/v1/") else api_key
        session = self._sessions.get(name)
        if session is None or session.is_closed or session.error:
            state = "does not exist" if session is None else "was closed" if session.is_closed else session.error
            raise DataError(f"session {name!r} {state}: open one, and pass its name as the API key", session=name)
        return session

    def complete(self, session: ChatSession, request: Mapping[str, Any], connected: Callable[[], bool]) -> Any:
        """Return the answer to a request.

        Raises:
            DataError: the request has a field that is not supported, or its tokens have no room.
            ConnectionAbortedError: the client has disconnected; the trajectory is cancelled.
        """
        for name, value in UNSUPPORTED.items():
            if request.get(name, value) not in (value, None):
                raise DataError(f"{name}={request[name]!r} is not supported; leave it out")
        trajectory, start = self._turn(session, request)
        sampling = {name: request.get(name) for name in SETTINGS}
        most = [request.get(name) for name in ("max_completion_tokens", "max_tokens")]
        sampling["max_tokens"] = most[1] if most[0] is None else most[0]
        if sampling["seed"] is None:
            sampling["seed"] = trajectory.seed
        self._wait(session, session.rollout.submit(trajectory, **sampling), connected)
        session.trajectories[len(session.trajectories) - (start > 0) :] = [trajectory]
        made = trajectory.tokens[start:]
        text, calls = self.tool_calls(self.tokenizer.decode(made))
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            count = len(session.messages)
            message["tool_calls"] = [
                {"id": f"call_{count}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for index, (name, arguments) in enumerate(calls)
            ]
        session.messages = [*map(_with_text, request["messages"]), message]
        reason = "tool_calls" if calls else "length" if trajectory.ended in ("length", "max_tokens") else "stop"
        usage = {"prompt_tokens": len(trajectory.prompt) + start, "completion_tokens": len(made)}
        return {
            "id": f"chatcmpl-{session.name}-{len(session.messages)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.get("model", "policy"),
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }

    def _turn(self, session: ChatSession, request: Mapping[str, Any]) -> tuple[Trajectory, int]:
        """Return the trajectory of a request, and the tokens of its response before this turn."""
        messages = request.get("messages")
        if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
            raise DataError(f"messages is {str(messages)[:60]!r}; expected a list of chat messages")
        messages = [*map(_with_text, messages)]
        before, tools = session.messages, {"tools": request["tools"]} if request.get("tools") else {}
        same = [*map(_plain, messages[: len(before)])] == [*map(_plain, before)]
        if not (same and len(messages) > len(before) > 0):
            prompt = self.tokenizer.encode(self.tokenizer.render(messages, **tools))
            seed, count = session.seed, len(session.trajectories)
            if seed is not None and count:
                seed = seed_of(seed, "conversation", count)
            return Trajectory(array("q", prompt), seed=seed), 0
        trajectory = copy.deepcopy(session.trajectories[-1])
        reply = {"role": "assistant", "content": REPLY}
        rendered = self.tokenizer.render([*before[:-1], reply, *messages[len(before) :]], **tools)
        following = self.tokenizer.encode(rendered.rpartition(REPLY)[2])
        trajectory.replied(following[1:] if following[:1] == trajectory.tokens[-1:].tolist() else following)
        return trajectory, len(trajectory.tokens)

    def _wait(self, session: ChatSession, submitted: Future[Trajectory], connected: Callable[[], bool]) -> None:
        while not submitted.done():
            if session.is_closed or not connected():
                submitted.cancel()
                session.error = session.error or "its client has disconnected in the middle of a request"
                raise ConnectionAbortedError
            if session.rollout.driven:
                wait([submitted], POLL_S)
            else:
                session.rollout.advance()
        submitted.result()


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
        found: Any = import_object(agent, "multi_turn.options.agent") if isinstance(agent, str) else agent
        if not inspect.iscoroutinefunction(found):
            raise ConfigError(
                f"multi_turn.options.agent is {agent!r}, which is not async; expected async def agent(base_url, "
                "api_key, problem); asyncio.to_thread runs one that blocks",
                key="multi_turn.options.agent",
            )
        self._agent: Any = partial(found, **options)
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
            await self._agent(self._server.base_url, session.name, problem)
            made = session.close()
        finally:
            session.is_closed = True  # a request that is running is cancelled
        if len(made) > 1:
            raise DataError(
                f"the agent began {len(made)} conversations, and an episode is one: each request is to repeat the "
                "messages before it, as they were received",
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


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if not self.path.endswith("/chat/completions"):
                raise DataError(f"{self.path} is not served; the only method is POST /v1/chat/completions")
            session = self.chat.session_of(self.path, key)
            if not session.in_use.acquire(blocking=False):
                raise DataError(f"session {session.name!r} is in use by another request: open one for each agent")
            try:
                answer = self.chat.complete(session, json.loads(body), self._is_connected)
            finally:
                session.in_use.release()
        except ConnectionAbortedError:
            self.close_connection = True
        except (MControllerError, ValueError) as error:
            self._answer(400, {"error": {"message": str(error), "type": "invalid_request_error", "code": None}})
        else:
            self._answer(200, answer)

    def _is_connected(self) -> bool:
        try:
            arrived: bytes = self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return arrived != b""

    def _answer(self, status: int, body: Any) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is a text: some clients send parts.

    Raises:
        DataError: a part is no text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        raise DataError(f"the content of a message is {str(content)[:60]!r}; expected a text, or parts of type text")
    return {**message, "content": "".join(part["text"] for part in content)}


def _plain(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a message says: clients send the policy's back with other fields, such as ``refusal``."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    functions = [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
    return message.get("role"), message.get("content") or "", message.get("tool_call_id"), functions
