"""The operations of training depend on the model, and not on how it is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import MODEL, actor, experience, own_shard
from workers.model import utilization
from workers.model.utilization import training_flops

pytestmark = pytest.mark.simulated

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_router_topk": 2}
LENGTHS = torch.tensor([9, 5, 16, 2, 7, 7, 12, 6])


def flops(parallel: dict[str, Any], model: dict[str, Any]) -> tuple[float, int]:
    worker = actor(parallel, "actor", model=MODEL | model)
    group = worker.context.pg.dp
    parameters = [parameter.numel() for parameter in worker.model[0].parameters()]
    return training_flops(worker.model, LENGTHS.chunk(group.size())[group.rank()], worker.context.pg), sum(parameters)


def test_operations_are_6_for_each_token_and_parameter_and_those_of_attention() -> None:
    [(operations, parameters)] = run_ranks(flops, 1, {}, {})
    layers, width = MODEL["num_layers"], MODEL["hidden_size"]
    embedding = MODEL["vocab_size"] * width
    squares = int((LENGTHS**2).sum())
    assert operations == 6 * ((parameters - embedding) * int(LENGTHS.sum()) + layers * width * squares)


@pytest.mark.parametrize("parallel", [{"tp": 2, "pp": 2}, {"cp": 2}, {"ep": 2, "pp": 2}], ids=str)
def test_ranks_share_the_operations_of_one_process(parallel: dict[str, Any]) -> None:
    model = EXPERTS if "ep" in parallel else {}
    [(expected, _)] = run_ranks(flops, 1, {}, model)
    total = sum(operations for operations, _ in run_ranks(flops, 4, parallel, model))
    assert total == pytest.approx(expected, rel=0.02)  # norms are on every tp rank


def reported(peak: float | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    worker = actor({}, "actor")
    gpu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "a GPU")
    monkeypatch.setattr(utilization, "torch", SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(utilization, "peak_tflops", lambda name: peak)
    return worker.update_actor(own_shard(experience(8), worker)).meta_info["metrics"]


def test_updates_report_their_share_of_the_peak_on_a_gpu_whose_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    [known], [unknown] = (run_ranks(reported, 1, peak, monkeypatch) for peak in (1e-6, None))
    assert known["actor/mfu"] > 0 and "actor/mfu" not in unknown


def test_a_tied_output_projection_counts_also_where_the_input_embedding_is_on_the_same_stage() -> None:
    tied = {"tie_embeddings": True}
    [(expected, _)] = run_ranks(flops, 1, {}, {})
    [(one, _)] = run_ranks(flops, 1, {}, tied)
    assert one == expected
    assert sum(value for value, _ in run_ranks(flops, 2, {"pp": 2}, tied)) == pytest.approx(expected, rel=0.02)
