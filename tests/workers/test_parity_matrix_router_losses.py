"""The layouts of the parity matrix with router losses."""

from __future__ import annotations

import pytest

from tests.workers.parity import CASES, assert_parity


@pytest.mark.parametrize(("layout", "dtype"), [case for case in CASES if "router losses" in case[0]])
def test_router_losses_are_those_of_one_process(layout: str, dtype: str) -> None:
    assert_parity(layout, dtype)
