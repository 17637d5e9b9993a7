"""Every layout computes what one process computes: scores, losses, gradient norms, weights after optimizer steps."""

from __future__ import annotations

import pytest

from tests.workers.parity import LAYOUTS, assert_parity


@pytest.mark.parametrize(
    "layout", [name for name, layout in LAYOUTS.items() if not layout.packed and "router losses" not in name]
)
def test_a_layout_computes_what_one_process_computes(layout: str) -> None:
    assert_parity(layout, "float32")
