"""Whole tensors are scheduled once, and sent in buckets, from the ranks with a part to the ranks that want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from parallel_state.simulated import CommunicationTrace, run_ranks
from tests.workers.roles import actor
from workers.weights import whole_tensors
from workers.weights.hf.model import hf_whole_tensors
from workers.weights.moves import Move
from workers.weights.shards import SliceReader
from workers.weights.whole_tensors import tensor_in

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 32,
        "transformer": {"moe_router_load_balancing_type": "none"},
    },
}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"tp": 2, "pp": 2}),
    ("experts", {"ep": 2, "pp": 2}),
    ("experts", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
]


def streamed(model: str, parallel: dict[str, Any], bucket_bytes: int, times: int) -> list[dict[str, torch.Tensor]]:
    worker = actor(parallel, "actor", model=MODELS[model])
    stream = hf_whole_tensors(worker.model, worker.context, bucket_bytes)
    with worker.call_context("rollout_weights"):
        streams = []
        for number in range(times):
            streams.append({name: tensor.clone() for name, tensor in stream})
            with torch.no_grad():
                unwrap_model(worker.model[0]).decoder.layers[0].self_attention.linear_proj.weight.add_(number + 1.0)
    return streams


@pytest.mark.parametrize(("model", "parallel"), LAYOUTS, ids=["tp2-pp2", "ep2-pp2", "tp2-ep2-etp1"])
def test_buckets_of_any_size_have_the_tensors_of_one_process(model: str, parallel: dict[str, Any]) -> None:
    [[expected]] = run_ranks(1, streamed, model, {}, 1 << 20, 1)
    for bucket_bytes in (700, 1 << 20):
        for [actual] in run_ranks(4, streamed, model, parallel, bucket_bytes, 1):
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_tensors_come_from_the_replica_of_the_same_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 have the whole model, and are on one node; ranks 2 and 3 have it too, on another."""
    pairs: set[tuple[int, int]] = set()
    exchanged = whole_tensors.exchanged

    def recorded(bucket: Sequence[Move], sources: SliceReader) -> list[tuple[Move, torch.Tensor]]:
        pairs.update((move.source_rank, move.target_rank) for move in bucket)
        return exchanged(bucket, sources)

    monkeypatch.setattr(whole_tensors, "node_id", lambda: f"node{dist.get_rank() // 2}")
    monkeypatch.setattr(whole_tensors, "exchanged", recorded)
    run_ranks(4, streamed, "dense", {"tp": 2}, 1 << 20, 1)
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}


def on_one_rank(model: str, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors in memory of this rank's own, if it is rank 1; no other rank receives them."""
    worker = actor(parallel, "actor", model=MODELS[model])
    stream = hf_whole_tensors(worker.model, worker.context, 1 << 20)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    with worker.call_context("rollout_weights"):
        for bucket in stream.buckets(lambda _: memory, receivers=(1,)):
            tensors |= {place[0]: tensor_in(memory, place).clone() for place in bucket}
    return tensors


@pytest.mark.parametrize(("model", "parallel"), LAYOUTS, ids=["tp2-pp2", "ep2-pp2", "tp2-ep2-etp1"])
def test_a_rank_gets_what_it_lacks_in_one_exchange_and_others_get_nothing(model: str, parallel: dict[str, Any]) -> None:
    [[expected]] = run_ranks(1, streamed, model, {}, 1 << 20, 1)
    trace = CommunicationTrace()
    none, actual, *others = run_ranks(4, on_one_rank, model, parallel, trace=trace)
    assert not none and not any(others)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    exchanges = trace.select(rank=1, line="weights/whole_tensors.py")
    assert len(exchanges) == 1  # a bucket of 1 MiB has the whole model


def test_the_plan_is_exchanged_once_and_weights_are_always_current() -> None:
    once, three = CommunicationTrace(), CommunicationTrace()
    [first, *_] = run_ranks(4, streamed, "dense", {"tp": 2, "pp": 2}, 1 << 20, 1, trace=once)
    [later, *_] = run_ranks(4, streamed, "dense", {"tp": 2, "pp": 2}, 1 << 20, 3, trace=three)
    changed = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(later[1][changed], first[0][changed] + 1.0)
    assert torch.equal(later[2][changed], later[1][changed] + 2.0)
    gathered = [
        sum(call.nbytes for call in trace.select(operation="all_gather", rank=0, line="agreement.py"))
        for trace in (once, three)
    ]
    assert (
        gathered[0] > 1500 and gathered[1] - gathered[0] < 100
    )  # the schedule, and two rounds of "nothing has changed"
