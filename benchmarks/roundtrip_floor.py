"""The least that two calls in each training step cost on this machine, without any code of this project.

    python benchmarks/roundtrip_floor.py [--rows 4] [--repeats 20]

8 processes get the bytes of a shard, sleep for half a step, and answer; then a message without bytes, and the same
again: nothing is planned, checked or kept. In the last row the columns of two shards are pickled, and each process
makes tensors of them and answers with pickled metrics, as any Python program with these batches must. ``roundtrip.py``
prints these figures beside a group's; this program prints them as JSON, in seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import secrets
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import zmq

PROCESSES, SHARDS, STEP_SECONDS = 8, 2, 0.2
KINDS = {
    "curve": "the same bytes over ZeroMQ with CURVE",
    "plain": "the same bytes over ZeroMQ, not encrypted",
    "pipes": "the same bytes over pipes",
    "pickled": "tensors, pickled and read, over pipes",
}
"""The payload of a message, and its serialization."""

Exchange = Callable[[Any], None]
"""Sends a message to every process, and waits for their answers."""

Keys = tuple[bytes, bytes, bytes]
"""The server's public key, and the client's pair."""


def name_of(rank: int) -> bytes:
    return b"rank%d" % rank


def over_pipes(serve: Callable[[Connection], None], pack: Callable[[Any], bytes], shards: int) -> Exchange:
    """Return the exchange of messages that are packed once for each shard."""
    pairs = [multiprocessing.Pipe() for _ in range(PROCESSES)]
    for _, theirs in pairs:
        multiprocessing.Process(target=serve, args=(theirs,), daemon=True).start()
    pipes = [ours for ours, _ in pairs]

    def exchange(message: Any) -> None:
        packed = [pack(message) for _ in range(shards)]
        for index, pipe in enumerate(pipes):
            pipe.send_bytes(packed[index % shards])
        late = list(pipes)
        while late:
            for ready in wait(late):
                if isinstance(ready, Connection):
                    ready.recv_bytes()
                    late.remove(ready)

    return exchange


def over_zmq(encrypted: bool) -> Exchange:
    router = zmq.Context().socket(zmq.ROUTER)
    router.linger = 0
    keys: Keys | None = None
    if encrypted:
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        router.curve_server, router.curve_secretkey = True, server[1]
        keys = server[0], *client
    url = f"ipc://@mcontroller-floor-{secrets.token_hex(8)}"
    router.bind(url)
    for rank in range(PROCESSES):
        multiprocessing.Process(target=serve_zmq, args=(url, name_of(rank), keys), daemon=True).start()
    for _ in range(PROCESSES):
        router.recv_multipart()  # each says that it is there

    def exchange(message: bytes) -> None:
        for rank in range(PROCESSES):
            router.send_multipart([name_of(rank), message])
        for _ in range(PROCESSES):
            router.recv_multipart()

    return exchange


def serve_pipe(pipe: Connection) -> None:
    with suppress(EOFError):
        while True:
            pipe.recv_bytes()
            time.sleep(STEP_SECONDS / 2)
            pipe.send_bytes(b"done")


def serve_pickled(pipe: Connection) -> None:
    with suppress(EOFError):
        while True:
            columns = pickle.loads(pipe.recv_bytes())
            tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
            time.sleep(STEP_SECONDS / 2)
            pipe.send_bytes(pickle.dumps({"columns": len(tensors), "loss": 1.0}))


def serve_zmq(url: str, name: bytes, keys: Keys | None) -> None:
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.routing_id = name
    if keys is not None:
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = keys
    dealer.connect(url)
    dealer.send(b"here")
    while True:
        dealer.recv()
        time.sleep(STEP_SECONDS / 2)
        dealer.send(b"done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="rows of 1,024 tokens in each shard")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    exchanges = {
        "curve": over_zmq(True),
        "plain": over_zmq(False),
        "pipes": over_pipes(serve_pipe, bytes, 1),
        "pickled": over_pipes(serve_pickled, pickle.dumps, SHARDS),
    }
    ids = ("input_ids", "attention_mask", "position_ids")
    columns = {name: np.zeros((options.rows, 1024), np.int64) for name in ids}
    columns["score"] = np.zeros((options.rows, 1024), np.float32)
    message = b"".join(column.tobytes() for column in columns.values())
    times: dict[str, list[float]] = {name: [] for name in (*exchanges, "alone")}
    for repeat in range(options.repeats + 2):
        for name, taken in times.items():
            began = time.perf_counter()
            for content in (columns, {}) if name == "pickled" else (message, b""):
                if name == "alone":
                    time.sleep(STEP_SECONDS / 2)
                else:
                    exchanges[name](content)
            if repeat >= 2:
                taken.append(time.perf_counter() - began)
    alone = statistics.median(times.pop("alone"))
    print(json.dumps({name: statistics.median(taken) - alone for name, taken in times.items()}))


if __name__ == "__main__":
    main()
