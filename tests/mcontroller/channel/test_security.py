"""Who gets an answer, and what strangers can do."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from mcontroller.channel.address import Address, ChannelKeys, KeyPair
from mcontroller.channel.controller import ask
from mcontroller.channel.server import reserve_port
from mcontroller.channel.worker import Endpoint
from mcontroller.errors import DataError
from tests.free_ports import free_ports
from tests.mcontroller.channel.endpoints import (
    SECONDS,
    Controller,
    elsewhere,
    open_connection,
    start_endpoint,
)


@pytest.fixture
def keys() -> ChannelKeys:
    return ChannelKeys.generate()


@pytest.fixture(scope="module")
def shared_address() -> Address:
    """The address of one endpoint of all tests: an endpoint keeps its descriptors as long as its process lives."""
    return start_endpoint(ChannelKeys.generate())


@pytest.fixture
def address(shared_address: Address) -> Address:
    return elsewhere(shared_address)


def test_a_client_with_another_key_gets_no_answer(address: Address) -> None:
    stranger = replace(address, client=KeyPair.generate())
    assert ask([stranger], "double", 3, timeout=SECONDS) == [None]
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]
    assert ask([stranger], "double", 3, timeout=SECONDS) == [None]


def test_a_client_that_expects_another_server_sends_nothing(address: Address) -> None:
    assert ask([replace(address, server_key=KeyPair.generate().public)], "double", 3, timeout=SECONDS) == [None]


def test_an_unknown_query_and_wrong_arguments_raise_at_the_caller(address: Address) -> None:
    with pytest.raises(DataError):
        ask([address], "treble", 3, timeout=SECONDS)
    with pytest.raises(DataError):
        ask([address], "double", timeout=SECONDS)
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]


def test_a_call_with_another_key_does_not_run(keys: ChannelKeys) -> None:
    runs: list[list[bytes]] = []
    address = elsewhere(start_endpoint(keys, lambda frames: (runs.append(frames), frames)[1]))
    stranger = Controller([replace(address, client=KeyPair.generate())], b"controller")
    stranger.send(0, b"harm")
    assert stranger.hub.wait(lambda: (0, False) in stranger.changes, SECONDS)
    assert Controller([address], b"controller").call(0, b"work") == {0: [b"work"]}
    assert runs == [[b"work"]]


def test_secrets_are_not_shown(address: Address, keys: ChannelKeys) -> None:
    assert address.client.secret.decode() not in repr((address, keys))
    assert keys.server.secret.decode() not in repr((address, keys))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"])
def test_garbage_delays_nobody_and_leaves_no_trace(
    address: Address, shared_address: Address, sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    controller = Controller([address])
    with ExitStack() as open_ones:
        for url in (address.calls, address.queries) * 20:
            stranger = open_ones.enter_context(open_connection(url))
            with suppress(ConnectionError):
                stranger.sendall(sent)
        for endpoint in (address, shared_address):
            assert Controller([endpoint]).call(0, b"x") == {0: [b"x"]}
        assert controller.call(0, b"x") == {0: [b"x"]}
        assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]
    assert capfd.readouterr().err == ""


def test_a_silent_connection_is_closed(address: Address) -> None:
    with open_connection(address.calls) as silent:
        while silent.recv(100):  # what ZeroMQ says first; then the end of the connection
            pass


def test_ports_are_taken_from_the_range_and_a_full_range_is_an_error(keys: ChannelKeys) -> None:
    first, last = ports = free_ports(8)
    used = {port for _ in range(2) for a in [start_endpoint(keys, ports=ports)] for port in (a.call_port, a.query_port)}
    assert len(used) == 4
    assert all(first <= port <= last for port in used)
    with pytest.raises(OSError):
        for _ in range(4):
            start_endpoint(keys, ports=ports)


def test_a_reserved_port_of_the_range_is_left_to_the_store_of_torch(keys: ChannelKeys) -> None:
    ports = free_ports(6)
    reserved = [reserve_port("", ports) for _ in range(2)]
    held = {listener.getsockname()[1] for listener in reserved}
    addresses = [start_endpoint(keys, ports=ports) for _ in range(2)]
    listening = {port for a in addresses for port in (a.call_port, a.query_port)}
    assert len(held) == 2 and len(listening) == 4 and not held & listening
    with pytest.raises(OSError):
        reserve_port("", ports)
    store = TCPStore("127.0.0.1", reserved[0].getsockname()[1], is_master=True, wait_for_workers=False)
    assert store.port in held
    for listener in reserved:
        listener.close()


def test_an_endpoint_listens_only_on_the_address_that_peers_use(address: Address) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address.call_port), timeout=SECONDS)


def test_a_machine_without_its_own_address_listens_on_all_that_it_has(keys: ChannelKeys) -> None:
    elsewhere = Endpoint("198.51.100.7", keys, {"double": lambda reply, number: reply(2 * number)}).address
    assert elsewhere.host == "198.51.100.7"
    assert ask([replace(elsewhere, host="127.0.0.1")], "double", 3, timeout=SECONDS) == [(6, [])]


def test_a_process_that_does_not_answer_delays_no_longer_than_the_timeout(address: Address) -> None:
    assert ask([address, address], "silent", timeout=0.1) == [None, None]


def test_queries_of_several_threads_get_their_own_answers(address: Address) -> None:
    answers: dict[int, object] = {}

    def query(number: int) -> None:
        answers[number] = ask([address], "double", number, timeout=SECONDS)

    threads = [threading.Thread(target=query, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [(2 * number, [])] for number in range(8)}
