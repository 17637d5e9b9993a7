"""Links between ranks: order, a peer that ends or is late, and strangers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from mcontroller.channel.address import Address, KeyPair
from mcontroller.channel.queries import ask
from workers.weights.transfer.errors import PeerLost
from workers.weights.transfer.linked.links import Link, Mailbox
from workers.weights.transfer.transport import Deadline

RANK, PEER = 3, 0
SECONDS = 20.0


@pytest.fixture
def mailboxes() -> Iterator[tuple[Mailbox, Mailbox]]:
    both = Mailbox("127.0.0.1"), Mailbox("127.0.0.1")
    yield both
    for each in both:
        each.close()


def over_tcp(address: Address) -> Address:
    return replace(address, folder="")


@pytest.mark.parametrize("seen_as", [lambda address: address, over_tcp], ids=["folder", "tcp"])
def test_messages_arrive_in_order_before_or_after_they_are_awaited(mailboxes: Any, seen_as: Any) -> None:
    here, there = mailboxes
    one, other = Link(here, RANK, PEER, seen_as(there.address)), Link(there, PEER, RANK, seen_as(here.address))
    for message in ("first", None, {"second": 2}):
        one.send(message)
    assert [other.receive(Deadline(SECONDS)) for _ in range(3)] == ["first", None, {"second": 2}]
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(one.receive, Deadline(SECONDS))
        time.sleep(0.05)
        other.send("later")
        assert awaited.result() == "later"


def test_a_peer_that_closes_is_noticed_at_once(mailboxes: Any) -> None:
    here, there = mailboxes
    link = Link(here, RANK, PEER, there.address)
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(link.receive, Deadline(SECONDS))
        time.sleep(0.1)
        began = time.monotonic()
        there.close()
        with pytest.raises(PeerLost, match=f"rank {PEER} of the transfer: connection lost") as lost:
            awaited.result()
    assert lost.value.peer == PEER and time.monotonic() - began < SECONDS / 4


def test_a_silent_peer_is_lost_at_the_deadline(mailboxes: Any) -> None:
    here, there = mailboxes
    with pytest.raises(PeerLost, match=f"rank {PEER} of the transfer: no answer within 0.2 s"):
        Link(here, RANK, PEER, there.address).receive(Deadline(0.2))


def test_a_stranger_with_another_key_reads_nothing(mailboxes: Any) -> None:
    here, there = mailboxes
    Link(here, RANK, PEER, there.address).send("weights")
    stranger = replace(over_tcp(here.address), client=KeyPair.generate())
    assert ask([stranger], "take", PEER, 0, timeout=SECONDS) == [None]
    assert Link(there, PEER, RANK, here.address).receive(Deadline(SECONDS)) == "weights"
