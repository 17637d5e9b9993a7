"""The package's public names: known to users of this model, and declared for type checkers."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import mcontroller

KNOWN = {
    "pad_dataproto_to_divisor": ["data", "size_divisor"],
    "unpad_dataproto": ["data", "pad_size"],
    "union_tensor_dict": ["tensor_dict1", "tensor_dict2"],
    "union_numpy_dict": ["tensor_dict1", "tensor_dict2"],
    "fold_batch_dim": ["data", "new_batch_size"],
    "unfold_batch_dim": ["data", "batch_dims"],
    "collate_fn": ["x"],
    "register_dispatch_mode": ["dispatch_mode_name", "dispatch_fn", "collect_fn"],
    "register": ["dispatch_mode", "execute_mode", "blocking", "materialize_futures"],
}


@pytest.mark.parametrize("name", KNOWN)
def test_helpers_take_the_arguments_that_users_know(name: str) -> None:
    taken = inspect.signature(getattr(mcontroller, name)).parameters.values()
    assert [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD] == KNOWN[name]


def test_constants_have_their_known_values() -> None:
    assert mcontroller.MAGIC_ATTR == "attrs_3141562937"
    assert mcontroller.DataProtoConfig.auto_padding is False


def test_every_name_loads_and_is_declared_for_type_checkers() -> None:
    tree = ast.parse(Path(str(mcontroller.__file__)).read_text())
    declared = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert sorted(declared) == mcontroller.__all__
    assert all(getattr(mcontroller, name) is not None for name in declared)
    with pytest.raises(AttributeError, match=r"has no attribute 'DataPorto'; did you mean DataProto"):
        _ = mcontroller.DataPorto
