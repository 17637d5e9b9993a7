"""Messages of someone who has the key, but does not send what the channel expects."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.links import Links
from mcontroller.channel.local_connection import LocalConnection, LocalMemory
from mcontroller.channel.messages import unpack_answer, unpack_call, unpack_query, unpack_reply
from mcontroller.channel.queries import ask
from mcontroller.errors import DataError
from mcontroller.ray.call_messages import read_answer, read_call, write_answer, write_call
from mcontroller.ray.values.wire import decode, encode
from tests.fuzzing import VALUES, fuzz, only_errors_of_this_project
from tests.mcontroller.channel.endpoints import SECONDS, Controller, start_endpoint

NUMBERS = st.integers(-1, 3) | st.none() | st.floats()
SHAPES = st.recursive(
    VALUES | st.just(()) | st.just("double"),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.tuples(inner, inner, inner),
    max_leaves=6,
)
QUERIES = st.tuples(NUMBERS, st.sampled_from(["double", "place", "commit", "prepare", "none", 3, None]), SHAPES)
CONTENTS = st.tuples(st.sampled_from([-1, 0, 1, 2, 4, True]), SHAPES, SHAPES) | st.tuples(st.integers(-1, 2))
"""Values in a message; those in the object store (3) are addresses, which Ray reads."""
BYTES = st.binary(max_size=80).map(lambda sent: sent.translate(None, b"rpRi"))
"""Without the codes of pickles that ask for much memory, or import something."""


@pytest.fixture(scope="module")
def address() -> Address:
    return start_endpoint(ChannelKeys.generate())


@pytest.fixture(scope="module")
def controller(address: Address) -> Controller:
    return Controller([address])


@pytest.fixture(scope="module")
def links(address: Address) -> Iterator[tuple[Links, Address]]:
    links = Links(b"sends anything")
    links.connect(b"calls", address.calls, address)
    links.connect(b"queries", address.queries, address)
    yield links, address
    links.close()


numbers_of_calls = iter(range(1_000_000_000))


@fuzz
@given(st.lists(BYTES, min_size=1, max_size=3), BYTES | (SHAPES | QUERIES).map(pickle.dumps))
def test_an_endpoint_answers_others_as_before(
    links: tuple[Links, Address], controller: Controller, frames: list[bytes], query: bytes
) -> None:
    connection, address = links
    connection.send(b"calls", frames)
    connection.send(b"queries", [query])
    assert controller.call(next(numbers_of_calls), b"work") == {0: [b"work"]}
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]


def test_an_unknown_query_and_wrong_arguments_raise_at_the_caller(address: Address) -> None:
    with pytest.raises(DataError, match=r"query 'treble' .* KeyError"):
        ask([address], "treble", 3, timeout=SECONDS)
    with pytest.raises(DataError, match=r"query 'double' with .* TypeError"):
        ask([address], "double", timeout=SECONDS)
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]


@pytest.mark.parametrize("unpack", [unpack_call, unpack_answer])
def test_a_frame_shorter_than_its_head_is_a_data_error(unpack: Callable[[bytes], Any]) -> None:
    with pytest.raises(DataError, match="first frame of a message has 3 bytes: the head of a"):
        unpack(b"abc")


@fuzz
@given(BYTES | SHAPES.map(pickle.dumps) | QUERIES.map(pickle.dumps))
def test_bodies(message: bytes) -> None:
    for read in (read_call, read_answer, unpack_query, unpack_reply):
        only_errors_of_this_project(lambda read=read: read(message))


@fuzz
@given(
    st.binary(min_size=1, max_size=80)
    | st.tuples(st.sampled_from([b"\0", b"\1", b"\2"]), st.binary(max_size=80)).map(b"".join)
    | st.tuples(st.integers(0, 1 << 27), st.integers(0, 3), st.lists(st.integers(0, 100), max_size=3)).map(
        lambda place: b"\2" + struct.pack(f"<QH{len(place[2])}Q", place[0], place[1], *place[2])
    )
)
def test_packets(packet: bytes) -> None:
    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = LocalMemory()
    with there:
        there.send(packet)
        connection = LocalConnection(here, memory.descriptor)
        only_errors_of_this_project(lambda: connection.receive())
        connection.close()
    memory.close()


@fuzz
@given(CONTENTS)
def test_values(content: Any) -> None:
    only_errors_of_this_project(lambda: decode([(content, ())]))


@fuzz
@given(st.data())
def test_truncated_messages(data: st.DataObject) -> None:
    value = encode({"a": [1, 2.0, "x"]}, 1 << 20).content
    for body, read in (
        (write_call(("actor", "update", (0, 1), False), value), read_call),
        (write_answer(None, value), read_answer),
    ):
        assert read(body)
        length = data.draw(st.integers(0, len(body) - 1))
        with pytest.raises(DataError):
            read(body[:length])
