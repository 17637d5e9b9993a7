"""Links between ranks beside strangers: who does not have the key costs nothing, learns nothing, and is not read."""

from __future__ import annotations

import pickle
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.linked import object_store
from workers.weights.transfer.linked.links import Link, Listener, ListenerAddress, connected
from workers.weights.transfer.plan import PeerSlices
from workers.weights.transfer.transport import Deadline, RankTraffic

HOST = "127.0.0.1"
RANK, PEER = 3, 0
SECONDS = 20.0
Address = Any


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def stranger(address: Address) -> socket.socket:
    connection = socket.create_connection(address.endpoint)
    connection.settimeout(SECONDS)
    return connection


def proof_for_another_listener(address: Address) -> bytes:
    """Return what a rank sends to a stranger that it takes for the listener: a proof for the stranger's number."""
    fake = socket.create_server((HOST, 0))
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(connected, ListenerAddress(fake.getsockname(), address.key), RANK, PEER, Deadline(SECONDS))
        connection, _ = fake.accept()
        connection.settimeout(SECONDS)
        connection.sendall(secrets.token_bytes(32))
        received = connection.recv(72, socket.MSG_WAITALL)
        connection.close()
        with pytest.raises(PeerLost, match="it closed the transfer"):
            victim.result()
    fake.close()
    return received


STRANGERS: dict[str, Callable[[Address], bytes]] = {
    "silent": lambda address: b"",
    "part of a proof": lambda address: secrets.token_bytes(71),
    "wrong proof": lambda address: secrets.token_bytes(72),
    "replayed proof": proof_for_another_listener,
    "huge length": lambda address: b"\xff" * 8,
    "garbage": lambda address: secrets.token_bytes(1 << 16),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_link_opens_beside_a_stranger(kind: str, thread: ThreadPoolExecutor) -> None:
    listener = Listener(HOST)
    other = stranger(listener.address)
    other.sendall(STRANGERS[kind](listener.address))
    connecting = thread.submit(connected, listener.address, RANK, PEER, Deadline(SECONDS))
    links = listener.accept([RANK], Deadline(SECONDS))
    opened = connecting.result()
    opened.send(b"read", Deadline(SECONDS))
    assert {rank: link.receive(Deadline(SECONDS))[0] for rank, link in links.items()} == {RANK: b"read"}
    links[RANK].send(b"ready", Deadline(SECONDS))
    assert opened.receive(Deadline(SECONDS))[0] == b"ready"
    try:
        heard = other.recv(1000, socket.MSG_WAITALL)  # until the listener closes the connection
    except ConnectionResetError:
        heard = b""
    assert len(heard) <= 32  # the number, and no code
    for each in (opened, *links.values(), other):
        each.close()


def test_a_rank_is_not_linked_twice(thread: ThreadPoolExecutor) -> None:
    listener = Listener(HOST)
    first = thread.submit(connected, listener.address, RANK, PEER, Deadline(SECONDS))
    with pytest.raises(PeerLost, match=f"rank {RANK + 1} of the transfer: nothing arrived within 1 s"):
        listener.accept([RANK, RANK + 1], Deadline(1.0))
    assert first.result().peer == PEER


def test_the_key_is_never_sent(thread: ThreadPoolExecutor) -> None:
    address = ListenerAddress((HOST, 0), secrets.token_bytes(32))
    assert address.key not in proof_for_another_listener(address)


def test_a_listener_without_the_key_is_rejected(thread: ThreadPoolExecutor) -> None:
    fake = socket.create_server((HOST, 0))
    address = ListenerAddress(fake.getsockname(), secrets.token_bytes(32))
    connecting = thread.submit(connected, address, RANK, PEER, Deadline(SECONDS))
    connection, _ = fake.accept()
    connection.sendall(secrets.token_bytes(64))
    with pytest.raises(PeerLost, match="does not have the key of the transfer"):
        connecting.result()
    connection.close()
    fake.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    """The two ends of an open link: one to write bytes to, and the link that reads them."""
    one, other = socket.socketpair()
    yield one, Link(other, PEER)
    one.close()
    other.close()


def test_a_message_that_is_too_long_is_not_read(ends: tuple[socket.socket, Link]) -> None:
    ends[0].sendall((1 << 40).to_bytes(8))
    with pytest.raises(PeerLost, match=f"a message of {1 << 40} bytes; at most 1048576 are accepted"):
        ends[1].receive(Deadline(SECONDS))


class Creates:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


def test_no_pickle_is_loaded_from_a_link_over_tcp(ends: tuple[socket.socket, Link], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    traffic = RankTraffic("transfer", RANK, 4, HOST, (), torch.device("cpu"), SECONDS)
    receiver: Any = object_store.TRANSPORT.receiver(traffic)
    receiver.links[PEER] = ends[1]
    Link(ends[0], RANK).send(pickle.dumps(Creates(tmp_path / "created")), Deadline(SECONDS))
    with pytest.raises(ValueError, match="codec can't decode"):
        receiver.read(PeerSlices(PEER, 0, 0, ()), Deadline(SECONDS))
    assert not (tmp_path / "created").exists()
