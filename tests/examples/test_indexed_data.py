"""Workers that read an indexed dataset themselves train on it as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.bring_your_own_megatron import indexed_data
from mcontroller import DataProto
from mcontroller.testing import SimulatedGroupMaker
from parallel_state import ParallelLayout
from workers import ParallelConfig


def trained(make: SimulatedGroupMaker, prefix: str, world_size: int, sent: list[int], **axes: int) -> list[float]:
    """Return the losses of a group; ``sent`` gets the bytes of the rows of each call."""
    layout = ParallelLayout(world_size, **axes)
    config = indexed_data.make_config(ParallelConfig(**axes))
    group: Any = make(indexed_data.IndexedDataActor, layout, config, "actor", prefix)
    update = group.update_sft

    def counted(batch: DataProto) -> DataProto:
        sent.append(sum(column.nbytes for column in batch.batch.values()))
        result: DataProto = update(batch)
        return result

    group.update_sft = counted
    return indexed_data.losses(group)


@pytest.mark.parametrize(("world_size", "axes"), [(2, {}), (4, {"pp": 2}), (4, {"tp": 2})], ids=["dp2", "pp2", "tp2"])
def test_ranks_that_read_their_own_rows_have_the_losses_of_one_process(
    world_size: int, axes: dict[str, int], simulated_group: SimulatedGroupMaker, tmp_path: Path
) -> None:
    prefix, sent = str(tmp_path / "data"), []
    indexed_data.write_dataset(prefix)
    expected = trained(simulated_group, prefix, 1, sent)
    actual = trained(simulated_group, prefix, world_size, sent, **axes)
    assert actual == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < expected[0] - 0.1
    assert sent == [8 * 8] * 10  # a number for each row: no tokens pass through the controller
