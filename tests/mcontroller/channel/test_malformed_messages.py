"""Messages of someone who has the key, but does not send what the channel expects."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcontroller.channel.address import Address, ChannelKeys
from mcontroller.channel.controller import Links, ask
from mcontroller.channel.wire import (
    CallHeader,
    pack_answer,
    pack_call,
    send_frames,
    unpack_answer,
    unpack_call,
    unpack_query,
    unpack_reply,
)
from mcontroller.errors import DataError
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
    send_frames(connection.socket, [b"calls", *frames])
    send_frames(connection.socket, [b"queries", query])
    assert controller.call(next(numbers_of_calls), b"work") == {0: [b"work"]}
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]


def test_an_unknown_query_and_wrong_arguments_raise_at_the_caller(address: Address) -> None:
    with pytest.raises(DataError):
        ask([address], "treble", 3, timeout=SECONDS)
    with pytest.raises(DataError):
        ask([address], "double", timeout=SECONDS)
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]


@pytest.mark.parametrize("unpack", [unpack_call, unpack_answer])
def test_a_frame_shorter_than_its_head_is_a_data_error(unpack: Callable[[bytes], Any]) -> None:
    with pytest.raises(DataError) as caught:
        unpack(b"abc")
    assert caught.value.fields["actual"] == 3


@fuzz
@given(BYTES | SHAPES.map(pickle.dumps) | QUERIES.map(pickle.dumps))
def test_messages(message: bytes) -> None:
    for read in (unpack_call, unpack_answer):
        headed = len(message).to_bytes(4, "little") + message + b"data"
        only_errors_of_this_project(lambda read=read: read(message))
        only_errors_of_this_project(lambda read=read, headed=headed: read(headed))
    for read in (unpack_query, unpack_reply):
        only_errors_of_this_project(lambda read=read: read(message))


@fuzz
@given(BYTES | SHAPES.map(pickle.dumps))
def test_values(data: bytes) -> None:
    only_errors_of_this_project(lambda: decode([(data, ())]))


@fuzz
@given(st.data())
def test_truncated_messages(data: st.DataObject) -> None:
    value = encode({"a": [1, 2.0, "x"]}, 1 << 20).data
    for frame, read in (
        (pack_call(CallHeader(3, 2, (b"caller", 1), "actor", "update", (0, 1)), value), unpack_call),
        (pack_answer(3, None, False, value), unpack_answer),
    ):
        assert decode([(read(frame)[-1], ())]) == [{"a": [1, 2.0, "x"]}]
        length = data.draw(st.integers(0, len(frame) - 1))
        with pytest.raises(DataError):
            decode([(read(frame[:length])[-1], ())])
