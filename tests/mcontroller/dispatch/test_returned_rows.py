"""A method returns a row for each row that it got, unless it is registered with ``changes_rows``."""

from __future__ import annotations

import pytest
import torch

from mcontroller import ClassWithInitArgs, DataProto, Dispatch, DispatchError, LocalWorkerGroup, Worker, register


class Returns(Worker):
    """Ranks that return ``number[rank]`` rows; None for None, no columns for -1."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, data: DataProto, numbers: list[int | None]) -> DataProto | None:
        return self._rows(numbers)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto, numbers: list[int | None]) -> DataProto | None:
        return self._rows(numbers)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def other(self, data: DataProto, numbers: list[int | None]) -> DataProto | None:
        return self._rows(numbers)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data

    def _rows(self, numbers: list[int | None]) -> DataProto | None:
        number = numbers[self.rank]
        if number is None:
            return None
        return DataProto() if number < 0 else DataProto.from_dict({"value": torch.full((number,), self.rank)})


@pytest.fixture
def group() -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Returns), 2, name_prefix="returns")


ROWS = DataProto.from_dict({"value": torch.arange(8)})


@pytest.mark.parametrize(
    ("numbers", "returned"),
    [([4, 3], (4, 3)), ([8, 4], (8, 4)), ([6, 6], (6, 6)), ([4, -1], (4, 0))],
)
def test_another_number_of_rows_is_an_error_with_the_numbers_of_all_ranks(
    group: LocalWorkerGroup, numbers: list[int], returned: tuple[int, int]
) -> None:
    for call in (group.same, lambda *arguments: group.later(*arguments).get()):
        with pytest.raises(DispatchError) as caught:
            call(ROWS, numbers)
        assert (caught.value.returned, caught.value.ranks) == (returned, (0, 1))


def test_a_rank_without_a_batch_is_an_error(group: LocalWorkerGroup) -> None:
    with pytest.raises(DispatchError):
        group.same(ROWS, [None, 4])


def test_passing_on_a_result_with_another_number_of_rows_is_an_error(group: LocalWorkerGroup) -> None:
    with pytest.raises(DispatchError) as raised:
        group.echo(group.later(ROWS, [4, 3]))
    assert raised.value.returned == (4, 3)


def test_rows_may_differ_if_the_method_declares_it(group: LocalWorkerGroup) -> None:
    assert group.other(ROWS, [4, 3]).batch["value"].tolist() == [0] * 4 + [1] * 3
    assert len(group.other(ROWS, [8, 8])) == 16


def test_metrics_without_rows_are_no_error(group: LocalWorkerGroup) -> None:
    assert len(group.same(ROWS, [-1, -1])) == 0


def test_the_rows_of_a_result_that_is_passed_on_are_counted(group: LocalWorkerGroup) -> None:
    doubled = group.other.options(blocking=False)(ROWS, [8, 8])
    assert len(group.echo(doubled)) == 16
    wrong = group.later(doubled, [8, 4])
    for call in (lambda: group.same(doubled, [8, 4]), lambda: group.echo(wrong)):
        with pytest.raises(DispatchError) as raised:
            call()
        assert raised.value.returned == (8, 4)
