"""Training adapters: layouts, what is left alone, generation and transfer with merged weights, and checkpoints."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.workers.roles import (
    GREEDY,
    MODEL,
    actor,
    critic,
    experience,
    largest_difference,
    own_shard,
    prompts,
    weights,
)
from workers.checkpoint.state import saved_shapes
from workers.checkpoint.unpickle import read_metadata
from workers.lora.adapters import adapters_of, without_adapters
from workers.lora.peft_files import adapter_tensors

pytestmark = pytest.mark.simulated

ROWS = 16
LORA = {"rank": 4, "alpha": 8.0}
EXPERTS = {
    "num_layers": 2,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "qk_layernorm": True,
    "transformer": {"moe_router_load_balancing_type": "none"},
}
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAP = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp2-distributed-optimizer": (2, {}, DISTRIBUTED, {}),
    "tp2-sp-dp2-overlap": (4, {"tp": 2, "sequence_parallel": True}, OVERLAP, {}),
    "pp2-vpp2-dp2-overlap": (4, {"pp": 2, "vpp": 2}, OVERLAP, {}),
    "tp2-pp2-experts": (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, DISTRIBUTED, EXPERTS),
    "tp2-etp2-ep2-experts": (4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, {}, EXPERTS),
}


def adapted(parallel: dict[str, Any], role: str = "actor_ref", optim: Any = (), model: Any = (), **changes: Any) -> Any:
    settings = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01, "warmup_steps": 2} | dict(optim)
    return actor(parallel, role, model=MODEL | {"lora": LORA} | dict(model), optim=settings, **changes)


def base_of(worker: Any) -> dict[str, Tensor]:
    with without_adapters(worker.model):
        return weights(worker)


def factors_of(worker: Any) -> dict[str, Tensor]:
    with worker.context.activate():
        return adapter_tensors(worker.model)


def trained(parallel: dict[str, Any], optim: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    worker = adapted(parallel, "actor", optim, model)
    before, start = base_of(worker), weights(worker)
    metrics = worker.update_actor(own_shard(experience(ROWS), worker)).meta_info["metrics"]
    return {"before": before, "start": start, "base": base_of(worker), "merged": weights(worker), "metrics": metrics}


@functools.cache
def in_one_process(experts: bool) -> dict[str, Any]:
    return run_ranks(trained, 1, {}, {}, EXPERTS if experts else {})[0]


@pytest.mark.parametrize("layout", ["tp2-sp-dp2-overlap", "pp2-vpp2-dp2-overlap", "tp2-pp2-experts"])
def test_layouts_train_the_adapter_of_one_process_and_nothing_else(layout: str) -> None:
    world_size, parallel, optim, model = LAYOUTS[layout]
    expected = in_one_process(bool(model))
    ranks = run_ranks(trained, world_size, parallel, optim, model)
    for result in (expected, ranks[0]):
        assert all(torch.equal(result["before"][name], result["start"][name]) for name in result["start"])  # B is 0
        assert all(torch.equal(result["before"][name], result["base"][name]) for name in result["base"])
    assert largest_difference(expected["merged"], expected["base"]) > 0.01
    assert largest_difference(expected["merged"], ranks[0]["merged"]) < 1e-5
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=1e-5, rel=1e-5)


def saved(parallel: dict[str, Any], optim: dict[str, Any], model: dict[str, Any], path: Path) -> dict[str, Any]:
    """Train two updates, and save the checkpoint between them."""
    worker = adapted(parallel, "actor", optim, model)
    shard = own_shard(experience(ROWS), worker)
    worker.update_actor(shard)
    directory = worker.save_checkpoint(str(path))
    worker.update_actor(shard)
    return {"directory": directory, "factors": factors_of(worker)}


def resumed(parallel: dict[str, Any], optim: dict[str, Any], model: dict[str, Any], path: Path) -> dict[str, Tensor]:
    worker = adapted(parallel, "actor", optim, model)
    worker.load_checkpoint(str(path))
    worker.update_actor(own_shard(experience(ROWS), worker))
    return factors_of(worker)


@pytest.mark.parametrize(
    ("source", "target", "same"),
    [
        ("dp2-distributed-optimizer", "dp2-distributed-optimizer", True),
        ("tp2-etp2-ep2-experts", "one", False),
    ],
)
def test_checkpoints_of_adapters_resume_and_move(source: str, target: str, same: bool, tmp_path: Path) -> None:
    world_size, parallel, optim, model = LAYOUTS[source]
    expected = run_ranks(saved, world_size, parallel, optim, model, tmp_path)[0]
    world_size, parallel, optim, _ = LAYOUTS[target] if target != "one" else (1, {}, {}, {})
    actual = run_ranks(resumed, world_size, parallel, optim, model, tmp_path)[0]
    assert largest_difference(expected["factors"], actual) <= (0.0 if same else 1e-5)
    shapes = saved_shapes(read_metadata(Path(expected["directory"])), ["model"], None)["model"]
    assert all(name.startswith("lora.") for name in shapes)
    assert sum(math.prod(shape) for shape in shapes.values()) == sum(tensor.numel() for tensor in actual.values())


def rejected(changes: dict[str, Any], path: Path) -> str:
    worker = adapted({}, "actor", model=changes) if changes else actor({}, "actor")
    with pytest.raises(DataError) as caught:
        worker.load_checkpoint(str(path))
    return str(caught.value)


def test_checkpoint_of_an_adapter_is_loaded_into_the_same_one_only(tmp_path: Path) -> None:
    run_ranks(saved, 1, {}, {}, {}, tmp_path)
    for changes, reason in (
        ({}, "has adapters, and this role needs the whole model"),
        ({"seed": 5}, "set model.hf_path to the same base"),
        ({"lora": LORA | {"alpha": 3.0}}, "multiplied by 2, and model.lora says 0.75"),
        ({"lora": LORA | {"exclude": ["q_proj"]}}, "q_proj"),
    ):
        assert reason in run_ranks(rejected, 1, changes, tmp_path)[0]


def generated(parallel: dict[str, Any]) -> dict[str, Any]:
    """Train, generate with the training layout and with merged weights in another, and score the responses."""
    sizes = {"prompt_length": 10, "response_length": 6, "seed": 3}
    worker = adapted(parallel, "actor_rollout_ref", rollout=sizes)
    worker.update_actor(own_shard(experience(ROWS), worker))
    base = base_of(worker)
    batch = worker.generate_sequences(own_shard(prompts(8, GREEDY), worker))
    scores = worker.compute_log_prob(batch).batch["old_log_probs"]
    reference = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
    after = base_of(worker)
    assert all(torch.equal(base[name], after[name]) for name in base)
    with without_adapters(worker.model):
        plain = worker.compute_log_prob(batch).batch["old_log_probs"]
    assert torch.equal(plain, reference) and "reference" not in worker.state.models
    with pytest.raises(ConfigError) as caught:
        worker.sync_reference()
    assert caught.value.key == "model.lora"
    mask = batch.batch["response_mask"]
    difference = (scores - batch.batch["rollout_log_probs"] * mask).abs().max()
    kl = float((scores - plain).abs().max())
    return {"responses": batch.batch["responses"], "difference": float(difference), "kl": kl}


def test_generation_uses_the_merged_policy() -> None:
    expected = run_ranks(generated, 1, {})[0]
    assert expected["kl"] > 0.01
    ranks = run_ranks(generated, 2, {"tp": 2})
    for rank in ranks:
        assert torch.equal(rank["responses"], expected["responses"])
        assert rank["difference"] < 1e-5


def of_critic(parallel: dict[str, Any]) -> dict[str, Any]:
    worker = critic(parallel, model=MODEL | {"lora": LORA | {"exclude": ["layers.0.*"], "use_rslora": True}})
    before = weights(worker)
    worker.update_critic(own_shard(experience(ROWS), worker))
    return {"before": before, "after": weights(worker)}


def test_critic_trains_its_value_head_and_adapters_that_are_not_excluded() -> None:
    expected, (rank, *_) = run_ranks(of_critic, 1, {})[0], run_ranks(of_critic, 2, {"pp": 2})
    assert largest_difference(expected["after"], rank["after"]) < 1e-5
    before, after = expected["before"], expected["after"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    adapted_layers = {f"decoder.layers.{layer}.{name}.weight" for layer in (1, 2, 3) for name in linears}
    assert changed == {"output_layer.weight"} | adapted_layers


DROPOUT = LORA | {"dropout": 0.2}


def dropped(parallel: dict[str, Any]) -> dict[str, Any]:
    """The inputs of experts after dropout, read from outputs of adapters whose A and B add them up."""
    worker = adapted(parallel, "actor", model=EXPERTS | {"lora": DROPOUT})
    sums: dict[str, list[list[float]]] = {"linear_fc1": [], "linear_fc2": []}
    with torch.no_grad(), worker.context.activate():
        for adapter in adapters_of(worker.model)[0]:
            if adapter.target.experts:
                adapter.train()
                for factor in adapter.parameters():
                    factor.fill_(1.0)
                width = adapter.a(0, adapter.numbers[0]).size(1)
                inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(3))
                output = adapter(inputs, [8] + [0] * (len(adapter.numbers) - 1))
                sums[adapter.target.name.rpartition(".")[2]].append(output[:, 0].tolist())
    pg = worker.context.pg
    return sums | {"ep": pg.ep.rank(), "etp": pg.expt_tp.rank()}


def test_experts_drop_an_input_that_etp_ranks_share_in_the_same_way() -> None:
    ranks = run_ranks(dropped, 4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True})
    by_place = {(rank["ep"], rank["etp"]): rank for rank in ranks}
    for ep in (0, 1):
        first, second = by_place[ep, 0], by_place[ep, 1]
        assert first["linear_fc1"] == second["linear_fc1"]
        assert first["linear_fc2"] != second["linear_fc2"]  # other channels of the input
    assert by_place[0, 0]["linear_fc1"] != by_place[1, 0]["linear_fc1"]  # other tokens
    assert ranks[0]["linear_fc1"][0] != ranks[0]["linear_fc1"][1]  # other layers
