"""meta_info: equal values are kept, metrics are gathered from every part, other differences are reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.data.meta import copy_meta, merge_concat, same_value
from mcontroller.errors import DataError
from tests.mcontroller.batches import numbered


def joined(*infos: dict[str, Any]) -> dict[str, Any]:
    return DataProto.concat([numbered(1, **info) for info in infos]).meta_info


def test_keys_whose_values_agree_in_all_parts_are_kept() -> None:
    table = {"t": torch.arange(3), "a": [np.ones(2), float("nan")], "d": np.array(["NaT"], "M8[s]")}
    again = {"t": torch.arange(3), "a": [np.ones(2), float("nan")], "d": np.array(["NaT"], "M8[s]")}
    merged = joined({"x": 1, "table": table}, {"y": "only here"}, {"x": 1, "table": again})
    assert list(merged) == ["x", "table", "y"]
    assert same_value(merged["table"], table)


def test_metrics_become_flat_lists_of_what_every_part_has() -> None:
    merged = joined(
        {"metrics": {"loss": 1.0, "acc": [0.1, 0.2]}},
        {"metrics": {"loss": 2.0}},
        {},
        {"metrics": {"loss": [3.0], "grad_norm": 5}},
    )
    assert merged == {"metrics": {"loss": [1.0, 2.0, 3.0], "acc": [0.1, 0.2], "grad_norm": [5]}}


def test_batches_of_metrics_only_are_joined() -> None:
    parts = [DataProto(meta_info={"metrics": {"loss": rank}}) for rank in range(3)]
    assert DataProto.concat(parts).meta_info == {"metrics": {"loss": [0, 1, 2]}}


def test_a_conflict_names_the_key_the_parts_and_the_values() -> None:
    with pytest.raises(DataError) as raised:
        joined({}, {"step": 1}, {"step": 2})
    assert raised.value.fields == {"key": "step", "parts": (1, 2), "values": (1, 2)}
    with pytest.raises(DataError) as raised:
        joined({"metrics": 3}, {"metrics": {"loss": 1}})
    assert (raised.value.key, raised.value.parts) == ("metrics", (0, 1))


def test_keys_that_differ_between_ranks_keep_the_first_value() -> None:
    parts = [{"step": 1, 5: 1, "metrics": {"loss": 1.0}}, {"step": 2, 5: 2, "metrics": {"loss": 2.0}}, {"metrics": 4}]
    assert merge_concat(parts, keep_first=True) == {"step": 1, 5: 1, "metrics": {"loss": [1.0, 2.0]}}


def test_union_merges_metrics_by_name_and_rejects_two_values() -> None:
    first, second = numbered(1, metrics={"actor": 1.0}), numbered(1, metrics={"critic": 2.0})
    assert first.union(second).meta_info == {"metrics": {"actor": 1.0, "critic": 2.0}}
    with pytest.raises(DataError) as raised:
        first.union(numbered(1, metrics={"actor": 3.0}))
    assert raised.value.fields == {"key": "actor", "parts": (0, 1), "values": (1.0, 3.0)}


def test_merging_changes_no_part_and_shares_no_container_with_any() -> None:
    parts = [numbered(1, names=["a"], metrics={"loss": [1]}) for _ in range(2)]
    merged = DataProto.concat(parts).meta_info
    merged["names"].append("b")
    merged["metrics"]["loss"].append(2)
    assert [part.meta_info for part in parts] == [{"names": ["a"], "metrics": {"loss": [1]}}] * 2


def test_a_copy_has_new_containers_and_shares_tensors() -> None:
    info = {"list": [{"deep": [1]}], "tuple": ([1],), "set": {1}, "tensor": torch.zeros(1)}
    copied = copy_meta(info)
    copied["list"][0]["deep"].append(2)
    copied["tuple"][0].append(2)
    copied["set"].add(2)
    assert info["list"] == [{"deep": [1]}] and info["tuple"] == ([1],) and info["set"] == {1}
    assert copied["tensor"] is info["tensor"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 2), ([1], (1,)), ({"a": 1}, {"b": 1}), ([1, 2], [1]), (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), np.zeros(2)), (torch.zeros(2), 0.0), (np.zeros(2), [0.0, 0.0]),
        (np.zeros(2), np.zeros(2, "f4")),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)), (None, 0), (float("nan"), 1.0), ("a", "b"),
    ],
)  # fmt: skip
def test_values_that_differ_in_type_shape_or_content_are_not_the_same(left: Any, right: Any) -> None:
    assert not same_value(left, right)
    assert not same_value(right, left)
    assert same_value(left, copy_meta(left))
