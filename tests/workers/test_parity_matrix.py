"""Every layout computes what one process computes: scores, losses, gradient norms, weights after optimizer steps.

In one process rows are padded and taken two at a time; docs/results.md explains the cases and lists the differences.
``make test`` runs each path once; ``make test-slow`` runs every row of the page.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.parity import CASES, SLOW, assert_decisive, assert_parity

pytestmark = pytest.mark.simulated


def parameters(case: tuple[str, str]) -> Any:
    return pytest.param(*case, id=", ".join(case), marks=[pytest.mark.slow] if case in SLOW else [])


@pytest.mark.parametrize(("layout", "dtype"), map(parameters, CASES))
def test_layout_computes_what_one_process_computes(layout: str, dtype: str) -> None:
    assert_parity(layout, dtype)


def test_decisive_routers_use_all_experts_with_margins_far_above_rounding() -> None:
    assert_decisive("EP2, decisive routers", "bfloat16")
