"""Calls to several endpoints: order, several threads, lost connections."""

from __future__ import annotations

import select
import threading
import time

import zmq

from mcontroller.channel.address import ChannelKeys
from tests.mcontroller.channel.endpoints import SECONDS, Controller, start_endpoint


def test_each_rank_answers_its_calls_in_the_order_in_which_they_were_sent() -> None:
    keys = ChannelKeys.generate()
    received: list[list[bytes]] = [[], [], []]
    addresses = [
        start_endpoint(keys, lambda frames, calls=calls: (calls.extend(frames), frames)[1]) for calls in received
    ]
    controller = Controller(addresses)
    for number in range(50):
        controller.send(number, str(number).encode())
    assert controller.result(49, seconds=1e9) == {rank: [b"49"] for rank in range(3)}
    assert len(controller.answers) == 50
    assert received == [[str(number).encode() for number in range(50)]] * 3


def test_large_frames_arrive_unchanged_and_one_frame_goes_to_all_ranks() -> None:
    keys = ChannelKeys.generate()
    controller = Controller([start_endpoint(keys) for _ in range(2)])
    content = bytes(range(256)) * 4096
    assert controller.call(0, b"head", content) == {rank: [b"head", content] for rank in range(2)}


def test_threads_that_wait_for_different_calls_each_get_their_answer() -> None:
    keys, release = ChannelKeys.generate(), threading.Event()
    slow = start_endpoint(keys, lambda frames: (release.wait(SECONDS), frames)[1])
    controller = Controller([slow])
    answered: list[int] = []
    threads = [
        threading.Thread(target=lambda number=number: (controller.result(number), answered.append(number)))
        for number in range(20)
    ]
    for number in range(10):
        controller.send(number, b"x")
    for thread in threads:
        thread.start()
    for number in range(10, 20):
        controller.send(number, b"x")  # while another thread polls the socket
    release.set()
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(answered) == list(range(20))


def test_a_thread_does_not_take_the_news_of_the_one_that_polls() -> None:
    hub = Controller([start_endpoint(ChannelKeys.generate())]).hub
    ready = threading.Event()
    polling = threading.Thread(target=hub.wait, args=(ready.is_set, SECONDS))
    polling.start()
    while hub._poller is None:
        time.sleep(0.001)
    with hub._turn:  # the other thread may have seen its news or not: it can go on only after this
        ready.set()
        hub._wake_others()
        hub._receive()
        assert select.select([hub._wake], [], [], 0)[0] == [hub._wake]
    polling.join(SECONDS)
    assert not polling.is_alive()


def test_a_wait_without_seconds_delivers_what_has_arrived_and_returns() -> None:
    controller = Controller([start_endpoint(ChannelKeys.generate())])
    controller.send(0, b"x")
    while 0 not in controller.answers:
        assert not controller.hub.wait(lambda: False, 0)
    assert controller.answers == {0: {0: [b"x"]}}


def test_closing_a_hub_ends_the_waits_of_other_threads() -> None:
    controller = Controller([start_endpoint(ChannelKeys.generate())])
    waiting = threading.Thread(target=controller.hub.wait, args=(lambda: False, None))
    waiting.start()
    controller.hub.close()
    waiting.join(SECONDS)
    assert not waiting.is_alive()


def test_a_call_that_is_sent_twice_runs_once_and_its_answer_comes_again() -> None:
    runs: list[bytes] = []
    address = start_endpoint(ChannelKeys.generate(), lambda frames: (runs.append(frames[0]), frames)[1])
    controller = Controller([address])
    controller.call(0, b"first")
    controller.answers.clear()
    assert controller.call(0, b"first") == {0: [b"first"]}
    controller.send(1, b"second", settled=1)
    controller.result(1)
    controller.send(0, b"first")
    controller.call(2, b"third")
    assert runs == [b"first", b"second", b"third"]


def test_an_address_that_nobody_listens_at_is_reported_as_lost() -> None:
    keys = ChannelKeys.generate()
    address = start_endpoint(keys)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as free:
        port = free.bind_to_random_port("tcp://127.0.0.1")
    controller = Controller([type(address)("127.0.0.1", port, port, keys.server.public, keys.client)])
    assert controller.hub.wait(lambda: (0, False) in controller.changes, SECONDS)
