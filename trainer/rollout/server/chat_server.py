"""A local server with the APIs of OpenAI and Anthropic, which records the exact tokens of every session.

An agent that was written against such an endpoint needs another ``base_url`` and ``api_key``, and nothing else. A
request that continues the messages of its session continues its tokens: only what follows the policy's is encoded.
``AgentEpisode`` makes such an agent an episode of a run.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from mcontroller.config.imports import import_extra, import_object
from mcontroller.errors import ConfigError, DataError
from trainer.data.tokenizers import TextTokenizer
from trainer.rollout.episode_loop import EpisodeRollout
from trainer.rollout.server.request_error import reject
from trainer.rollout.server.sessions import ChatSession
from trainer.rollout.server.tool_calls import ToolFormat, tool_format
from trainer.rollout.trajectories import TrajectoryRollout
from trainer.rollout.trajectory import Trajectory


class ChatServer:
    """Serves chat completions with tools on this machine, to clients that have the key of a session.

    Args:
        rollout: generates the turns. The requests make the steps of a ``ReferenceEngine``, unless it is ``driven``.
            None: each session has one.
        tokenizer: its chat template renders the messages.
        tool_calls: how the policy writes tool calls: a name of ``tool_format``, or a format.
        vllm_python: see ``tool_format``.
        host: the address on which it listens.
        port: 0 for a free one.
        max_body: [bytes] the most of a request.
        max_sessions: the most open sessions.
        timeout_s: [s] the longest time that the turns of a request take.

    Attributes:
        url: of the server; the ``base_url`` of Anthropic's client.
        base_url: of OpenAI's client, whose API key is that of its session; ``url_of`` has the key in the path.

    Raises:
        ConfigError: the extra ``agents`` is not installed, there is no such format of tool calls, or it cannot listen
            at ``host`` and ``port``.
    """

    def __init__(
        self,
        rollout: TrajectoryRollout | None,
        tokenizer: TextTokenizer,
        *,
        tool_calls: str | ToolFormat = "hermes",
        vllm_python: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = 8 * 2**20,
        max_sessions: int = 4096,
        timeout_s: float = 3600.0,
    ) -> None:
        self.rollout, self.tokenizer = rollout, tokenizer
        if isinstance(tool_calls, str):
            tool_calls = tool_format(tool_calls, tokenizer, vllm_python)
        self.tool_format = tool_calls
        self.max_sessions = max_sessions
        self._sessions: dict[str, ChatSession] = {}
        http = import_extra("trainer.rollout.server.http", "agents", "multi_turn.episode")
        limits = {"max_body": max_body, "timeout_s": timeout_s}
        self._http = http.HttpServer(self._session_of, tokenizer, host=host, port=port, **limits)
        self.url = self._http.url
        self.base_url = f"{self.url}/v1"

    def url_of(self, session: ChatSession) -> str:
        """Return the ``base_url`` of a client whose API key is not that of its session. It is as secret as the key."""
        return f"{self.url}/{session.api_key}/v1"

    def open(self, name: str, seed: int | None = None, rollout: Any = None) -> ChatSession:
        """Open a session.

        Args:
            name: of the session, for messages: letters, digits, ``-``, ``_`` and ``.``.
            seed: of the random numbers of its responses, 64 bits, signed. None: the rollout gives each one.
            rollout: generates its turns: an object with ``submit`` and ``stepped``. None: the server's.

        Raises:
            DataError: a session of this name is open, it has other characters, or too many sessions are open.
        """
        for closed in [key for key, session in list(self._sessions.items()) if session.is_closed]:
            self._sessions.pop(closed, None)
        if len(self._sessions) >= self.max_sessions:
            raise DataError(
                f"{len(self._sessions)} sessions are open, and max_sessions is {self.max_sessions}: close some, or set "
                "max_sessions of the server",
                session=name,
            )
        rollout = self.rollout if rollout is None else rollout
        session = ChatSession(rollout, self.tokenizer, self.tool_format, name, seed)
        is_name = re.fullmatch(r"[\w.-]+", name)
        if not is_name or any(name == other.name for other in list(self._sessions.values())):
            problem = "is open" if is_name else "is not of letters, digits, -, _ and ."
            raise DataError(f"session {name!r} {problem}: give each trajectory a session of its own", session=name)
        self._sessions[session.api_key] = session
        return session

    def close(self) -> None:
        """Stop to serve, and end the sessions; a request that is running is cancelled."""
        for session in list(self._sessions.values()):
            session.cancel()
        self._http.close()

    def _session_of(self, api_key: str) -> ChatSession:
        session = self._sessions.get(api_key)
        if session is None or session.is_closed:
            text = "the API key is not that of an open session: pass api_key of the session of ChatServer.open"
            reject(text, status=401, code="invalid_api_key")
        return session


class AgentEpisode:
    """An episode that runs an agent which was written against an OpenAI endpoint: a class for ``multi_turn.episode``.

    The endpoint is a ``ChatServer`` in the process of the episode. The response is all turns of the agent and what it
    put between them.

    Args:
        agent: ``async def agent(base_url, api_key, problem, **options)``, or its import path. It returns the score of
            its response; a mapping with ``score`` and other numbers, which are reported; or None.
        tool_calls: how the policy writes tool calls: a name of ``tool_format``.
        vllm_python: see ``tool_format``; a run has that of its engines.
        options: other keyword arguments of the agent.

    Raises:
        ConfigError: the function cannot be imported, or is not async.
    """

    def __init__(
        self,
        agent: str | Callable[..., Any],
        *,
        tool_calls: str = "hermes",
        vllm_python: str | None = None,
        **options: Any,
    ) -> None:
        function: Any = import_object(agent, "multi_turn.options.agent") if isinstance(agent, str) else agent
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"multi_turn.options.agent is {agent!r}, which is not async; expected async def agent(base_url, "
                "api_key, problem); asyncio.to_thread runs one that blocks",
                key="multi_turn.options.agent",
            )
        self._agent: Any = partial(function, **options)
        inspect.signature(self._agent).bind("", "", {})
        self._parsing: dict[str, Any] = {"tool_calls": tool_calls, "vllm_python": vllm_python}
        self._server: ChatServer | None = None
        self._sessions = itertools.count()

    async def __call__(self, rollout: EpisodeRollout, problem: Mapping[str, Any]) -> Trajectory:
        """Return the one conversation that the agent had, with the score that the agent returned.

        Raises:
            DataError: it made no request, one was cut off, or it began several conversations.
        """
        if self._server is None:
            self._server = ChatServer(None, rollout.tokenizer, **self._parsing)
        session = self._server.open(f"episode-{next(self._sessions)}", rollout=_FromThreads(rollout))
        try:
            outcome = await self._agent(self._server.base_url, session.api_key, problem)
            made = session.close()
        finally:
            session.cancel()
        if len(made) > 1:
            raise DataError(
                f"the agent began {len(made)} conversations, and an episode is one: each request is to repeat the "
                "messages before it, as they were received, and the tools",
                session=session.name,
            )
        metrics = dict(outcome) if isinstance(outcome, Mapping) else {"score": outcome}
        made[0].score = metrics.pop("score", None)
        made[0].metrics = metrics
        return made[0]


class _FromThreads:
    """The rollout of an episode, for the threads of a server."""

    stepped = None

    def __init__(self, rollout: EpisodeRollout) -> None:
        self._rollout, self._loop = rollout, asyncio.get_running_loop()

    def submit(self, trajectory: Trajectory, **options: Any) -> Future[Trajectory]:
        async def turn() -> Trajectory:
            return await self._rollout.submit(trajectory, **options)

        return asyncio.run_coroutine_threadsafe(turn(), self._loop)
