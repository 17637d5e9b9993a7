"""Offloaded parts leave the device and come back unchanged; methods bring back the parts that they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.roles import GREEDY, actor, critic, experience, own_shard, prompts, weights
from workers.weights.offload import Offload

ROOT = Path(__file__).parents[3]


def sizes(worker: Any) -> dict[str, int]:
    """Bytes of memory under the tensors of each part, each counted once."""
    bytes_of, counted = dict.fromkeys(worker.offloader.parts(), 0), set()
    for part, tensors in worker.offloader.parts().items():
        for storage in (tensor.untyped_storage() for tensor in tensors):
            bytes_of[part] += 0 if storage._cdata in counted else storage.nbytes()
            counted.add(storage._cdata)
    return bytes_of


def trained(parallel: dict[str, Any], optim: dict[str, Any], model: dict[str, Any], offloading: bool) -> dict[str, Any]:
    worker = actor(parallel, optim=optim, ppo_epochs=1, model=model)
    batch = own_shard(experience(8), worker)
    for _ in range(3):
        if offloading:
            worker.offload()
            assert set(sizes(worker).values()) == {0}
        metrics = worker.update_actor(batch).meta_info["metrics"]
    scores = worker.compute_ref_log_prob(batch)
    state = weights(worker) | {
        f"optimizer {i}": tensor for i, tensor in enumerate(worker.offloader.parts()["optimizer"])
    }
    return {"metrics": metrics, "state": state, "scores": None if scores is None else scores.batch["ref_log_prob"]}


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("parallel", "optim", "model"),
    [
        (
            {"pp": 2, "vpp": 2},
            {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
            {"dtype": "bfloat16"},
        ),
        ({"ep": 2}, {"distributed_optimizer": True}, {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}),
        ({"tp": 2}, {"distributed_optimizer": True}, {"lora": {"rank": 4, "alpha": 8.0}}),
    ],
    ids=["vpp-overlap-bf16", "experts", "adapters"],
)
def test_training_between_offloads_equals_training_without(
    parallel: dict[str, Any], optim: dict[str, Any], model: dict[str, Any]
) -> None:
    kept = run_ranks(trained, 4, parallel, optim, model, False)
    moved = run_ranks(trained, 4, parallel, optim, model, True)
    for one, other in zip(kept, moved, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["state"].keys() == other["state"].keys() and len(one["state"]) > 30
        assert all(torch.equal(one["state"][name], other["state"][name]) for name in one["state"])
        assert (one["scores"] is None) == (other["scores"] is None)
        assert one["scores"] is None or torch.equal(one["scores"], other["scores"])


def parts_by_method() -> dict[str, tuple[str, ...]]:
    policy, value = actor({}), critic({})
    batch = experience(8)
    calls = {
        "generate_sequences": (policy, prompts(4, GREEDY)),
        "compute_log_prob": (policy, batch),
        "compute_ref_log_prob": (policy, batch),
        "update_actor": (policy, batch),
        "compute_values": (value, batch),
        "update_critic": (value, batch),
    }
    parts_of = {}
    for method, (worker, argument) in calls.items():
        worker.offload()
        getattr(worker, method)(argument)
        parts_of[method] = tuple(part for part, size in sizes(worker).items() if size)
    return parts_of


@pytest.mark.simulated
def test_a_method_brings_back_what_it_needs_and_no_more() -> None:
    assert run_ranks(parts_by_method, 1)[0] == {
        "generate_sequences": ("params",),
        "compute_log_prob": ("params",),
        "compute_ref_log_prob": ("reference",),
        "update_actor": ("params", "grads", "optimizer"),
        "compute_values": ("params",),
        "update_critic": ("params", "grads", "optimizer"),
    }


def parts_for_checkpoints(path: str) -> dict[str, tuple[str, ...]]:
    """Parts on the device after each call, of an actor."""
    worker = actor({}, ppo_epochs=1)
    worker.update_actor(experience(8))
    before = weights(worker)
    parts_of = {}
    for method, argument in {"save_checkpoint": path, "load_checkpoint": path, "export_hf": f"{path}/hf"}.items():
        worker.offload()
        getattr(worker, method)(argument)
        parts_of[method] = tuple(
            part for part in worker.offloader.parts() if part not in worker.offloader.offloaded.parts
        )
    worker.reload()
    assert all(torch.equal(value, before[name]) for name, value in weights(worker).items())
    return parts_of


@pytest.mark.simulated
def test_checkpoints_and_exports_do_not_bring_back_gradients(tmp_path: Path) -> None:
    assert run_ranks(parts_for_checkpoints, 1, str(tmp_path)) == [
        {
            "save_checkpoint": ("params", "reference", "optimizer"),
            "load_checkpoint": ("params", "reference", "optimizer"),
            "export_hf": ("params",),
        }
    ]


def freed_by_part() -> tuple[dict[str, int], dict[str, int], int, list[int]]:
    worker = actor({}, ppo_epochs=1)
    worker.update_actor(experience(8))
    held = sizes(worker)
    freed = {part: worker.offload([part]) for part in held}
    again = worker.offload()
    worker.reload(["params"])
    left = list(sizes(worker).values())
    return held, freed, again, left


@pytest.mark.simulated
def test_offload_returns_the_bytes_that_it_frees() -> None:
    held, freed, again, left = run_ranks(freed_by_part, 1)[0]
    assert held == freed and min(held.values()) > 0
    assert again == 0
    assert left == [held["params"], 0, 0, 0]


def saved_while_away(path: str) -> bool:
    worker = actor({}, "actor")
    before = weights(worker)
    worker.offload()
    worker.save_checkpoint(path)
    worker.update_actor(experience(8))
    worker.offload()
    worker.load_checkpoint(path)
    after = weights(worker)
    return all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.simulated
def test_an_offloaded_role_can_be_saved_and_loaded(tmp_path: Any) -> None:
    assert run_ranks(saved_while_away, 1, str(tmp_path)) == [True]


def test_views_see_the_memory_come_back() -> None:
    buffer = torch.arange(6.0)
    view, expected = buffer[2:4].view(1, 2), buffer.clone()
    offload = Offload()
    assert offload.offload({"a": [buffer, view]}, ["a"]) == 24
    assert buffer.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    offload.reload()
    assert torch.equal(buffer, expected) and torch.equal(view, expected[2:4].view(1, 2))
    buffer += 1
    assert torch.equal(view, buffer[2:4].view(1, 2))


FREES_64_MIB = """
import torch
from workers.weights.offload import Offload

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

held = torch.ones(64 << 20, dtype=torch.uint8)
before, offload = resident(), Offload()
offload.offload({"grads": [held]}, ["grads"], discard=["grads"])
freed = before - resident()
offload.reload()
print(freed, tuple(held.shape), bool(held.any()))
"""


@pytest.mark.processes
def test_the_process_returns_the_memory() -> None:
    """Run in a new interpreter, whose allocator keeps nothing else; discarded parts come back as zeros."""
    child = subprocess.run([sys.executable, "-c", FREES_64_MIB], capture_output=True, text=True, check=True, cwd=ROOT)
    freed, rest = child.stdout.split(maxsplit=1)
    assert int(freed) > 60 << 20
    assert rest.strip() == f"({64 << 20},) False"


def test_memory_that_two_parts_share_belongs_to_the_first() -> None:
    weight = torch.ones(4)
    parts = {"params": [weight], "optimizer": [weight, torch.ones(2)]}
    offload = Offload()
    assert offload.offload(parts, ["optimizer"]) == 8
    assert offload.parts == ("optimizer",) and weight.untyped_storage().nbytes() == 16


def test_a_part_unknown_to_a_role_is_rejected_before_anything_moves() -> None:
    weight, offload = torch.ones(4), Offload()
    with pytest.raises(ConfigError) as caught:
        offload.offload({"params": [weight]}, ["params", "grads"])
    assert (caught.value.key, caught.value.value) == ("parts", ("grads",))
    assert weight.untyped_storage().nbytes() == 16 and offload.parts == ()
