"""The desk of a process: who is answered, and whom that keeps waiting."""

import socket
from contextlib import suppress
from dataclasses import replace

import pytest

from mcontroller.ray.desk import Desk, ask, open_desk, tell


@pytest.fixture
def heard() -> list[int]:
    return []


@pytest.fixture
def desk(heard: list[int]) -> Desk:
    return open_desk("127.0.0.1", {"double": lambda number: 2 * number, "hear": heard.append})


def test_each_desk_answers_for_itself_and_one_that_is_not_there_with_nothing(desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = replace(desk, port=closed.getsockname()[1])
    triple = open_desk("127.0.0.1", {"double": lambda number: [number, number]})
    assert ask([desk, None, nobody, triple], "double", 3, timeout=20) == [6, None, None, [3, 3]]


def test_a_machine_that_does_not_know_its_own_address_answers_at_all_it_has() -> None:
    desk = open_desk("198.51.100.7", {"double": lambda number: 2 * number})
    assert desk.host == "198.51.100.7"
    assert ask([replace(desk, host="127.0.0.1")], "double", 3, timeout=20) == [6]


def test_who_does_not_know_the_secret_is_not_heard(desk: Desk, heard: list[int]) -> None:
    stranger = replace(desk, secret="guessed")
    assert ask([stranger], "double", 3, timeout=20) == [None]
    assert ask([stranger, desk], "hear", 3, timeout=20) == [None, None]
    assert heard == [3]
    assert desk.secret not in repr(desk)


def test_one_who_says_nothing_or_nonsense_keeps_nobody_waiting(desk: Desk) -> None:
    with socket.create_connection((desk.host, desk.port)), socket.create_connection((desk.host, desk.port)) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ask([desk] * 100, "double", 3, timeout=20) == [6] * 100


@pytest.mark.parametrize(
    "said", [b"[" * 4000 + b"\n", b'["\\ud800", "double", 3]\n', b"\xff\n", b"x" * 3_000_000, b"7\n"]
)
def test_a_stranger_leaves_no_trace_in_the_log_of_the_process(
    desk: Desk, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection((desk.host, desk.port), timeout=20) as stranger, suppress(ConnectionError):
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    assert ask([desk], "double", 3, timeout=20) == [6]
    assert capfd.readouterr().err == ""


def test_a_process_that_does_not_answer_is_waited_for_no_longer_than_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask([Desk(*silent.getsockname(), "secret")], "double", 3, timeout=0.1) == [None]


def test_word_is_left_without_waiting_for_an_answer(desk: Desk, heard: list[int]) -> None:
    tell([desk, desk], "hear", 3, timeout=20)
    while len(heard) < 2:
        assert ask([desk], "double", 3, timeout=20) == [6]
    assert heard == [3, 3]
