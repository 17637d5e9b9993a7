"""Malformed arguments of layouts and modes raise errors of this project only; those of a batch leave it as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcontroller import DataProto, Dispatch
from mcontroller.dispatch.modes import plan
from mcontroller.errors import MControllerError
from parallel_state import ParallelLayout, Topology
from tests.fuzzing import fuzz, only_errors_of_this_project

SIZES = st.integers(-2, 9) | st.sampled_from([2.0, 1.5, float("nan"), True, None, "2", [2], {}])
AXES = st.sampled_from(["tp", "cp", "ep", "dp", "pp", "edp", "TP", "", "x", None, 1, ("tp",), 2.5])
ORDERS = st.sampled_from(["tp-cp-ep-dp-pp", "tp-dp", "tp-tp", "-", "", "pp-dp-cp-tp"]) | st.text("tpcde-", max_size=12)
COLUMNS = st.sampled_from(
    [
        torch.zeros(2),
        torch.zeros(2, 3),
        torch.zeros(3, 0),
        torch.zeros(()),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2).to_sparse(),
        np.zeros(2),
        np.array(3.0),
        np.array(["a", None], dtype=object),
        np.zeros((0, 2)),
        [1, 2],
        "ab",
        None,
        1.5,
        {},
    ]
)
NAMES = st.sampled_from(["a", "b", "", 1, None, ("a", "b"), "response_mask"])


@fuzz
@given(
    SIZES,
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "vpp"), SIZES) | {"order": ORDERS}
    ),
)
def test_a_layout(world_size: Any, axes: dict[str, Any]) -> None:
    def use() -> None:
        layout = ParallelLayout(world_size, **axes)
        assert layout.coordinates(0)
        Topology.from_layout(layout)

    only_errors_of_this_project(use)


@fuzz
@given(st.lists(AXES, max_size=3), st.dictionaries(AXES, SIZES, max_size=2) | AXES)
def test_a_mode(axes: list[Any], collect: Any) -> None:
    def use() -> None:
        plan(Dispatch.over(*axes, collect=collect), Topology.from_layout(ParallelLayout(8, tp=2, pp=2)))

    only_errors_of_this_project(use)


OPERATIONS = {
    "chunk": lambda batch, number, names, other: batch.chunk(number),
    "split": lambda batch, number, names, other: batch.split(number),
    "repeat": lambda batch, number, names, other: batch.repeat(number),
    "padding": lambda batch, number, names, other: batch.padding(number, other),
    "unpad": lambda batch, number, names, other: batch.unpad(number),
    "make_iterator": lambda batch, number, names, other: batch.make_iterator(number, other),
    "select": lambda batch, number, names, other: batch.select(names, other),
    "pop": lambda batch, number, names, other: batch.pop(names, other),
    "rename": lambda batch, number, names, other: batch.rename(names, other),
    "reorder": lambda batch, number, names, other: batch.reorder(other),
    "index": lambda batch, number, names, other: batch[other],
    "union": lambda batch, number, names, other: batch.union(other),
    "concat": lambda batch, number, names, other: DataProto.concat(other),
    "row_lengths": lambda batch, number, names, other: batch.row_lengths(other),
}


def four_rows() -> DataProto:
    return DataProto.from_dict({"a": torch.zeros(4, 2)}, non_tensors={"b": np.arange(4).astype(object)})


@fuzz
@given(
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(-2, 9) | st.sampled_from([1.5, True, None, "2", [2], {}]),
    NAMES | st.lists(NAMES, max_size=2),
    NAMES | st.integers(-2, 9) | COLUMNS | st.lists(NAMES | st.integers(-2, 9), max_size=3),
)
def test_an_operation_of_a_batch(name: str, number: Any, names: Any, other: Any) -> None:
    batch = four_rows()
    try:
        OPERATIONS[name](batch, number, names, other)
    except (MControllerError, TypeError, ValueError, AttributeError, RuntimeError):
        assert batch == four_rows()
