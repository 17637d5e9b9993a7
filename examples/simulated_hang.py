"""A deadlock that is an error at once, without a GPU and without processes.

One data-parallel rank has an empty batch and returns early; the others wait for it in a collective. On a cluster that
is a job that hangs. On simulated ranks, the error names the rank that is missing, the call, and the line.

python -m examples.simulated_hang
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallel_state import ParallelLayout
from parallel_state.simulated import SimulationError, run_ranks

LAYOUT = ParallelLayout(8, tp=2, pp=2)  # dp is 2


def average_loss(rows: list[int]) -> float:
    """Return the mean loss over the data-parallel ranks."""
    from megatron.core import parallel_state

    mine = rows[parallel_state.get_data_parallel_rank()]
    if mine == 0:
        return 0.0  # the bug: the other ranks of the group wait
    loss = torch.tensor([float(mine)])
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return float(loss) / parallel_state.get_data_parallel_world_size()


def main() -> None:
    print(run_ranks(LAYOUT, average_loss, [2, 4]))
    try:
        run_ranks(LAYOUT, average_loss, [2, 0])
    except SimulationError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
