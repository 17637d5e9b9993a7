"""Values gathered from all ranks, and errors of one rank that are raised on all."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallel_state.agreement import all_gather_values, raise_on_every_rank
from parallel_state.errors import LayoutError, MControllerError
from tests.ranks import run_ranks

pytestmark = pytest.mark.simulated


def groups_of_two() -> dist.ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def test_values_are_gathered_by_rank_within_the_group() -> None:
    def gathered() -> tuple[list[str], list[str]]:
        value = f"rank {dist.get_rank()}"
        return all_gather_values(value), all_gather_values(value, groups_of_two())

    everywhere = ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert run_ranks(gathered, 4) == [(everywhere, everywhere[:2])] * 2 + [(everywhere, everywhere[2:])] * 2


def test_a_single_rank_does_not_pickle_its_value() -> None:
    assert run_ranks(lambda: all_gather_values(lambda: 3)[0](), 1) == [3]


def test_every_rank_returns_its_own_result() -> None:
    assert run_ranks(lambda: raise_on_every_rank(lambda: 10 * dist.get_rank()), 3) == [0, 10, 20]


def test_an_error_of_one_rank_is_raised_on_all_ranks_of_its_group_only() -> None:
    def fail_on_rank_1() -> int:
        if dist.get_rank() == 1:
            raise LayoutError("tp does not fit", tp=3)
        return dist.get_rank()

    def outcome() -> object:
        try:
            return raise_on_every_rank(fail_on_rank_1, groups_of_two())
        except LayoutError as error:
            return str(error), error.fields

    error = ("tp does not fit", {"tp": 3})
    assert run_ranks(outcome, 4) == [error, error, 2, 3]


def test_the_error_of_the_first_rank_is_raised_if_several_fail() -> None:
    def fail() -> int:
        raise MControllerError(f"rank {dist.get_rank()} failed")

    def message() -> str:
        with pytest.raises(MControllerError) as raised:
            raise_on_every_rank(fail)
        return str(raised.value)

    assert run_ranks(message, 2) == ["rank 0 failed"] * 2
