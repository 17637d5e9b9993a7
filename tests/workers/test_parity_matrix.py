"""Every layout computes what one process computes: scores, losses, gradient norms, weights after optimizer steps."""

from __future__ import annotations

import math

import pytest

from tests.workers.parity import IN_BFLOAT16, LAYOUTS, QUANTITIES, TOLERANCES, differences


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, "float32") for layout in LAYOUTS] + [(layout, "bfloat16") for layout in IN_BFLOAT16],
)
def test_a_layout_computes_what_one_process_computes(layout: str, dtype: str) -> None:
    found = differences(layout, dtype)
    assert found.keys() == set(QUANTITIES)
    assert all(math.isfinite(value) and value <= TOLERANCES[dtype] for value in found.values()), found
