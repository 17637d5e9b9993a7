"""The control server of a process (whom it answers, and for how long it waits), and the cancellation of calls."""

import socket
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from mcontroller.ray.control import Cancellation, ControlAddress, notify, query, start_control_server


@pytest.fixture
def heard() -> list[int]:
    return []


@pytest.fixture
def address(heard: list[int]) -> ControlAddress:
    return start_control_server("127.0.0.1", {"double": lambda number: 2 * number, "hear": heard.append})


def test_each_server_answers_for_itself_and_one_that_does_not_exist_is_none(address: ControlAddress) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        absent = replace(address, port=closed.getsockname()[1])
    pair = start_control_server("127.0.0.1", {"double": lambda number: [number, number]})
    assert query([address, None, absent, pair], "double", 3, timeout=20) == [6, None, None, [3, 3]]


def test_a_machine_that_does_not_have_its_own_address_answers_at_all_it_has() -> None:
    address = start_control_server("198.51.100.7", {"double": lambda number: 2 * number})
    assert address.host == "198.51.100.7"
    assert query([replace(address, host="127.0.0.1")], "double", 3, timeout=20) == [6]


def test_a_query_without_the_secret_is_not_answered(address: ControlAddress, heard: list[int]) -> None:
    guessed = replace(address, secret="guessed")
    assert query([guessed], "double", 3, timeout=20) == [None]
    assert query([guessed, address], "hear", 3, timeout=20) == [None, None]
    assert heard == [3]
    assert address.secret not in repr(address)


def test_a_client_that_sends_nothing_or_nonsense_delays_no_other(address: ControlAddress) -> None:
    silent = socket.create_connection((address.host, address.port))
    with silent, socket.create_connection((address.host, address.port)) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert query([address] * 100, "double", 3, timeout=20) == [6] * 100


@pytest.mark.parametrize(
    "sent", [b"[" * 4000 + b"\n", b'["\\ud800", "double", 3]\n', b"\xff\n", b"x" * 3_000_000, b"7\n"]
)
def test_a_foreign_client_leaves_no_trace_in_the_log_of_the_process(
    address: ControlAddress, sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection((address.host, address.port), timeout=20) as client, suppress(ConnectionError):
        client.sendall(sent)
        assert client.recv(1) == b""
    assert query([address], "double", 3, timeout=20) == [6]
    assert capfd.readouterr().err == ""


def test_a_process_that_does_not_answer_delays_no_longer_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert query([ControlAddress(*silent.getsockname(), "secret")], "double", 3, timeout=0.1) == [None]


def test_a_notification_does_not_wait_for_an_answer(address: ControlAddress, heard: list[int]) -> None:
    notify([address, address], "hear", 3, timeout=20)
    while len(heard) < 2:
        assert query([address], "double", 3, timeout=20) == [6]
    assert heard == [3, 3]


CALL = ("driver", 3)


def test_a_call_without_a_cancellation_starts() -> None:
    cancellation = Cancellation()
    assert cancellation.start(*CALL)
    assert not cancellation.prepare(*CALL)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_prepared_call_waits_for_the_decision(cancelled: bool) -> None:
    cancellation = Cancellation()
    started: list[bool] = []
    assert cancellation.prepare(*CALL)
    call = threading.Thread(target=lambda: started.append(cancellation.start(*CALL)))
    call.start()
    call.join(0.1)
    assert call.is_alive()
    cancellation.commit(*CALL, cancelled)
    call.join()
    assert started == [not cancelled]


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_prepare_that_arrives_after_its_decision_delays_nothing(cancelled: bool) -> None:
    cancellation = Cancellation()
    cancellation.commit(*CALL, cancelled)
    assert not cancellation.prepare(*CALL)
    assert cancellation.start(*CALL) is not cancelled


def test_a_decision_that_comes_after_the_start_changes_nothing() -> None:
    cancellation = Cancellation()
    assert cancellation.start(*CALL)
    cancellation.commit(*CALL, True)
    assert cancellation.start("driver", 4)
    assert cancellation.prepare("another driver", 0)
