"""Batches with a column of every kind that a DataProto supports, for tests of row operations."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from mcontroller.data.batch import DataProto

row_counts = st.integers(0, 17)


def every_kind(rows: int) -> DataProto:
    """Make ``rows`` rows that differ from each other in every column of numbers."""
    number = torch.arange(rows)
    tensors = {
        "ids": (number[:, None] * 10 + torch.arange(4)),
        "mask": number[:, None] % 3 > torch.arange(2),
        "score": number / 7,
        "bfloat": (number[:, None] * torch.ones(3)).bfloat16(),
        "float8": (number % 16).to(torch.float8_e4m3fn),
        "unsigned": number.to(torch.uint16),
        "nothing": torch.zeros(rows, 0),
        "columns_first": torch.arange(3 * rows).reshape(3, rows).T,
        "nested": TensorDict({"x": number * 2, "deeper": TensorDict({"y": number[:, None] + 0.5}, [rows])}, [rows]),
    }
    non_tensors = {
        "uid": [f"row {row}" for row in range(rows)],
        "turns": [[{"role": "user", "n": row}] * (row % 3) for row in range(rows)],
        "level": number.numpy(),
    }
    return DataProto.from_dict(tensors, non_tensors, {"temperature": 0.5, "stops": ["a", ["b"]]})


def numbered(rows: int, **meta_info: object) -> DataProto:
    """Make ``rows`` rows whose only columns are their number, as ``n`` and as ``name``."""
    tensors = {"n": torch.arange(rows)}
    return DataProto.from_dict(tensors, {"name": [str(row) for row in range(rows)]}, meta_info)


def numbers(batch: DataProto) -> list[int]:
    """Return the numbers of ``numbered`` rows, and check them against their names."""
    rows = batch.batch["n"].tolist()
    assert batch.non_tensor_batch["name"].tolist() == [str(row) for row in rows]
    return rows
