"""In bfloat16 too a layout computes what one process computes: those of up to four ranks."""

from __future__ import annotations

import pytest

from tests.workers.parity import assert_decisive, assert_parity, in_bfloat16


@pytest.mark.parametrize("layout", in_bfloat16(1, 2, 4))
def test_a_layout_computes_what_one_process_computes(layout: str) -> None:
    assert_parity(layout, "bfloat16")


def test_decisive_routers_use_all_experts_on_every_rank_and_choose_by_far_more_than_rounding() -> None:
    assert_decisive("EP2, decisive routers", "bfloat16")
