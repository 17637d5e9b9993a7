"""The rows of all ranks on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from mcontroller.porting import all_gather_data_proto
from tests.forking import run_ranks
from tests.mcontroller.batches import numbered

pytestmark = pytest.mark.processes


def gathered() -> tuple[list[int], list[str], dict[str, Any]]:
    batch = numbered(4, rank=dist.get_rank())[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    all_gather_data_proto(batch, None)
    assert batch.batch is not None
    return batch.batch["n"].tolist(), batch.non_tensor_batch["name"].tolist(), batch.meta_info


def test_every_rank_gets_the_rows_of_all_ranks_in_their_order() -> None:
    assert run_ranks(gathered, 2) == [([0, 1, 2, 3], ["0", "1", "2", "3"], {"rank": rank}) for rank in range(2)]
