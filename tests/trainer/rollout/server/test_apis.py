"""Streams, stop texts, choices and log-probabilities, and the same in the Responses and the Messages API."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from mcontroller.errors import DataError
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from tests.trainer.rollout.server.test_chat_server import ASK, CALL, END, SHIFT, TOOLS, Agent, Characters
from trainer import Trajectory, TrajectoryRollout
from trainer.rollout.episodes import Episodes
from trainer.rollout.reference_engine import ReferenceEngine
from trainer.rollout.server.chat_requests import ChatRequest
from trainer.rollout.server.chat_server import AgentEpisode, ChatServer
from trainer.rollout.server.sessions import ChatSession, Conversation, Turn
from trainer.rollout.server.tool_calls import TOOL_FORMATS
from workers.generate.engine_protocol import Sampled

ANSWER = "It is 5."
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "5"}


def tokens_of(text: str, end: Sequence[int] = (END,)) -> list[int]:
    return [*(SHIFT + ord(letter) for letter in text), *end]


def started(options: dict[str, Any] | None = None) -> ChatServer:
    group = LocalWorkerGroup(ClassWithInitArgs(Agent), name_prefix="agent")
    rollout = TrajectoryRollout(
        group, engines=[ReferenceEngine(group, step_tokens=3)], eos_token_id=END, pad_token_id=0
    )
    return ChatServer(rollout, Characters(), **(options or {}))


@pytest.fixture
def serve() -> Iterator[Callable[..., ChatServer]]:
    with ExitStack() as servers:

        def start(options: dict[str, Any] | None = None) -> ChatServer:
            server = started(options)
            servers.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ChatServer]:
    server = started()
    yield server
    server.close()


def post(session: ChatSession, server: ChatServer, path: str = "chat/completions", **body: Any) -> httpx.Response:
    url = f"{server.base_url}/{path}"
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {session.api_key}"}, timeout=30, verify=False)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of a stream of events; the names of the events are those of the data."""
    assert response.headers["content-type"].startswith("text/event-stream")
    made = []
    for event in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        if fields["data"] != "[DONE]":
            made.append(json.loads(fields["data"]))
            assert fields.get("event", made[-1].get("type")) == made[-1].get("type")
    return made


def test_text_is_sent_slice_by_slice_and_a_tool_call_whole(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    body = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    *chunks, usage = events(post(session, server, messages=[*ASK, RESULT], tools=TOOLS, **body))
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert [text for text in texts if text] == ["It ", "is ", "5."]
    scores = [entry["logprob"] for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ANSWER) + 1 == len(scores)
    assert scores == session.trajectories[0].log_probs.tolist()
    *chunks, last = events(post(session, server, messages=ASK, tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [call["function"] for (call,) in calls] == [{"name": "add", "arguments": '{"a": 2, "b": 3}'}]
    assert not any(delta.get("content") for delta in deltas)
    assert last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(
    serve: Callable[..., ChatServer], stream: bool
) -> None:
    server = serve()
    session = server.open("a")
    response = post(session, server, messages=[*ASK, RESULT], stop=["never", "is"], stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)]
        text, reason = "".join(each["delta"].get("content", "") for each in choices), choices[-1]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("It ", "stop")
    messages = [*ASK, RESULT, {"role": "assistant", "content": "It "}, {"role": "user", "content": "Go on."}]
    assert post(session, server, messages=messages, stop="never").status_code == 200
    (made,) = session.close()
    reply = Characters().encode(f"{chr(END)}\n[user]Go on.{chr(END)}\n[assistant]")
    assert made.tokens.tolist() == tokens_of("It is", ()) + reply + tokens_of(ANSWER)
    assert len(made.mask) == len(made.log_probs) == len(made.versions) == len(made.tokens)


class Letters(Characters):
    """A token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return [2 + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number - 2 for number in ids if number > END).decode(errors="replace")


class Writes:
    """A rollout whose policy writes a text, a number of tokens at a time."""

    stepped = None

    def __init__(self, text: str, size: int) -> None:
        self.tokens, self.size = [*Letters().encode(text), END], size

    def submit(self, trajectory: Trajectory, **options: Any) -> Future[Trajectory]:
        future: Future[Trajectory] = Future()

        def write() -> None:
            for start in range(0, len(self.tokens), self.size):
                part = self.tokens[start : start + self.size]
                trajectory.sampled(part, [-0.5] * len(part))
                time.sleep(0.03)  # longer than between two looks at a stream
            trajectory.ended = "stop"
            if not future.cancelled():
                future.set_result(trajectory)

        threading.Thread(target=write).start()
        return future


@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_stop_text_that_is_complete_first_ends_a_turn_however_many_tokens_arrive_at_once(
    serve: Callable[..., ChatServer], size: int
) -> None:
    server = serve()
    server.tokenizer = Letters()
    server._http._tokenizer = Letters()
    session = server.open("a", rollout=Writes("xabcd", size))
    answer = post(session, server, messages=ASK, stop=["abc", "b"]).json()["choices"][0]
    (made,) = session.close()
    assert answer["message"]["content"] == "xa" and made.tokens.tolist() == Letters().encode("xab")


def test_a_turn_is_not_decoded_again_for_every_token() -> None:
    class Counting(Letters):
        decoded = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.decoded += len(ids)
            return super().decode(ids)

    tokenizer, made, length = Counting(), Trajectory([5]), 3000
    request = ChatRequest.of({"messages": ASK, "stop": ["b"]})
    turn = Turn(Conversation([], [], made), 0, request, TOOL_FORMATS["hermes"])
    for number in range(length):
        made.sampled(Letters().encode("a"), [-0.5])
        turn.read(tokenizer)
        assert number * 0.99 <= len(turn.tokens) <= number + 1
    turn.read(tokenizer, is_last=True)
    assert turn.text == "a" * length and tokenizer.decoded < 150 * length


def test_a_token_that_is_a_part_of_a_character_has_no_bytes(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    server.tokenizer = Letters()
    server._http._tokenizer = Letters()
    session = server.open("a", rollout=Writes("\u20ac!", 1))
    choices = [chunk["choices"][0] for chunk in events(post(session, server, messages=ASK, stream=True, logprobs=True))]
    assert [choice["delta"].get("content") for choice in choices] == ["", "\u20ac", "!", None]
    entries = [entry["bytes"] for choice in choices for entry in choice["logprobs"]["content"]]
    assert entries == [None, None, None, [ord("!")], []]


def test_choices_are_trajectories_of_which_any_can_go_on(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a", seed=3)
    choices = post(session, server, messages=ASK, tools=TOOLS, n=3).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["message"]["tool_calls"][0]["id"] for choice in choices] == ["call00000", "call00001", "call00002"]
    result = {**RESULT, "tool_call_id": "call00001"}
    answer = post(session, server, messages=[*ASK, choices[1]["message"], result], tools=TOOLS, n=2).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER, ANSWER]
    made = session.close()
    assert sorted(trajectory.turns for trajectory in made) == [1, 1, 2, 2]
    assert len({trajectory.seed for trajectory in made}) == 4 and made[0].seed == 3


def test_conversations_of_a_session_go_on_in_any_order(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    starts = [[{"role": "user", "content": text}] for text in ("2 + 3?", "And 1 + 4?")]
    for messages in starts:
        messages.append(post(session, server, messages=messages).json()["choices"][0]["message"])
    for messages in starts:
        post(session, server, messages=[*messages, RESULT])
    assert [trajectory.turns for trajectory in session.close()] == [2, 2]


FUNCTION = {"type": "function", "name": "add", "description": None, "parameters": {"type": "object"}, "strict": None}


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_is_the_same_conversation(serve: Callable[..., ChatServer], stream: bool) -> None:
    server = serve()
    session = server.open("a")

    def respond(items: Any) -> dict[str, Any]:
        options = {"instructions": "Be brief.", "tools": [FUNCTION], "stream": stream, "store": False}
        response = post(session, server, "responses", input=items, **options)
        if not stream:
            return response.json()
        made = events(response)
        assert [event["sequence_number"] for event in made] == [*range(len(made))]
        output = made[-1]["response"]["output"]
        assert [event["item"] for event in made if event["type"] == "response.output_item.done"] == output
        whole = "".join(part["text"] for item in output for part in item.get("content", ()))
        texts = [event["delta"] for event in made if event["type"] == "response.output_text.delta"]
        assert "".join(texts) == whole
        return made[-1]["response"]

    first = respond("2 + 3?")
    (call,) = first["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 2, "b": 3})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    second = respond([{"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]}, call, result])
    assert (second["output"][0]["content"][0]["text"], second["status"]) == (ANSWER, "completed")
    assert second["usage"]["output_tokens"] == len(ANSWER) + 1
    (made,) = session.close()
    reply = Characters().encode(f"\n[tool]5{chr(END)}\n[assistant]")
    assert made.tokens.tolist() == tokens_of(CALL) + reply + tokens_of(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_the_messages_api_is_the_same_conversation(serve: Callable[..., ChatServer], stream: bool) -> None:
    server = serve()
    session = server.open("a")

    def create(messages: list[Any]) -> dict[str, Any]:
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        body = {"model": "policy", "max_tokens": 100, "system": "Be brief.", "tools": tools, "stream": stream}
        url, headers = f"{server.url}/v1/messages", {"x-api-key": session.api_key}
        response = httpx.post(url, json={**body, "messages": messages}, headers=headers, timeout=30, verify=False)
        if not stream:
            return response.json()
        content: list[dict[str, Any]] = []
        made = events(response)
        for event in made:
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                content[event["index"]]["text"] += event["delta"]["text"]
            elif event["type"] == "content_block_delta":
                content[event["index"]]["input"] = json.loads(event["delta"]["partial_json"])
        end = next(event for event in made if event["type"] == "message_delta")
        assert made[-1]["type"] == "message_stop"
        return {"content": content, "stop_reason": end["delta"]["stop_reason"], "usage": end["usage"]}

    ask = {"role": "user", "content": "2 + 3?"}
    first = create([ask])
    (use,) = first["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 2, "b": 3})
    assert first["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "5"}]}
    second = create([ask, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}])
    assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": ANSWER}], "end_turn")
    assert second["usage"]["output_tokens"] == len(ANSWER) + 1
    (made,) = session.close()
    reply = Characters().encode(f"\n[tool]5{chr(END)}\n[assistant]")
    assert made.tokens.tolist() == tokens_of(CALL) + reply + tokens_of(ANSWER)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", {}),
        ("responses", {"input": 5}),
        ("responses", {"input": ["a"]}),
        ("responses", {"input": [{"type": "computer_call"}]}),
        ("responses", {"input": [{"type": "function_call", "call_id": "a", "name": "add"}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("responses", {"input": "a", "previous_response_id": "resp_1"}),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}),
        ("responses", {"input": "a", "tool_choice": "required"}),
        ("messages", {"messages": [USER]}),
        ("messages", {"max_tokens": 5}),
        ("messages", {"max_tokens": 5, "messages": "a"}),
        ("messages", {"max_tokens": 5, "messages": [{"role": "system", "content": "a"}]}),
        ("messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("messages", {"max_tokens": 5, "messages": [USER], "tools": [{"type": "bash"}]}),
        ("messages", {"max_tokens": 5, "messages": [USER], "tool_choice": {"type": "any"}}),
        ("messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a" * 999}]}),
    ],
)
def test_a_malformed_request_of_an_api_costs_its_session_nothing(
    shared_server: ChatServer, path: str, body: dict[str, Any]
) -> None:
    session = shared_server.open("a")
    response = post(session, shared_server, path, **body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert post(session, shared_server, messages=ASK).status_code == 200
    assert len(session.close()) == 1


def test_a_prompt_longer_than_the_context_is_rejected_before_a_stream_begins(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    session = server.open("a")
    response = post(session, server, messages=ASK * 30, stream=True)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert len(events(post(session, server, messages=ASK, stream=True))) > 2


class Waiting:
    """A rollout whose turns end when the test says."""

    stepped = None

    def __init__(self) -> None:
        self.submitted: list[tuple[Trajectory, Future[Trajectory]]] = []

    def submit(self, trajectory: Trajectory, **options: Any) -> Future[Trajectory]:
        future: Future[Trajectory] = Future()
        self.submitted.append((trajectory, future))
        return future


def test_a_client_that_leaves_a_stream_cancels_its_turn_and_no_other(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    rollout = Waiting()
    session, other = server.open("a", rollout=rollout), server.open("b")
    body = json.dumps({"messages": ASK, "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {session.api_key}\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        ((trajectory, future),) = rollout.submitted
        trajectory.sampled(tokens_of("It is", ()), [0.0] * 5)
        received = b""
        while b"It is" not in received:
            received += client.recv(4096)
        assert post(session, server, messages=ASK).status_code == 400  # it is in use
    until = time.monotonic() + 30
    while session.in_use and time.monotonic() < until:
        time.sleep(0.01)
    assert future.cancelled()
    with pytest.raises(DataError) as caught:
        session.close()
    assert caught.value.session == "a"
    assert len(events(post(other, server, messages=ASK, stream=True))) > 2


def test_a_tool_call_that_is_not_json_is_the_text_of_the_turn(serve: Callable[..., ChatServer]) -> None:
    server, rollout = serve(), Waiting()
    session = server.open("a", rollout=rollout)
    text = 'So: <tool_call>{"name": "add", "arguments": {"a": 2</tool_call>'

    def submit(given: Trajectory, **options: Any) -> Future[Trajectory]:
        future = Waiting.submit(rollout, given, **options)
        given.sampled(tokens_of(text), [0.0] * (len(text) + 1))
        given.ended = "stop"
        future.set_result(given)
        return future

    rollout.submit = submit  # type: ignore[method-assign]
    chunks = events(post(session, server, messages=ASK, tools=TOOLS, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop" and not any("tool_calls" in choice["delta"] for choice in choices)
    reply = {"role": "assistant", "content": text}
    again = post(session, server, messages=[*ASK, reply, {"role": "user", "content": "Again."}], tools=TOOLS)
    assert again.json()["choices"][0]["message"]["content"] == text
    (trajectory,) = session.close()
    assert trajectory.turns == 2


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(serve: Callable[..., ChatServer]) -> None:
    server = serve({"timeout_s": 0.05})
    session = server.open("a", rollout=Waiting())
    assert events(post(session, server, messages=ASK, stream=True))[-1]["error"]["code"] == "timeout"
    session = server.open("b", rollout=Waiting())
    assert post(session, server, messages=ASK).status_code == 504


def test_sessions_have_a_most(serve: Callable[..., ChatServer]) -> None:
    server = serve({"max_sessions": 2})
    first, _ = server.open("a"), server.open("b")
    with pytest.raises(DataError) as caught:
        server.open("c")
    assert caught.value.session == "c"
    first.cancel()
    assert server.open("c").api_key != first.api_key


class Forgetful(Characters):
    """Leaves out system messages once the policy has written."""

    def render(self, messages: Sequence[Any], **arguments: Any) -> str:
        has_reply = any(message["role"] == "assistant" for message in messages)
        kept = [message for message in messages if not (has_reply and message["role"] == "system")]
        return super().render(kept, **arguments)


def test_a_template_that_changes_the_prefix_is_reported_with_both_texts(serve: Callable[..., ChatServer]) -> None:
    server = serve()
    server.tokenizer = Forgetful()
    session = server.open("a")
    reply = post(session, server, messages=ASK).json()["choices"][0]["message"]
    post(session, server, messages=[*ASK, reply, RESULT])
    (change,) = session.prefix_changes
    ours, theirs = (Characters().decode(Characters().encode(Characters().render(said))) for said in (ASK, ASK[1:]))
    assert change.reply == 2 and change.recorded.startswith(ours + CALL) and change.rendered.startswith(theirs)
    (made,) = session.close()
    assert made.prompt.tolist() == Characters().encode(Characters().render(ASK))


class EndsCallsDifferently(Characters):
    """Ends texts of the assistant with another token than its calls."""

    def render(self, messages: Sequence[Any], **arguments: Any) -> str:
        text = json.dumps(arguments.get("tools", []))
        for message in messages:
            calls = json.dumps([call["function"] for call in message.get("tool_calls", ())] or "")
            end = chr(2) if message["role"] == "assistant" and calls == '""' else chr(END)
            text += f"[{message['role']}]{message.get('content') or ''}{calls}{end}\n"
        return text + "[assistant]"


def test_a_call_that_ends_with_another_token_than_texts_is_followed_by_no_second_end(
    serve: Callable[..., ChatServer],
) -> None:
    server = serve()
    server.tokenizer = EndsCallsDifferently()
    session = server.open("a")
    reply = post(session, server, messages=ASK, tools=TOOLS).json()["choices"][0]["message"]
    post(session, server, messages=[*ASK, reply, RESULT], tools=TOOLS)
    (made,) = session.close()
    between = Characters().encode(f'\n[tool]5""{chr(END)}\n[assistant]')
    assert made.tokens.tolist() == tokens_of(CALL) + between + tokens_of(ANSWER)


@pytest.mark.processes
def test_the_client_of_openai_gets_turns_and_streams(serve: Callable[..., ChatServer]) -> None:
    openai = pytest.importorskip("openai")
    server = serve()
    session = server.open("a")
    client = openai.OpenAI(base_url=server.base_url, api_key=session.api_key, max_retries=0)
    chat = client.chat.completions
    with chat.stream(model="policy", messages=ASK, tools=TOOLS) as stream:
        reply = stream.get_final_completion().choices[0].message
    assert reply.tool_calls[0].function.name == "add"
    messages = [*ASK, reply.model_dump(exclude_none=True, exclude={"parsed"}), RESULT]
    for call in messages[2]["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    chunks = [*chat.create(model="policy", messages=messages, tools=TOOLS, stream=True)]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == ANSWER and len([text for text in texts if text]) > 1
    items: list[Any] = [{"role": "user", "content": "2 + 3?"}]
    with client.responses.stream(model="policy", input=items, tools=[FUNCTION]) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    items += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
    items.append({"type": "function_call_output", "call_id": response.output[0].call_id, "output": "5"})
    assert client.responses.create(model="policy", input=items, tools=[FUNCTION]).output_text == ANSWER
    assert [trajectory.turns for trajectory in session.close()] == [2, 2]


class Gated:
    """An engine that generates by itself: it hands out the first word, and goes on when the client has it."""

    name = "gated"

    def __init__(self) -> None:
        self.go_on, self.timed_out = threading.Event(), False

    async def generate(self, prompt: Any, sampling: Any, on_part: Callable[[Sampled], None] | None = None) -> Sampled:
        tokens = tokens_of(ANSWER)
        assert on_part is not None
        for token in tokens[:3]:
            on_part(Sampled(array("q", [token]), array("d", [-0.5]), [(0, 1)]))
        self.timed_out = not await asyncio.to_thread(self.go_on.wait, 30)
        return Sampled(array("q", tokens[3:]), array("d", [-0.5] * len(tokens[3:])), [(0, len(tokens) - 3)])

    async def close(self) -> None: ...


@pytest.mark.processes  # the client calls uname
@pytest.mark.parametrize("in_episode", [False, True])
def test_a_stream_has_the_tokens_of_an_engine_while_it_generates(in_episode: bool) -> None:
    openai = pytest.importorskip("openai")
    gated, texts = Gated(), list[str]()

    async def read_stream(base_url: str, api_key: str, problem: Mapping[str, Any]) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            async for chunk in await client.chat.completions.create(model="policy", messages=ASK, stream=True):
                texts.append(chunk.choices[0].delta.content or "")
                if "".join(texts) == ANSWER[:3]:
                    gated.go_on.set()  # nothing else lets the engine go on in time

    group = LocalWorkerGroup(ClassWithInitArgs(Agent), name_prefix="agent")
    rollout = TrajectoryRollout(group, engines=[gated], driven=in_episode, eos_token_id=END, pad_token_id=0)
    if in_episode:
        episodes = Episodes(AgentEpisode, {"agent": read_stream}, tokenizer=Characters(), processes=0)
        episodes.connect(rollout)
        future = episodes.start({"prompt_ids": [5]}, seed=3)
        episodes.run()
        made = future.result()
    else:
        rollout.advance = None  # type: ignore[method-assign,assignment]  # nobody has to make its steps
        server = ChatServer(rollout, Characters())
        session = server.open("a")
        asyncio.run(read_stream(server.base_url, session.api_key, {}))
        (made,) = session.close()
        server.close()
    assert not gated.timed_out and "".join(texts) == ANSWER and len([text for text in texts if text]) > 1
    assert made.tokens.tolist() == tokens_of(ANSWER) and made.log_probs.tolist() == [-0.5] * len(made.tokens)


@pytest.mark.processes
def test_the_client_of_anthropic_gets_turns_and_streams(serve: Callable[..., ChatServer]) -> None:
    anthropic = pytest.importorskip("anthropic")
    server = serve()
    session = server.open("a")
    client = anthropic.Anthropic(base_url=server.url, api_key=session.api_key, max_retries=0)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    options: dict[str, Any] = {"model": "policy", "max_tokens": 100, "tools": tools}
    messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
    first = client.messages.create(messages=messages, **options)
    messages.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "5"}
    messages.append({"role": "user", "content": [result]})
    with client.messages.stream(messages=messages, **options) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"
    assert [trajectory.turns for trajectory in session.close()] == [2]
