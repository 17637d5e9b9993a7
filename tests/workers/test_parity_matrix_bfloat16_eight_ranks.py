"""In bfloat16 too a layout computes what one process computes: those of eight ranks."""

from __future__ import annotations

import pytest

from tests.workers.parity import assert_decisive, assert_parity, in_bfloat16


@pytest.mark.parametrize("layout", in_bfloat16(8))
def test_a_layout_computes_what_one_process_computes(layout: str) -> None:
    assert_parity(layout, "bfloat16")


def test_decisive_routers_use_all_experts_on_every_rank_and_choose_by_far_more_than_rounding() -> None:
    assert_decisive("TP2 x PP2 x EP2 with SP, decisive routers", "bfloat16")
