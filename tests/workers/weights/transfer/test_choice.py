"""The transport that is chosen for ranks on nodes, in processes and on GPUs; never NCCL between ranks of one GPU."""

from __future__ import annotations

import pytest

from mcontroller.errors import ConfigError
from workers.weights.transfer.endpoint import choose_transport
from workers.weights.transfer.plan import RankWeights

_pids = iter(range(1000, 10_000))
GPUS = ("A", "B", "C", "D")


def ranks(*devices: str, node: str = "node", visible: tuple[str, ...] = GPUS) -> list[RankWeights]:
    """One rank in a separate process for each device."""
    return [RankWeights((), node, next(_pids), device, visible=visible) for device in devices]


CPU = "cpu"


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        (ranks(CPU, CPU), ranks(CPU), "process_group"),
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


def test_nccl_connects_processes_of_two_hosts_on_one_gpu() -> None:
    source, target = ([rank._replace(nccl_host=host) for rank in ranks("A")] for host in ("one", "two"))
    assert choose_transport("process_group", source, target) == "process_group"


@pytest.mark.parametrize(
    ("name", "sources", "targets"),
    [
        ("process_group", ranks("A", "B"), ranks("B", "C")),
        ("process_group", ranks("A"), ranks(CPU)),
        ("cuda_ipc", ranks("A"), ranks("A", node="other")),
        ("cuda_ipc", ranks("A"), ranks(CPU)),
        ("cuda_ipc", ranks("A", "B"), ranks("A", "B", visible=("A",))),
        ("in_process", ranks(CPU), ranks(CPU)),
        ("cuda_ipc", *[ranks("A")] * 2),
        ("process_group", *[ranks(CPU)] * 2),
    ],
    ids=["shared GPU", "mixed", "nodes", "CPUs", "isolated", "processes", "one process on a GPU", "one process"],
)
def test_a_transport_that_cannot_be_used_is_rejected(
    name: str, sources: list[RankWeights], targets: list[RankWeights]
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_transport(name, sources, targets)
    assert (caught.value.key, caught.value.value) == ("transport", name)


def test_without_a_usable_transport_all_reasons_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_transport("auto", [*ranks("A"), *ranks("B", node="other")], [*ranks("A"), *ranks("B", node="other")])
    assert list(caught.value.reasons) == ["in_process", "process_group", "cuda_ipc"]
    assert all(caught.value.reasons.values())
