"""The transport that is chosen for ranks on nodes, in processes and on GPUs; never NCCL between ranks of one GPU."""

from __future__ import annotations

import pytest

from mcontroller.errors import ConfigError
from workers.weights.transfer.plan import RankWeights
from workers.weights.transfer.transports import choose_transport

_pids = iter(range(1000, 10_000))
GPUS = ("A", "B", "C", "D")


def ranks(*devices: str, node: str = "node", visible: tuple[str, ...] = GPUS) -> list[RankWeights]:
    """One rank in a separate process for each device."""
    return [RankWeights((), (), node, next(_pids), device, visible=visible) for device in devices]


CPU = "cpu"


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        (ranks(CPU, CPU), ranks(CPU), "shared_memory"),
        (ranks(CPU), ranks(CPU, node="other"), "process_group"),
        (ranks("A", "B"), ranks("C", "D"), "process_group"),
        (ranks("A", "B"), ranks("A", "B"), "cuda_ipc"),
        (ranks("A", "B"), ranks("B"), "cuda_ipc"),
        (ranks("A"), ranks("A", visible=("A",)), "cuda_ipc"),
        (ranks("A"), ranks("B", node="other"), "process_group"),
    ],
    ids=["one node", "two nodes", "other GPUs", "the same GPUs", "one in common", "isolated", "GPUs of two nodes"],
)
def test_the_first_usable_transport_is_chosen(
    sources: list[RankWeights], targets: list[RankWeights], expected: str
) -> None:
    assert choose_transport("auto", sources, targets) == expected


@pytest.mark.parametrize(
    ("name", "sources", "targets", "reason"),
    [
        ("process_group", ranks("A", "B"), ranks("B", "C"), "several ranks are on the GPU B: NCCL cannot connect them"),
        ("process_group", ranks("A"), ranks(CPU), "one group is on CPUs and the other on GPUs"),
        ("cuda_ipc", ranks("A"), ranks("A", node="other"), "the ranks are on 2 nodes; expected one"),
        ("cuda_ipc", ranks("A"), ranks(CPU), "there are weights on CPUs; expected GPUs"),
        ("cuda_ipc", ranks("A", "B"), ranks("A", "B", visible=("A",)), "rank 0 that receives cannot use GPU B"),
        ("shared_memory", ranks("A"), ranks("A"), "the weights are on GPUs"),
    ],
)
def test_a_transport_that_cannot_be_used_is_rejected_with_the_reason(
    name: str, sources: list[RankWeights], targets: list[RankWeights], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"transport is '{name}', but .*{reason}"):
        choose_transport(name, sources, targets)


def test_ranks_of_one_process_share_no_cuda_memory() -> None:
    (rank,) = ranks("A")
    with pytest.raises(ConfigError, match="ranks of the groups share a process"):
        choose_transport("cuda_ipc", [rank], [rank])


def test_without_a_usable_transport_all_reasons_are_named() -> None:
    with pytest.raises(ConfigError, match=r"process_group: several .* GPU A.*cuda_ipc: .*2 nodes"):
        choose_transport("auto", [*ranks("A"), *ranks("B", node="other")], [*ranks("A"), *ranks("B", node="other")])
