"""A NaN that first arises in the backward pass is attributed to its rank and parameter, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.roles import MODEL, actor, experience, own_shard
from workers.train.nonfinite import NonFiniteGradient

EXPERTS = MODEL | {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}


class NanInBackward(torch.autograd.Function):
    """The identity, whose gradient is NaN in its first value."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient


def named(worker: Any, ending: str) -> tuple[str, torch.nn.Module] | None:
    """Return the name and module of the last chunk that has one with this ending; None if this rank has none."""
    modules = [
        (name.removeprefix("module."), module) for chunk in worker.model for name, module in chunk.named_modules()
    ]
    return next(((name, module) for name, module in reversed(modules) if name.endswith(ending)), None)


def updated(parallel: dict[str, Any], rank: int, ending: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Update with a module of ``rank`` whose output has a gradient of NaN; return the error and that module's name."""
    worker = actor(parallel, "actor", ppo_epochs=1, **changes)
    planted = ""
    if torch.distributed.get_rank() == rank:
        name, module = named(worker, ending) or ("", None)
        assert module is not None
        planted = name

        def spoil(module: Any, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return NanInBackward.apply(output[0]), *output[1:]
            return NanInBackward.apply(output)

        module.register_forward_hook(spoil)
    before = [parameter.detach().clone() for chunk in worker.model for parameter in chunk.parameters()]
    try:
        worker.update_actor(own_shard(experience(16), worker))
    except NonFiniteGradient as error:
        after = [parameter for chunk in worker.model for parameter in chunk.parameters()]
        same = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        return {"planted": planted, "text": str(error), "fields": error.fields, "same": same}
    raise AssertionError("no error")


def check(ranks: list[dict[str, Any]], rank: int) -> None:
    name = ranks[rank]["planted"]
    for result in ranks:
        assert result["fields"]["origin"] == rank, result["text"]
        assert result["fields"]["parameters"][rank].startswith(name), (name, result["text"])
        assert f"the gradient of {name}." in result["text"] and f"on rank {rank} (tp=" in result["text"]
        assert result["fields"]["ranks"] == []  # all losses are finite
        assert result["same"]


LAYOUTS: dict[str, tuple[int, dict[str, Any], int, str, dict[str, Any]]] = {
    "dp, distributed optimizer": (2, {}, 1, "mlp.linear_fc2", {"optim": {"distributed_optimizer": True}}),
    "dp, reduction that overlaps": (
        4,
        {"tp": 2},
        3,
        "self_attention.linear_qkv",
        {"optim": {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}},
    ),
    "tp with sp": (4, {"tp": 2, "sequence_parallel": True}, 2, "mlp.linear_fc1", {}),
    "pp, last stage": (4, {"pp": 2}, 3, "mlp.linear_fc2", {}),
    "interleaved pp": (2, {"pp": 2, "vpp": 2}, 0, "mlp.linear_fc1", {}),
    "cp": (4, {"cp": 2}, 1, "self_attention.linear_qkv", {}),
    "ep": (4, {"ep": 2}, 2, "mlp.experts.linear_fc1", {"model": EXPERTS}),
    "tp x pp x dp, packed": (8, {"tp": 2, "pp": 2}, 5, "mlp.linear_fc1", {"packed": True}),
}


@pytest.mark.simulated
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_of_the_backward_pass_is_attributed_to_its_rank_and_parameter(layout: str) -> None:
    size, parallel, rank, ending, changes = LAYOUTS[layout]
    check(run_ranks(updated, size, parallel, rank, ending, changes), rank)
