"""The rotary positions of packed rows are Megatron's."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

import parallel_state.megatron  # noqa: F401
from parallel_state.patches.packed_rope import packed_positions

BOUNDS = torch.tensor([0, 16, 16, 24, 64], dtype=torch.int32)  # one row is empty


class Group:
    """The size and the rank of a process group."""

    def __init__(self, size: int, rank: int) -> None:
        self.sizes = size, rank

    def size(self) -> int:
        return self.sizes[0]

    def rank(self) -> int:
        return self.sizes[1]


def unpatched() -> Any:
    """Return a second copy of Megatron's module, as it is in its file."""
    assert rope_utils.__file__ is not None
    spec = importlib.util.spec_from_file_location("unpatched_rope_utils", rope_utils.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("positions", [40, 64], ids=["of the longest row", "of all tokens"])
@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 1), (4, 2)])
def test_packed_heads_are_rotated_as_megatron_rotates_them(cp: int, rank: int, positions: int) -> None:
    original = unpatched()._apply_rotary_pos_emb_thd
    assert rope_utils._apply_rotary_pos_emb_thd.__module__ == "parallel_state.patches.packed_rope"
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(64 // cp, 2, 8, generator=generator)
    angles = torch.randn(positions, 1, 1, 8, generator=generator)
    arguments = (heads, BOUNDS, angles)
    expected = original(*arguments, cp_group=Group(cp, rank))
    assert torch.equal(rope_utils._apply_rotary_pos_emb_thd(*arguments, cp_group=Group(cp, rank)), expected)


def test_positions_start_again_with_every_row() -> None:
    bounds = torch.tensor([0, 3, 4, 4, 6])
    assert packed_positions(bounds, 6, 1, 0).tolist() == [0, 1, 2, 0, 0, 1]
    assert packed_positions(bounds, 6, 1, 0, offsets=True).tolist() == [0, 1, 2, 3, 4, 5]
