"""A guess of the buffers of NCCL's communicators, which no dry run counts."""

from __future__ import annotations

from parallel_state.layout import ParallelLayout

BYTES_OF_TWO_RANKS, BYTES_PER_GROUP = 256 << 20, 1 << 30
"""Of one communicator, of two ranks or of more.

It depends on NCCL's version, the network and the channels. Users report 7 to 10 GB on each of 8 GPUs with tp, pp, dp
and ep, and nothing has been measured here.
"""


def communicator_bytes(ranks: int) -> int:
    """Return the guess for one communicator; one of a single rank has next to none."""
    if ranks < 2:
        return 0
    return BYTES_OF_TWO_RANKS if ranks == 2 else BYTES_PER_GROUP


def nccl_bytes(layout: ParallelLayout, *, experts: bool, sharded: bool) -> int:
    """Return the guess for a role: one communicator for each group that an update uses.

    Megatron makes a group for each set of axes, also of the same ranks. The gradient norm has a separate group: of
    tp x pp, or of all ranks with the distributed optimizer.

    Args:
        layout: of the role.
        experts: whether the model has experts.
        sharded: whether the optimizer is distributed.
    """
    norm = layout.world_size if sharded else layout.tp * layout.pp
    ranks = [layout.world_size, layout.tp, layout.pp, layout.cp, layout.dp, layout.dp * layout.cp, norm]
    if experts:
        ranks += [layout.sizes["ep"], layout.sizes["etp"] * layout.sizes["ep"], layout.sizes["edp"]]
    return sum(map(communicator_bytes, ranks))
