"""Compare DataProto with plain tensors: chunk + concat with bare torch, pickling with a copy of the memory.

    python -m benchmarks.dataproto [--megabytes 0.2 1 5 15 120] [--parts 8] [--repeats 21]

Columns as a trainer sends them: int64 ids, mask and positions and one float32 column, each ``[batch, seq]``. The
alternatives of a row are measured alternately in every round, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mcontroller.data.batch import DataProto

SECONDS = 0.5
SEQUENCE = 1024
BYTES_PER_TOKEN = 3 * 8 + 4


def make_batch(megabytes: float, parts: int) -> DataProto:
    """Make a batch whose rows the parts divide; otherwise ``torch.chunk`` makes fewer parts, joined more slowly."""
    rows = max(1, round(megabytes * 1e6 / (SEQUENCE * BYTES_PER_TOKEN * parts))) * parts
    ids = torch.randint(0, 32_000, (rows, SEQUENCE))
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(SEQUENCE).repeat(rows, 1),
        "values": torch.rand(rows, SEQUENCE),
    }
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0})


def medians(alternatives: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median seconds of each: one warm-up round, then ``repeats`` rounds, for SECONDS at least."""
    taken: list[list[float]] = [[] for _ in alternatives]
    end = time.perf_counter() + SECONDS
    while len(taken[0]) <= repeats or time.perf_counter() < end:
        for times, run in zip(taken, alternatives, strict=True):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return [statistics.median(times[1:]) for times in taken]


def chunk_and_concat(batch: DataProto, parts: int, repeats: int) -> list[str]:
    columns = batch.tensors()
    arrived = [_arrived(part) for part in batch.chunk(parts)]

    def bare() -> dict[str, torch.Tensor]:
        chunks = {key: column.chunk(parts) for key, column in columns.items()}
        return {key: torch.cat(chunks[key]) for key in columns}

    def of_several_origins() -> DataProto:
        batch.chunk(parts)
        return DataProto.concat(arrived)

    alternatives = [lambda: DataProto.concat(batch.chunk(parts)), of_several_origins, bare]
    *ours, theirs = medians(alternatives, repeats)
    ratios = [f"{seconds / theirs:.2f}x" for seconds in ours]
    return [f"{batch.nbytes() / 1e6:.1f} MB", *map(milliseconds, ours), milliseconds(theirs), *ratios]


def _arrived(part: DataProto) -> DataProto:
    """Return the part as its receiver has it: it shares nothing with the others."""
    stream, buffers = _dump(part)
    return pickle.loads(stream, buffers=[bytearray(buffer.raw()) for buffer in buffers])


def pickling(batch: DataProto, repeats: int) -> list[str]:
    columns = [column.numpy() for column in batch.tensors().values()]
    stream, buffers = _dump(batch)
    read_only = [bytes(buffer.raw()) for buffer in buffers]
    alternatives = [
        lambda: _dump(batch),
        lambda: pickle.loads(stream, buffers=read_only).tensors(),  # which makes the receiver's copy
        lambda: [column.copy() for column in columns],
        lambda: _with_torch(batch),
    ]
    dump, load, copy, torch_save = medians(alternatives, repeats)
    size = batch.nbytes()
    return [
        f"{size / 1e6:.1f} MB",
        milliseconds(dump),
        milliseconds(load),
        f"{size / (dump + load) / 1e9:.2f}",
        f"{size / copy / 1e9:.2f}",
        f"{(dump + load) / copy:.2f}x",
        f"{size / torch_save / 1e9:.2f}",
    ]


def _dump(batch: DataProto) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers


def _with_torch(batch: DataProto) -> object:
    """Pickle and unpickle the tensors as torch does, inside the stream."""
    return pickle.loads(pickle.dumps(batch.tensors(), protocol=5))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(title=title, title_justify="left")
    for head in heads:
        made.add_column(head, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.2, 1, 5, 15, 120])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    batches = [make_batch(megabytes, options.parts) for megabytes in options.megabytes]
    console = Console(width=140)
    console.print(f"torch {torch.__version__}, numpy {np.__version__}, {torch.get_num_threads()} torch threads")
    console.print(
        table(
            f"chunk({options.parts}) + concat; limit 1.5x",
            ["batch", "DataProto", "parts of several origins", "torch.chunk + torch.cat", "ratio", "ratio"],
            [chunk_and_concat(batch, options.parts, options.repeats) for batch in batches],
        )
    )
    console.print(
        table(
            "pickle, protocol 5, out of band; the receiver's copy is private",
            ["batch", "dumps", "loads", "GB/s", "memcpy GB/s", "time / memcpy", "torch's own pickling GB/s"],
            [pickling(batch, options.repeats) for batch in batches],
        )
    )


if __name__ == "__main__":
    main()
