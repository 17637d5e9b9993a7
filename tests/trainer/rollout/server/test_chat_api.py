"""Malformed and hostile requests: one error of OpenAI's API for each, and nothing of another session."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from tests.trainer.rollout.server.test_chat_server import ASK, END, TOOLS, Agent, Characters
from trainer import TrajectoryRollout
from trainer.rollout.server.chat_server import ChatServer
from trainer.rollout.server.sessions import ChatSession

MAX_BODY = 50_000
USER = {"role": "user", "content": "2 + 3?"}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, message]}


def calling(**call: Any) -> dict[str, Any]:
    whole = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    return said(role="assistant", tool_calls=[{**whole, **call}])


def with_tool(**function: Any) -> dict[str, Any]:
    return {"messages": ASK, "tools": [{"type": "function", "function": {"name": "add", **function}}]}


FIELDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages are text": ({"messages": "hello"}, "messages"),
    "a message is text": ({"messages": ["hello"]}, "messages[0]"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role"),
    "role is a number": (said(role=1, content="a"), "messages[1].role"),
    "unknown role": (said(role="wizard", content="a"), "messages[1].role"),
    "no content": (said(role="user"), "messages[1].content"),
    "null content": (said(role="user", content=None), "messages[1].content"),
    "a part is text": (said(role="user", content=["a"]), "messages[1].content"),
    "a part has no text": (said(role="user", content=[{"type": "text"}]), "messages[1].content"),
    "a part is an image": (said(role="user", content=[{"type": "image_url", "image_url": {}}]), "messages[1].content"),
    "unknown field of a message": (said(role="user", content="a", contents="b"), "messages[1].contents"),
    "name is a number": (said(role="user", content="a", name=5), "messages[1].name"),
    "refusal": (said(role="assistant", refusal="No."), "messages[1].refusal"),
    "reasoning is a list": (said(role="assistant", reasoning_content=["a"]), "messages[1].reasoning_content"),
    "no tool_call_id": (said(role="tool", content="5"), "messages[1].tool_call_id"),
    "tool_calls are text": (said(role="assistant", tool_calls="add"), "messages[1].tool_calls"),
    "tool_calls of a user": (said(role="user", content="a", tool_calls=[]), "messages[1].tool_calls"),
    "a call is text": (said(role="assistant", tool_calls=["add"]), "messages[1].tool_calls[0]"),
    "a call without id": (calling(id=None), "messages[1].tool_calls[0].id"),
    "a call of another type": (calling(type="custom"), "messages[1].tool_calls[0].type"),
    "a call without name": (calling(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
    "arguments are an object": (
        calling(function={"name": "add", "arguments": {}}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "tools are text": ({"messages": ASK, "tools": "add"}, "tools"),
    "a tool is text": ({"messages": ASK, "tools": ["add"]}, "tools[0]"),
    "a tool of another type": ({"messages": ASK, "tools": [{**TOOLS[0], "type": "custom"}]}, "tools[0].type"),
    "a tool's name is a number": (with_tool(name=5), "tools[0].function.name"),
    "a tool's parameters are text": (with_tool(parameters="{}"), "tools[0].function.parameters"),
    "unknown field of a tool": (with_tool(paramters={}), "tools[0].function.paramters"),
    "unknown field": ({"messages": ASK, "temprature": 0.5}, "temprature"),
    "model is a number": ({"messages": ASK, "model": 5}, "model"),
    "model is long": ({"messages": ASK, "model": "m" * 999}, "model"),
    "n is 0": ({"messages": ASK, "n": 0}, "n"),
    "stop is a number": ({"messages": ASK, "stop": 5}, "stop"),
    "a stop is empty": ({"messages": ASK, "stop": ["\n", ""]}, "stop[1]"),
    "many stops": ({"messages": ASK, "stop": ["a"] * 99}, "stop"),
    "seed": ({"messages": ASK, "seed": 2**63}, "seed"),
    "top_logprobs": ({"messages": ASK, "logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    "penalty": ({"messages": ASK, "presence_penalty": 0.5}, "presence_penalty"),
    "response_format": ({"messages": ASK, "response_format": {"type": "json_object"}}, "response_format"),
    "tool_choice": ({"messages": ASK, "tool_choice": "required"}, "tool_choice"),
    "stream is text": ({"messages": ASK, "stream": "true"}, "stream"),
    "stream_options alone": ({"messages": ASK, "stream_options": {"include_usage": True}}, "stream_options"),
    "both limits": ({"messages": ASK, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    "max_tokens is 0": ({"messages": ASK, "max_tokens": 0}, "max_tokens"),
    "temperature is text": ({"messages": ASK, "temperature": "0.5"}, "temperature"),
    "temperature is huge": ({"messages": ASK, "temperature": 10**4000}, "temperature"),
    "top_p is 2": ({"messages": ASK, "top_p": 2}, "top_p"),
    "half of a surrogate pair": (said(role="user", content="\ud800"), None),
    "the prompt is too long": ({"messages": ASK * 20}, None),
}
"""Name: the fields of a request, and which of them the error names."""

BODIES: dict[str, bytes] = {
    "empty": b"",
    "half of an object": b'{"messages": [',
    "a list": json.dumps([ASK]).encode(),
    "bytes": bytes(range(256)),
    "NaN": b'{"messages": [], "temperature": NaN}',
    "a number of 5,000 digits": b'{"n": ' + b"9" * 5000 + b"}",
    "very deep": b"[" * 20_000 + b"]" * 20_000,
}

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\n"
BODY = json.dumps({"messages": ASK})
WIRE: dict[str, tuple[str, int]] = {
    "no key": (HEAD.replace("Bearer KEY", "") + "Content-Length: 0\r\n\r\n", 401),
    "another key in the path": (HEAD.replace("/v1", "/session-7/v1") + "Content-Length: 0\r\n\r\n", 401),
    "a key with other letters": (HEAD.replace("KEY", "schl\u00fcssel") + "Content-Length: 0\r\n\r\n", 401),
    "no key, and a body without an end": (HEAD.replace("KEY", "") + "Content-Length: 9000000\r\n\r\n{", 401),
    "GET": (HEAD.replace("POST", "GET") + "\r\n", 405),
    "another path": (HEAD.replace("/v1/chat/completions", "/v1/models") + "Content-Length: 0\r\n\r\n", 404),
    "declared as text": (HEAD + f"Content-Type: text/plain\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}", 415),
    "a long body": (HEAD + "Content-Length: 1500000000\r\n\r\n{", 413),
    "a long body in chunks": (HEAD + f"Transfer-Encoding: chunked\r\n\r\nea60\r\n{'{' * 60_000}\r\n0\r\n\r\n", 413),
    "a short length": (HEAD + f"Content-Length: 5\r\n\r\n{BODY}", 400),
    "length is negative": (HEAD + f"Content-Length: -1\r\n\r\n{BODY}", 400),
    "two lengths": (HEAD + f"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{BODY}", 400),
    "a malformed chunk": (HEAD + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{\r\n", 400),
    "no HTTP": ("hello\r\n\r\n", 400),
    "a long header": (HEAD + f"X: {'a' * 100_000}\r\n\r\n", 400),
}
"""Name: what is sent, and the status of the answer."""


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    group = LocalWorkerGroup(ClassWithInitArgs(Agent), name_prefix="agent")
    started = ChatServer(TrajectoryRollout(group, eos_token_id=END, pad_token_id=0), Characters(), max_body=MAX_BODY)
    yield started
    started.close()


@pytest.fixture
def session(server: ChatServer) -> Iterator[ChatSession]:
    opened = server.open("session-7")
    yield opened
    opened.cancel()


def send(server: ChatServer, text: bytes) -> tuple[int, dict[str, Any]]:
    """Send bytes, and return the status and the body of the answer."""
    host, port = server.base_url.removesuffix("/v1").removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(text)
        answer = client.makefile("rb")
        status = int(answer.readline().split()[1])
        headers = dict(line.decode().lower().split(": ", 1) for line in iter(answer.readline, b"\r\n"))
        body = answer.read(int(headers.get("content-length", -1)))
        return status, json.loads(body) if "json" in headers["content-type"] else {}


def send_body(server: ChatServer, session: ChatSession, body: bytes) -> tuple[int, dict[str, Any]]:
    head = HEAD.replace("KEY", session.api_key) + f"Content-Length: {len(body)}\r\n\r\n"
    return send(server, head.encode() + body)


def assert_is_error_of_openai(answer: Mapping[str, Any]) -> None:
    assert answer.keys() == {"error"} and answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert 0 < len(answer["error"]["message"]) < 600


def assert_session_works(server: ChatServer, session: ChatSession) -> None:
    """A session that got a malformed request has lost nothing."""
    status, answer = send_body(server, session, json.dumps({"messages": ASK}).encode())
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
    (made,) = session.close()
    assert made.prompt.tolist() == Characters().encode(Characters().render(ASK))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_wrong_is_named(server: ChatServer, session: ChatSession, name: str) -> None:
    request, field = FIELDS[name]
    status, answer = send_body(server, session, json.dumps(request).encode())
    assert_is_error_of_openai(answer)
    assert (status, answer["error"]["param"]) == (400, field)
    assert_session_works(server, session)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request_is_rejected(server: ChatServer, session: ChatSession, name: str) -> None:
    status, answer = send_body(server, session, BODIES[name])
    assert_is_error_of_openai(answer)
    assert status == 400
    assert_session_works(server, session)


@pytest.mark.parametrize("name", WIRE)
def test_what_is_no_request_of_the_session_is_rejected(server: ChatServer, session: ChatSession, name: str) -> None:
    text, expected = WIRE[name]
    status, answer = send(server, text.replace("KEY", session.api_key).encode("latin-1"))
    assert status == expected
    if answer:  # which what is no HTTP does not get
        assert_is_error_of_openai(answer)
    assert_session_works(server, session)
