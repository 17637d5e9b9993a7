"""Every layout computes what one process computes: scores, losses, gradient norms, weights after optimizer steps."""

from __future__ import annotations

import pytest

from tests.workers.parity import CASES, LAYOUTS, assert_parity


@pytest.mark.parametrize(
    ("layout", "dtype"), [case for case in CASES if not LAYOUTS[case[0]].packed and "router losses" not in case[0]]
)
def test_a_layout_computes_what_one_process_computes(layout: str, dtype: str) -> None:
    assert_parity(layout, dtype)
