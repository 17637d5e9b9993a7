"""Sockets of one machine: in a folder that only the user can enter, which then needs no key."""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mcontroller.channel.address import Address, ChannelKeys, KeyPair
from mcontroller.channel.controller import ask
from mcontroller.channel.worker import Endpoint
from tests.mcontroller.channel.endpoints import SECONDS, Controller, cut_local_connections, start_endpoint


@pytest.fixture
def keys() -> ChannelKeys:
    return ChannelKeys.generate()


def endpoint_in(folder: Path) -> Address:
    queries = {"double": lambda reply, number: reply(2 * number)}
    return Endpoint("127.0.0.1", ChannelKeys.generate(), queries, folder=str(folder)).address


@pytest.mark.parametrize("size", [0, 100, 60_000, 2_000_000])
def test_calls_and_queries_of_one_machine_need_no_port(keys: ChannelKeys, size: int) -> None:
    addresses = [replace(start_endpoint(keys), call_port=1, query_port=1) for _ in range(2)]
    frames = [secrets.token_bytes(size), b"", secrets.token_bytes(7)]
    assert Controller(addresses).call(0, b"head", *frames) == {rank: [b"head", *frames] for rank in (0, 1)}
    assert ask(addresses, "double", 3, timeout=SECONDS) == [(6, []), (6, [])]


def test_a_process_of_another_machine_does_not_look_into_the_folder(keys: ChannelKeys) -> None:
    address = start_endpoint(keys)
    there = replace(address, machine="another boot")
    assert there.calls == f"tcp://127.0.0.1:{address.call_port}" and address.calls.startswith("ipc:///proc/self/fd/")
    assert Controller([there]).call(0, b"x") == {0: [b"x"]}


def test_a_folder_of_the_same_path_without_the_sockets_is_not_used(keys: ChannelKeys) -> None:
    elsewhere = replace(start_endpoint(keys), name="made in another container")
    assert elsewhere.calls == f"tcp://127.0.0.1:{elsewhere.call_port}"
    assert ask([elsewhere], "double", 3, timeout=SECONDS) == [(6, [])]


def test_a_busy_process_gets_all_calls_in_order(keys: ChannelKeys) -> None:
    release, received = threading.Event(), list[bytes]()
    address = start_endpoint(keys, lambda frames: (release.wait(SECONDS), received.append(frames[0]), frames[:1])[2])
    controller = Controller([address])
    for number in range(2_000):  # more than a Unix socket holds
        controller.send(number, b"%d" % number, b"x" * 300)
    release.set()
    assert controller.hub.wait(lambda: len(controller.answers) == 2_000, SECONDS)
    assert received == [b"%d" % number for number in range(2_000)]


def test_a_lost_connection_is_reported_and_calls_sent_again_run_once(keys: ChannelKeys) -> None:
    release, runs = threading.Event(), list[bytes]()
    address = start_endpoint(keys, lambda frames: (runs.append(frames[0]), release.wait(SECONDS), frames)[2])
    controller = Controller([address])
    controller.send(0, b"first")
    controller.send(1, b"second")
    assert controller.hub.wait(lambda: controller.changes == [(0, True)], SECONDS)
    cut_local_connections(address)
    assert controller.hub.wait(lambda: controller.changes[1:] == [(0, False), (0, True)], SECONDS)
    release.set()
    controller.send(0, b"first")
    controller.send(1, b"second")
    controller.result(1)
    assert controller.call(2, b"third") == {0: [b"third"]}
    assert runs == [b"first", b"second", b"third"]


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    address = endpoint_in(tmp_path)
    assert address.folder == "" and not list(tmp_path.iterdir())
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]
    assert ask([replace(address, client=KeyPair.generate())], "double", 3, timeout=SECONDS) == [None]


def test_a_folder_behind_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "of_a_stranger").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("of_a_stranger")
    assert endpoint_in(tmp_path / "link").folder == ""


def test_a_controller_uses_no_folder_that_others_can_enter(tmp_path: Path) -> None:
    address = endpoint_in(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    os.rename(tmp_path / "made", tmp_path / "opened")
    (tmp_path / "opened").chmod(0o755)
    local = replace(address, folder=str(tmp_path / "opened"))
    assert local.queries == f"tcp://127.0.0.1:{address.query_port}"
    assert ask([local], "double", 3, timeout=SECONDS) == [(6, [])]


def test_a_folder_that_is_replaced_is_used_as_it_was_checked(tmp_path: Path) -> None:
    address = endpoint_in(tmp_path / "made")
    checked = address.queries
    os.rename(tmp_path / "made", tmp_path / "moved")
    (tmp_path / "made").mkdir(mode=0o755)  # as anyone may do who can write into the folder above
    assert address.queries == checked
    assert ask([address], "double", 3, timeout=SECONDS) == [(6, [])]
    assert not list((tmp_path / "made").iterdir())
