"""The packed layouts of the parity matrix: one process, which pads, computes the same."""

from __future__ import annotations

import pytest

from tests.workers.parity import CASES, LAYOUTS, assert_parity


@pytest.mark.parametrize(("layout", "dtype"), [case for case in CASES if LAYOUTS[case[0]].packed])
def test_packed_rows_are_computed_as_one_process_computes_padded_ones(layout: str, dtype: str) -> None:
    assert_parity(layout, dtype)
