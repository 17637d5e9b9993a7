"""Messages between ranks: order, a peer that ends or is late, and strangers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from mcontroller.channel.address import Address, KeyPair
from mcontroller.channel.controller import ask
from workers.weights.transfer.mailbox import Mailbox
from workers.weights.transfer.transport import Deadline, PeerLost

RANK, PEER = 3, 0
SECONDS = 20.0


@pytest.fixture
def mailboxes() -> Iterator[tuple[Mailbox, Mailbox]]:
    both = Mailbox(RANK, "127.0.0.1"), Mailbox(PEER, "127.0.0.1")
    both[0].peers, both[1].peers = {PEER: both[1].address}, {RANK: both[0].address}
    yield both
    for each in both:
        each.close()


def over_tcp(address: Address) -> Address:
    return replace(address, folder="")


@pytest.mark.parametrize("seen_as", [lambda address: address, over_tcp], ids=["folder", "tcp"])
def test_messages_arrive_in_order_before_or_after_they_are_awaited(mailboxes: Any, seen_as: Any) -> None:
    here, there = mailboxes
    here.peers, there.peers = {PEER: seen_as(there.address)}, {RANK: seen_as(here.address)}
    for message in ("first", None, {"second": 2}):
        here.send(PEER, message)
    assert [there.receive(RANK, Deadline(SECONDS)) for _ in range(3)] == ["first", None, {"second": 2}]
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(here.receive, PEER, Deadline(SECONDS))
        time.sleep(0.05)
        there.send(RANK, "later")
        assert awaited.result() == "later"


def test_a_peer_that_closes_is_noticed_at_once(mailboxes: Any) -> None:
    here, there = mailboxes
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(here.receive, PEER, Deadline(SECONDS))
        time.sleep(0.1)
        began = time.monotonic()
        there.close()
        with pytest.raises(PeerLost, match=f"rank {PEER} of the transfer: connection lost") as lost:
            awaited.result()
    assert lost.value.peer == PEER and time.monotonic() - began < SECONDS / 4


def test_a_silent_peer_is_lost_at_the_deadline(mailboxes: Any) -> None:
    here, _ = mailboxes
    with pytest.raises(PeerLost, match=f"rank {PEER} of the transfer: no answer within 0.2 s"):
        here.receive(PEER, Deadline(0.2))


def test_a_stranger_with_another_key_reads_nothing(mailboxes: Any) -> None:
    here, there = mailboxes
    here.send(PEER, "weights")
    stranger = replace(over_tcp(here.address), client=KeyPair.generate())
    assert ask([stranger], "take", PEER, 0, timeout=SECONDS) == [None]
    assert there.receive(RANK, Deadline(SECONDS)) == "weights"
