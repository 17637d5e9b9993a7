"""The server of chat completions: what clients get, which tokens a session records, and what it rejects."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, DataError, WorkerDied
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from tests.trainer.rollout.engine import Formula
from trainer import Trajectory, TrajectoryRollout
from trainer.config import MultiTurnConfig
from trainer.rollout.episodes import EpisodeError
from trainer.rollout.reference_engine import ReferenceEngine
from trainer.rollout.server import http
from trainer.rollout.server.chat_server import ChatServer
from trainer.rollout.server.sessions import ChatSession
from trainer.rollout.server.tool_calls import TOOL_FORMATS
from trainer.run.parts import make_episodes

END, SHIFT = 1, 128
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Characters:
    """A token per character; the policy writes tokens that decode to characters, and that no text is encoded as."""

    eos_token_id, pad_token_id, vocab_size = END, 0, 2 * SHIFT

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(each % SHIFT) for each in ids if each > END)

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        said = [f"[{each['role']}]{each.get('content') or ''}{chr(END)}\n" for each in messages]
        return json.dumps(arguments.get("tools", [])) + "".join(said) + "[assistant]"

    def save(self, directory: Any) -> None: ...


class Agent(Formula):
    """Calls a tool, and answers when there is a result."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self) -> dict[str, float]:
        limits = {"prompt_length": 600, "response_length": 200, "vocab_size": 2 * SHIFT, "max_rows": 256}
        return {**limits, "temperature": 1.0}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        longest = prompts.meta_info["response_length"]
        responses = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, (ids, kept) in enumerate(zip(*(prompts.batch[name] for name in ("input_ids", "attention_mask")))):  # noqa: B905
            text = "".join(chr(each % SHIFT) for each in ids[kept.bool()].tolist())
            reply = CALL if "[tool]" not in text else "It is 5."
            tokens = [*(SHIFT + ord(each) for each in reply), END][len(text.rpartition("[assistant]")[2]) :]
            responses[row, : len(tokens)] = torch.tensor(tokens)[:longest]
        made = {"prompts": prompts.batch["input_ids"], "responses": responses, "response_mask": (responses > 0).long()}
        made |= {"rollout_log_probs": responses / -100, "policy_version": torch.full((len(prompts),), self.version)}
        return DataProto.from_dict(made, meta_info=prompts.meta_info)


@pytest.fixture
def serve() -> Iterator[Callable[..., ChatServer]]:
    servers = []

    def start(max_rows: int | None = None, **options: Any) -> ChatServer:
        group = LocalWorkerGroup(ClassWithInitArgs(Agent), name_prefix="agent")
        engine = ReferenceEngine(group, step_tokens=30, max_rows=max_rows)
        rollout = TrajectoryRollout(group, engines=[engine], eos_token_id=END, pad_token_id=0, **options)
        servers.append(ChatServer(rollout, Characters()))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Rejected(ValueError):
    """A request that was answered with an error; it has the fields of OpenAI's API."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(error["message"])
        self.status, self.code, self.param = status, error["code"], error["param"]


def with_urllib(url: str, key: str, **request: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    sent = urllib.request.Request(f"{url}/chat/completions", json.dumps(request).encode(), headers)
    try:
        with urllib.request.urlopen(sent, timeout=30) as answer:
            return json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        raise Rejected(error.code, json.load(error)["error"]) from error


def test_an_agent_with_a_tool_is_one_trajectory_of_exact_tokens(serve: Callable[..., ChatServer]) -> None:
    server, ask = serve(), with_urllib
    session = server.open("problem-7", seed=5)
    first = ask(server.base_url, session.api_key, messages=ASK, tools=TOOLS)
    (call,) = first["message"]["tool_calls"]
    assert first["finish_reason"] == "tool_calls" and call["function"]["name"] == "add"
    server.rollout.group.move()
    numbers = json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": str(numbers["a"] + numbers["b"])}
    second = ask(server.url_of(session), "another key", messages=[*ASK, first["message"], result], tools=TOOLS)
    assert (second["message"]["content"], second["finish_reason"]) == ("It is 5.", "stop")
    (made,) = session.close()
    tokenizer = Characters()
    assert made.prompt.tolist() == tokenizer.encode(tokenizer.render(ASK, tools=TOOLS)) and made.seed == 5
    turns = [[SHIFT + ord(each) for each in text] + [END] for text in (CALL, "It is 5.")]
    reply = tokenizer.encode(f"\n[tool]5{chr(END)}\n[assistant]")
    assert made.tokens.tolist() == turns[0] + reply + turns[1]
    assert made.mask.tolist() == [1] * len(turns[0]) + [0] * len(reply) + [1] * len(turns[1])
    assert made.versions.tolist() == [0] * len(turns[0]) + [-1] * len(reply) + [1] * len(turns[1])
    assert made.log_probs[-2] == pytest.approx(made.tokens[-2] / -100)


def test_other_messages_than_those_of_the_session_begin_another_trajectory(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    first = with_urllib(server.base_url, session.api_key, messages=ASK)
    rewritten = {**first["message"], "content": "I know this.", "tool_calls": None}
    with_urllib(server.base_url, session.api_key, messages=[*ASK, rewritten, {"role": "user", "content": "So?"}])
    made = session.close()
    assert [each.turns for each in made] == [1, 1] and made[0].seed != made[1].seed


def test_sessions_at_once_record_their_own_tokens(serve: Callable[..., ChatServer]) -> None:
    server = serve(max_rows=3)

    def converse(number: int) -> Trajectory:
        session = server.open(f"session-{number}", seed=number)
        ask = partial(with_urllib, server.base_url, session.api_key)
        messages = [{"role": "user", "content": f"{number} + 3?"}]
        said = ask(messages=messages)["message"]
        ask(messages=[*messages, said, {"role": "tool", "tool_call_id": "call00000", "content": str(number)}])
        (made,) = session.close()
        return made

    with ThreadPoolExecutor(16) as agents:
        for number, made in enumerate(agents.map(converse, range(16))):
            assert f"[user]{number} + 3?" in Characters().decode(made.prompt) and made.seed == number
            reply = [token for token, sampled in zip(made.tokens, made.mask, strict=True) if not sampled]
            assert reply == Characters().encode(f"\n[tool]{number}{chr(END)}\n[assistant]")


def test_changed_tools_begin_another_trajectory_with_these_tools(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    ask = partial(with_urllib, server.base_url, session.api_key)
    said = ask(messages=ASK, tools=TOOLS)["message"]
    messages = [*ASK, said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}]
    others = [{"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}]
    ask(messages=messages, tools=others)
    first, second = session.close()
    tokenizer = Characters()
    assert first.prompt.tolist() == tokenizer.encode(tokenizer.render(ASK, tools=TOOLS))
    assert second.prompt.tolist()[: len(json.dumps(others))] == tokenizer.encode(json.dumps(others))
    assert second.turns == 1


@pytest.mark.parametrize("text", ["@@the-reply-of-the-policy@@ 5", f"5{chr(END)}", "It is 5.", ""])
def test_no_text_of_a_tool_changes_which_tokens_are_recorded(serve: Callable[..., ChatServer], text: str) -> None:
    server = serve()
    session = server.open("a")
    ask = partial(with_urllib, server.base_url, session.api_key)
    said = ask(messages=ASK)["message"]
    ask(messages=[*ASK, said, {"role": "tool", "tool_call_id": "call00000", "content": text}])
    (made,) = session.close()
    reply = [token for token, sampled in zip(made.tokens, made.mask, strict=True) if not sampled]
    assert reply == Characters().encode(f"\n[tool]{text}{chr(END)}\n[assistant]")


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (CALL, "", [("add", '{"a": 2, "b": 3}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", '{"a": 2}')]),
        ('<tool_call>{"name": "f", "arguments": "text"}</tool_call>', None, []),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": 5}</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": NaN}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": ' + "[" * 9999 + "]" * 9999 + "}</tool_call>", None, []),
        ("<tool_call>{}</tool_call>", None, []),
    ],
)
def test_tool_calls_are_the_objects_with_a_name(text: str, rest: str | None, calls: list[tuple[str, str]]) -> None:
    assert TOOL_FORMATS["hermes"].parse(text, TOOLS) == (text if rest is None else rest, calls)


def test_sessions_end_with_an_error_that_names_them(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    with pytest.raises(DataError) as caught:
        server.open("used").close()
    assert caught.value.session == "used"
    with pytest.raises(DataError) as caught:
        server.open("a")
    assert caught.value.session == "a"
    with pytest.raises(DataError):
        server.open("a/b")
    with_urllib(server.url_of(session), "another key", messages=ASK)
    assert len(session.close()) == 1
    with pytest.raises(Rejected) as rejected:
        with_urllib(server.base_url, session.api_key, messages=ASK)
    assert (rejected.value.status, rejected.value.code) == (401, "invalid_api_key")
    again = server.open("a")
    assert again.api_key != session.api_key
    with_urllib(server.base_url, again.api_key, messages=ASK)
    server.close()
    assert len(again.close()) == 1


def test_a_group_that_fails_ends_the_session_and_not_the_server(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session, other = server.open("a"), server.open("b")

    class Broken:
        stepped = None

        def submit(self, trajectory: Trajectory, **options: Any) -> Future[Trajectory]:
            failed: Future[Trajectory] = Future()
            failed.set_exception(WorkerDied("rank 3 has died", role="rollout", rank=3, exit_cause="", log_tail=""))
            return failed

    session.rollout = Broken()
    with pytest.raises(Rejected) as rejected:
        with_urllib(server.base_url, session.api_key, messages=ASK)
    assert rejected.value.status == 500
    with pytest.raises(DataError) as caught:
        session.close()
    assert caught.value.session == "a"
    assert with_urllib(server.base_url, other.api_key, messages=ASK)["finish_reason"] == "stop"


def connected(server: ChatServer) -> socket.socket:
    """Return a connection to a server."""
    return socket.create_connection(("127.0.0.1", int(server.base_url.split(":")[2].split("/")[0])), timeout=30)


def request_of(session: ChatSession) -> bytes:
    """Return a request as it is sent."""
    body = json.dumps({"messages": ASK})
    key = f"Authorization: Bearer {session.api_key}\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{key}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_agents_connect_at_once_beside_idle_connections(
    serve: Callable[..., ChatServer], many_files: None
) -> None:
    server = serve()
    sessions = [server.open(f"agent-{number}") for number in range(400)]
    threads = threading.active_count()
    with ExitStack() as clients:
        for number in range(300):
            clients.enter_context(connected(server)).sendall((b"", b"POST", request_of(sessions[0])[:90])[number % 3])
        agents = [clients.enter_context(connected(server)) for _ in sessions]
        assert threading.active_count() <= threads
        for agent, session in zip(agents, sessions, strict=True):  # each has connected before the first one sends
            agent.sendall(request_of(session))
        assert {agent.recv(12) for agent in agents} == {b"HTTP/1.1 200"}
    assert all(len(session.close()) == 1 for session in sessions)


def test_a_turn_that_a_client_cuts_off_goes_on_with_the_end_of_the_message(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    ask = partial(with_urllib, server.base_url, session.api_key)
    first = ask(messages=ASK, max_tokens=5)
    assert (first["message"]["content"], first["finish_reason"]) == (CALL[:5], "length")
    ask(messages=[*ASK, first["message"], {"role": "user", "content": "Go on."}])
    (made,) = session.close()
    reply = [token for token, sampled in zip(made.tokens, made.mask, strict=True) if not sampled]
    assert made.tokens[:5].tolist() == [SHIFT + ord(letter) for letter in CALL[:5]]
    assert reply == Characters().encode(f"{chr(END)}\n[user]Go on.{chr(END)}\n[assistant]")


def test_what_clients_send_without_a_meaning_here_is_accepted(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    ask = partial(with_urllib, server.base_url, session.api_key)
    nothing = dict.fromkeys(("stop", "seed", "tools", "max_tokens", "temperature", "tool_choice", "stream_options"))
    same = {"n": 1, "stream": False, "logprobs": False, "presence_penalty": 0, "response_format": {"type": "text"}}
    messages = [{**ASK[0], "role": "developer"}, {**ASK[1], "content": [{"type": "text", "text": ASK[1]["content"]}]}]
    said = ask(messages=messages, model="gpt-5", user="me", store=True, metadata={"a": "b"}, **nothing, **same)[
        "message"
    ]
    said = {**said, "refusal": None, "annotations": [], "audio": None, "function_call": None, "name": "solver"}
    ask(messages=[*ASK, said, {"role": "tool", "tool_call_id": "call00000", "content": "5", "name": "add"}])
    (made,) = session.close()
    assert made.prompt.tolist() == Characters().encode(Characters().render(ASK)) and made.turns == 2


def test_a_server_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, http.__name__)
    with pytest.raises(ConfigError) as caught:
        ChatServer(None, Characters())
    assert (caught.value.key, caught.value.value) == ("multi_turn.episode", "agents")


@pytest.mark.parametrize("sent", [0, 10, -5], ids=["nothing", "half of a header", "half of a body"])
def test_a_request_that_does_not_arrive_is_ended(
    serve: Callable[..., ChatServer], monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    monkeypatch.setattr(http, "IDLE_S", 0.1)
    server = serve()
    session = server.open("a")
    with connected(server) as client:
        client.sendall(request_of(session)[:sent])
        answer = client.makefile("rb").read()  # until the server closes
    assert answer[:12] == (b"HTTP/1.1 408" if sent < 0 else b"")
    monkeypatch.setattr(http, "IDLE_S", 30)
    assert with_urllib(server.base_url, session.api_key, messages=ASK)["finish_reason"] == "stop"


def test_a_client_that_disconnects_cancels_its_trajectory(serve: Callable[..., ChatServer]) -> None:
    server = serve(driven=True)  # nobody makes steps, so that the request waits
    session = server.open("a")
    with connected(server) as client:
        client.sendall(request_of(session))
        until = time.monotonic() + 30
        while not len(server.rollout) and time.monotonic() < until:
            time.sleep(0.01)
        (submitted,) = server.rollout.engine.requests()
        with pytest.raises(Rejected) as rejected:
            with_urllib(server.base_url, session.api_key, messages=ASK)
        assert rejected.value.status == 400 and not submitted.done()
        ended = threading.Event()
        submitted.add_done_callback(lambda _: ended.set())
    assert ended.wait(30) and submitted.cancelled() and not server.rollout.start()
    while session.in_use:
        time.sleep(0.01)
    with pytest.raises(DataError) as caught:
        session.close()
    assert caught.value.session == "a"


def test_a_session_that_is_closed_cancels_its_request(serve: Callable[..., ChatServer]) -> None:
    server = serve(driven=True)
    session = server.open("a")
    for port in (int(server.url.rpartition(":")[2]), 1 << 20):  # in use, and none
        with pytest.raises(ConfigError) as rejected:
            ChatServer(server.rollout, Characters(), port=port)
        assert (rejected.value.key, rejected.value.value) == ("port", port)
    with connected(server) as client:
        client.sendall(request_of(session))
        until = time.monotonic() + 30
        while not len(server.rollout) and time.monotonic() < until:
            time.sleep(0.01)
        (submitted,) = server.rollout.engine.requests()
        with pytest.raises(DataError) as caught:
            session.close()
        assert caught.value.session == "a"
        assert client.recv(12) == b"HTTP/1.1 400" and submitted.cancelled()


async def adder(base_url: str, api_key: str, problem: Mapping[str, Any]) -> Any:
    """Ask, add what the policy asks for, and ask again; misbehave as the problem says."""
    if problem["kind"] == "silent":
        return None
    ask = partial(asyncio.to_thread, with_urllib, base_url, api_key, tools=TOOLS)
    said = (await ask(messages=ASK))["message"]
    if problem["kind"] == "rewrites":
        said = {"role": "assistant", "content": "Let me add."}
    added = {"role": "tool", "tool_call_id": "call00000", "content": [{"type": "text", "text": "5"}]}
    assert (await ask(messages=[*ASK, said, added]))["message"]["content"] == "It is 5."
    if problem["kind"] == "shares":
        await ask(messages=ASK)
        await ask(messages=ASK)
    return {"": {"score": 0.5, "steps": 2}, "number": 1}.get(problem["kind"], "It is 5.")


async def adder_of_openai_agents(base_url: str, api_key: str, problem: Mapping[str, Any]) -> None:
    """The same with a tool, a loop and a client of the package openai-agents."""
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> str:
        return str(a + b)

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    model = agents.OpenAIChatCompletionsModel("policy", client)
    agent = agents.Agent("adder", instructions="Be brief.", model=model, tools=[add])
    assert (await agents.Runner.run(agent, "2 + 3?")).final_output == "It is 5."


def run_agent(agent: str, *kinds: str, processes: int = 0) -> list[Trajectory | EpisodeError]:
    """Run the agent as a configuration names it, one episode of each kind at a time."""
    path = "trainer.rollout.server.chat_server:AgentEpisode"
    config = MultiTurnConfig(episode=path, options={"agent": f"{__name__}:{agent}"}, processes=processes)
    episodes = make_episodes(config, Characters())
    assert episodes is not None
    group = LocalWorkerGroup(ClassWithInitArgs(Agent), name_prefix="agent")
    episodes.connect(TrajectoryRollout(group, driven=True, eos_token_id=END, pad_token_id=0))
    try:
        futures = [episodes.start({"prompt_ids": [5], "kind": kind}, seed=3) for kind in kinds]
        episodes.run()
        return [each.exception() or each.result() for each in futures]  # type: ignore[misc]
    finally:
        episodes.close()


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_an_agent_of_a_configuration_makes_the_trajectory_of_its_episode(processes: int) -> None:
    kinds = ("", "number", "silent", "rewrites", "shares", "text")
    made, scored, *failed = run_agent("adder", *kinds, processes=processes)
    assert isinstance(made, Trajectory) and isinstance(scored, Trajectory)
    assert (made.score, made.metrics, scored.score, scored.metrics) == (0.5, {"steps": 2.0}, 1.0, {})
    turns = [[SHIFT + ord(each) for each in text] + [END] for text in (CALL, "It is 5.")]
    reply = Characters().encode(f"\n[tool]5{chr(END)}\n[assistant]")
    assert made.prompt.tolist() == Characters().encode(Characters().render(ASK, tools=TOOLS))
    assert (made.tokens.tolist(), made.seed, made.ended) == (turns[0] + reply + turns[1], 3, "stop")
    assert made.versions.tolist() == [0] * len(turns[0]) + [-1] * len(reply) + [0] * len(turns[1])
    assert [error.kind for error in failed if isinstance(error, EpisodeError)] == [*["raised"] * 3, "invalid"]


@pytest.mark.processes
def test_an_agent_of_a_public_library_trains_unchanged() -> None:
    pytest.importorskip("agents.models.openai_chatcompletions", reason="the extra test: no openai-agents")
    (made,) = run_agent("adder_of_openai_agents", "")
    assert isinstance(made, Trajectory) and (made.turns, made.ended) == (2, "stop")
    sampled = [token for token, mark in zip(made.tokens, made.mask, strict=True) if mark]
    assert sampled == [SHIFT + ord(each) for each in CALL] + [END] + [SHIFT + ord(each) for each in "It is 5."] + [END]


@pytest.mark.parametrize("agent", ["with_urllib", "nothing"])
def test_an_agent_that_cannot_run_is_rejected_with_its_field(agent: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_agent(agent)
    assert caught.value.key == "multi_turn.options.agent"
