"""Every layout computes what one process computes: scores, losses, gradient norms, weights after optimizer steps.

In one process rows are padded and taken two at a time; docs/parity.md explains the cases and lists the differences.
"""

from __future__ import annotations

import pytest

from tests.workers.parity import CASES, DECISIVE, LAYOUTS, assert_decisive, assert_parity

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize(("layout", "dtype"), [pytest.param(*case, id=", ".join(case)) for case in CASES])
def test_layout_computes_what_one_process_computes(layout: str, dtype: str) -> None:
    assert_parity(layout, dtype)


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.model == DECISIVE])
def test_decisive_routers_use_all_experts_on_every_rank_with_margins_far_above_rounding(layout: str) -> None:
    assert_decisive(layout, "bfloat16")
