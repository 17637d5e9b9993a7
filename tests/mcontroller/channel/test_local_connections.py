"""Connections between processes of one machine: what travels over them, who gets one, and what is lost with one."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from mcontroller.channel import local_connection, local_listener
from mcontroller.channel.address import Address, ChannelKeys, KeyPair
from mcontroller.channel.local_connection import LocalMemory, OutgoingMessage
from mcontroller.channel.local_listener import ACCEPTED_AT_ONCE, LocalListener, OpeningConnection
from mcontroller.channel.messages import pack_call
from tests.mcontroller.channel.endpoints import (
    SECONDS,
    Controller,
    connect_locally,
    cut_local_connections,
    open_local_connection,
    start_endpoint,
)
from tests.mcontroller.channel.network import Network


@pytest.fixture
def keys() -> ChannelKeys:
    return ChannelKeys.generate()


def only_local(addresses: list[Address]) -> Controller:
    """A controller whose connections over ZeroMQ have ended after its local connections were opened."""
    networks = [Network(address.host, address.call_port) for address in addresses]
    through = [replace(address, call_port=network.port) for address, network in zip(addresses, networks, strict=True)]
    controller = Controller(through).open_local_connections()
    for network in networks:
        network.end()
    for rank in controller.ranks:
        assert controller.hub.wait(lambda rank=rank: (rank, False) in controller.changes, SECONDS)
    return controller


@pytest.mark.parametrize("size", [0, 100, 5_000, 60_000, 2_000_000])
def test_calls_and_small_answers_need_no_other_connection(keys: ChannelKeys, size: int) -> None:
    received: list[list[bytes]] = []
    endpoints = [start_endpoint(keys, lambda frames: (received.append(frames), frames[:1])[1]) for _ in range(2)]
    controller = only_local(endpoints)
    frames = [secrets.token_bytes(size), b"", secrets.token_bytes(7)]
    assert controller.call(0, b"head", *frames) == {0: [b"head"], 1: [b"head"]}
    assert received == [[b"head", *frames]] * 2


def test_large_answers_arrive_over_zeromq(keys: ChannelKeys) -> None:
    controller = Controller([start_endpoint(keys)]).open_local_connections()
    frames = [secrets.token_bytes(10), secrets.token_bytes(1_000_000)]
    assert controller.call(0, b"head", *frames) == {0: [b"head", *frames]}


def test_shared_memory_is_used_again_after_a_call_and_frames_are_private(
    keys: ChannelKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_connection, "MEMORY_BYTES", 1 << 20)
    received: list[list[bytes]] = []
    controller = only_local([start_endpoint(keys, lambda frames: (received.append(frames), [b"done"])[1])])
    contents = [secrets.token_bytes(300_000) for _ in range(20)]
    for number, content in enumerate(contents):
        assert controller.call(number, b"head", content) == {0: [b"done"]}
    assert received == [[b"head", content] for content in contents]


def test_regions_do_not_overlap_and_the_first_free_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_connection, "MEMORY_BYTES", 1000 * 64)
    memory = LocalMemory()
    regions = [memory.write([b"x" * 6_000, b"y" * 400]) for _ in range(10)]
    offsets = [region.offset for region in regions if region is not None]
    assert offsets == [index * 6_400 for index in range(10)]
    assert memory.write([b"x"]) is None
    del regions[3:5]
    fits, too_large = memory.write([b"z" * 12_800]), memory.write([b"z"])
    assert fits is not None and fits.offset == 3 * 6_400 and too_large is None
    memory.close()


@pytest.mark.parametrize("size", [10, 200_000])
def test_what_a_busy_process_cannot_take_goes_over_zeromq_and_runs_in_order(
    keys: ChannelKeys, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(local_connection, "MEMORY_BYTES", 1 << 20)
    release, received = threading.Event(), list[bytes]()
    address = start_endpoint(keys, lambda frames: (release.wait(SECONDS), received.append(frames[0]), frames[:1])[2])
    controller = Controller([address]).open_local_connections()
    count = 2_000 if size == 10 else 20  # more than the socket, or the memory, holds
    for number in range(count):
        controller.send(number, b"%d" % number, b"x" * size)
    release.set()
    assert controller.hub.wait(lambda: len(controller.answers) == count, SECONDS)
    assert received == [b"%d" % number for number in range(count)]


def test_a_lost_local_connection_is_reported_and_calls_sent_again_run_once(keys: ChannelKeys) -> None:
    release, runs = threading.Event(), list[bytes]()
    address = start_endpoint(keys, lambda frames: (runs.append(frames[0]), release.wait(SECONDS), frames)[2])
    controller = Controller([address]).open_local_connections()
    controller.send(0, b"first")
    controller.send(1, b"second")
    cut_local_connections(address)
    assert controller.hub.wait(lambda: controller.dropped == [0], SECONDS)
    assert controller.hub.local_ranks == 0 and (0, False) not in controller.changes
    release.set()
    controller.send(0, b"first")
    controller.send(1, b"second")
    controller.result(1)
    assert controller.call(2, b"third") == {0: [b"third"]}
    assert runs == [b"first", b"second", b"third"]


def test_nobody_without_the_key_opens_a_connection(keys: ChannelKeys) -> None:
    runs: list[list[bytes]] = []
    address = start_endpoint(keys, lambda frames: (runs.append(frames), frames)[1])
    stranger = Controller([replace(address, client=KeyPair.generate())], b"controller")
    assert not stranger.hub.wait(lambda: stranger.hub.local_ranks == 1, 0.5)
    stranger.send(0, b"harm")
    with open_local_connection(address) as guessing:
        number = guessing.recv(100)
        guessing.send(number + b"\0" * 32 + b"controller")
        with suppress(ConnectionError):
            guessing.send(OutgoingMessage([pack_call((0, 0, None), b"harm")]).packet(None) or b"")
            assert guessing.recv(100) == b""
    assert Controller([address], b"controller").open_local_connections().call(0, b"work") == {0: [b"work"]}
    assert runs == [[b"work"]]


def test_a_code_is_of_no_use_in_another_connection(keys: ChannelKeys) -> None:
    address, other = start_endpoint(keys), start_endpoint(keys)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ExitStack() as relays:
        name = f"mcontroller-test-{secrets.token_hex(8)}"
        listener.bind(f"\0{name}")
        listener.listen()
        relay_to = relays.enter_context(open_local_connection(other))
        controller = Controller([replace(address, local=name)])
        controller.call(0, b"x")
        assert not controller.hub.wait(lambda: controller.hub.local_ranks == 1, 0.2)  # it connects
        relay_from = relays.enter_context(listener.accept()[0])
        relay_from.send(relay_to.recv(1000))
        assert not controller.hub.wait(lambda: controller.hub.local_ranks == 1, 0.2)  # it has sent its proof
        relay_to.send(relay_from.recv(1000))
        assert relay_to.recv(1000) == b""  # the proof names the socket that the controller has connected to
        relay_from.send(b"\0" * 32)
        assert controller.call(1, b"y") == {0: [b"y"]}
        assert controller.hub.local_ranks == 0


def test_strangers_cannot_keep_controllers_out(keys: ChannelKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_listener, "UNPROVEN", 5)
    address = start_endpoint(keys)
    with ExitStack() as open_ones:
        strangers = [open_ones.enter_context(open_local_connection(address)) for _ in range(12)]
        assert Controller([address]).open_local_connections().call(0, b"x") == {0: [b"x"]}
        for late in strangers[:7]:
            with suppress(ConnectionError):
                while late.recv(100):
                    pass


@pytest.mark.parametrize(
    "packet",
    [
        b"\1",
        b"\1\xff\xff",
        b"\1\0\0",
        b"\1\1\0" + (1 << 40).to_bytes(8, "little"),
        b"\2" + bytes(9),
        b"\2" + (1 << 62).to_bytes(8, "little") + b"\1\0" + (1).to_bytes(8, "little"),
        b"\7" + bytes(50),
    ],
)
def test_a_packet_that_is_no_message_ends_its_connection_only(keys: ChannelKeys, packet: bytes) -> None:
    address, memory = start_endpoint(keys), LocalMemory()
    controller = Controller([address]).open_local_connections()
    opening = OpeningConnection(address.local, address.client.secret, b"sends anything", memory.descriptor)
    connection = None
    while connection is None:
        connection = opening.advance()
    connection.write(packet)
    with pytest.raises(ConnectionError):
        while connection.receive() is None:
            pass
    assert controller.call(0, b"x") == {0: [b"x"]}
    connection.close()
    memory.close()


def test_a_descriptor_that_is_no_memory_is_not_accepted(keys: ChannelKeys) -> None:
    address = start_endpoint(keys)
    reading, writing = os.pipe()
    opening = OpeningConnection(address.local, address.client.secret, b"has a pipe", reading)
    with pytest.raises(OSError, match="closed"):
        while opening.advance() is None:
            pass
    opening.close()
    os.close(reading)
    os.close(writing)
    assert Controller([address]).open_local_connections().call(0, b"x") == {0: [b"x"]}


def test_a_flood_of_connections_is_accepted_a_few_at_a_time(keys: ChannelKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = LocalListener(keys.client.secret, 4096, lambda *_: None)
    greeted, readable = [], select.poll()  # select takes no descriptor above 1023, which a long test run may have
    with ExitStack() as open_ones:
        for _ in range(3 * ACCEPTED_AT_ONCE):
            readable.register(open_ones.enter_context(connect_locally(listener.name)), select.POLLIN)
        for pause in (0, 1000, 1000):
            monkeypatch.setattr(local_listener, "PAUSE_SECONDS", pause)
            listener.serve()
            greeted.append(len(readable.poll(0)))
    assert greeted == [ACCEPTED_AT_ONCE, 2 * ACCEPTED_AT_ONCE, 2 * ACCEPTED_AT_ONCE]
    assert listener.seconds is not None and 900 < listener.seconds < 1000
