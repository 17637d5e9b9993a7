"""After a transfer, a rollout group of another layout generates what the actor would, bit for bit; adapters merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import CallRejected, ConfigError, DataError
from mcontroller.testing import simulated_worker_group
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, SAMPLED, experience, prompts
from tests.workers.weights.transfer.between import bytes_of
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.weights.transfer.weight_transfer import WeightTransfer

TIED = {"tie_embeddings": True}
ADAPTER = {"lora": {"rank": 4, "alpha": 8.0}}
EXPERTS = {"num_layers": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 32}


def group(role: str, ranks: int, parallel: dict[str, Any], model: dict[str, Any], **changes: Any) -> Any:
    defaults = {
        "model": MODEL | model,
        "parallel": parallel,
        "optim": OPTIM,
        "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3},
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size": 2,
        "ppo_epochs": 1,
    }
    config = load_config(ActorConfig, defaults, changes)
    made = simulated_worker_group(ActorRolloutRefWorker, ranks, config, role, name=role)
    made.init_model()
    return made


def generated(of: Any) -> DataProto:
    return of.generate_sequences(prompts(8, SAMPLED))


@pytest.mark.parametrize(
    ("model", "ranks", "from_axes", "to_ranks", "to_axes"),
    [
        ({}, 4, {"tp": 2, "pp": 2}, 2, {}),
        (TIED, 2, {"pp": 2}, 2, {"tp": 2}),
        (ADAPTER, 2, {"tp": 2}, 1, {}),
        (ADAPTER | EXPERTS | {"qk_layernorm": True}, 2, {"ep": 2}, 1, {}),
    ],
    ids=["tp2-pp2", "tied-pp2-tp2", "tp2-adapter", "ep2-adapter"],
)
def test_a_rollout_group_generates_what_the_actor_generates(
    model: dict[str, Any], ranks: int, from_axes: dict[str, Any], to_ranks: int, to_axes: dict[str, Any]
) -> None:
    """tp2 pads the vocabulary of 61."""
    actor = group("actor_rollout", ranks, from_axes, model)
    rollout = group("rollout", to_ranks, to_axes, model | {"seed": 7})
    before = [generated(workers).batch for workers in (rollout, actor)]
    actor.update_actor(experience(8))
    with WeightTransfer(actor, rollout) as transfer:
        report = transfer.run()
    after = [generated(workers).batch for workers in (rollout, actor)]
    assert report.bytes_sent == bytes_of(rollout) > 0
    assert torch.equal(after[0]["responses"], after[1]["responses"])
    assert (after[0]["rollout_log_probs"] - after[1]["rollout_log_probs"]).abs().max() < 1e-5
    for column in ("responses", "rollout_log_probs"):
        assert not torch.equal(before[0][column], before[1][column])
    assert [batch["policy_version"].tolist() for batch in (*before, *after)] == [[0] * 8] * 2 + [[1] * 8] * 2


def test_a_target_of_a_smaller_dtype_gets_converted_weights_in_half_the_bytes() -> None:
    actor, rollout = group("actor_rollout", 1, {}, {}), group("rollout", 1, {}, {"dtype": "bfloat16", "seed": 7})
    with WeightTransfer(actor, rollout, bucket_bytes=4096) as transfer:
        report = transfer.run()
    sent, arrived = ([p.data for p in workers.workers[0].model[0].parameters()] for workers in (actor, rollout))
    half = [one.to(other.dtype) for one, other in zip(sent, arrived, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(half, arrived, strict=True))
    assert report.bytes_sent == sum(tensor.nbytes for tensor in half)


def test_the_fingerprint_of_all_weights_is_the_same_in_every_layout() -> None:
    rollout, fingerprints = group("rollout", 1, {}, {"seed": 7}), set()
    for ranks, axes in ((1, {}), (2, {}), (4, {"tp": 2, "pp": 2})):
        with WeightTransfer(group("actor", ranks, axes, {}), rollout) as transfer:
            fingerprints.add(transfer.run().fingerprint)
    assert len(fingerprints) == 1


def test_weights_that_have_not_all_arrived_are_not_generated_with() -> None:
    actor, rollout = group("actor_rollout", 1, {}, {}), group("rollout", 1, {}, {"seed": 7})
    transfer = WeightTransfer(actor, rollout)
    rollout.receive_weights(transfer._id, 1.0)  # the actor does not send
    with pytest.raises(CallRejected):
        generated(rollout)
    with WeightTransfer(actor, rollout) as second:
        second.run()
    assert generated(rollout).batch["policy_version"].tolist() == [0] * 8


def test_groups_that_do_not_fit_are_rejected_before_anything_is_sent() -> None:
    actor, rollout = group("actor_rollout", 1, {}, {}), group("rollout", 1, {}, TIED)
    with pytest.raises(DataError):
        WeightTransfer(actor, rollout)
    for name in ("process_group", "process_groups"):  # in one process; a name that does not exist
        with pytest.raises(ConfigError) as caught:
            WeightTransfer(actor, actor, transport=name)
        assert (caught.value.key, caught.value.value) == ("transport", name)
