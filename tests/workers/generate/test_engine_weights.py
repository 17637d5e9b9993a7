"""After one bfloat16 update at a learning rate of 1e-6, an engine with old or half-old weights is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.roles import actor, experience, own_shard
from workers.actor import ActorRolloutRefWorker
from workers.config import RolloutConfig
from workers.generate.engine_weights import EngineWeights
from workers.generate.rollout_protocol import Rollout
from workers.weights.fingerprints import Fingerprint, WeightsNotArrived, tensor_fingerprints
from workers.weights.whole_tensors import PolicyWeights

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_query_groups": 4},
    "tied": {"num_query_groups": 4, "tie_embeddings": True},
    "experts": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "transformer": {"moe_router_load_balancing_type": "none"},
    },
}
TINY_STEPS = {"lr": 1e-6, "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0}
Tensors = dict[str, torch.Tensor]
Fault = Callable[[Tensors, Tensors], None]  # gets the tensors that the engine holds, and the old ones


class FaultyCopies(Rollout):
    """An engine with whole tensors in float32 and Hugging Face names; it has a packed copy of the output layer."""

    holds_weights = True
    fault: Fault | None = None

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        old = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.tensors = {name: tensor.float() for name, tensor in weights}
        if "lm_head.weight" not in self.tensors:
            self.tensors["packed"] = self.tensors["model.embed_tokens.weight"].clone()
        if self.fault is not None:
            self.fault(self.tensors, old)
        return {}

    def fingerprints(self) -> Sequence[Fingerprint]:
        named = {"packed": "model.embed_tokens.weight"}
        tensors = ((named.get(name, name), tensor) for name, tensor in self.tensors.items())
        return tensor_fingerprints(tensors)

    def sleep(self) -> int:
        return 0

    def wake_up(self) -> None:
        pass


class FaultyEngineWorker(ActorRolloutRefWorker):
    def build_rollout(self) -> Any:
        return FaultyCopies()


def all_old(held: Tensors, old: Tensors) -> None:
    for name, tensor in held.items():
        tensor.copy_(old[name])


def half_of_the_tensors(held: Tensors, old: Tensors) -> None:
    for name in sorted(held)[::2]:
        held[name].copy_(old[name])


def half_of_the_rows(held: Tensors, old: Tensors) -> None:
    """Old rows in one tensor: the half with the changed rows of the tensor that has the most."""
    name = max(sorted(held), key=lambda name: int((held[name] != old[name]).sum()))
    half = len(held[name]) // 2
    for rows in (slice(0, half), slice(half, None)):
        if not torch.equal(held[name][rows], old[name][rows]):
            held[name][rows].copy_(old[name][rows])
            return


def last_expert(held: Tensors, old: Tensors) -> None:
    for name in held:
        if ".experts." in name and not torch.equal(held[name], old[name]):
            held[name].copy_(old[name])
            return


def packed_copy(held: Tensors, old: Tensors) -> None:
    held["packed"].copy_(old["packed"])


def exchanged_tensors(held: Tensors, old: Tensors) -> None:
    """Two tensors of one shape in each other's place, the same on all ranks."""
    some, other = (
        sorted(name for name in held if name.endswith(part))[0] for part in ("q_proj.weight", "o_proj.weight")
    )
    held[some], held[other] = held[other], held[some]


def outcomes(parallel: dict[str, Any], model: str, faults: Mapping[str, Fault]) -> dict[str, Any]:
    """Update the engine once for every fault after one tiny step of the policy; return the errors, and the changes."""
    worker = actor(
        parallel,
        "actor_rollout",
        FaultyEngineWorker,
        model=MODELS[model] | {"dtype": "bfloat16"},
        optim=TINY_STEPS,
        ppo_epochs=1,
        ppo_mini_batch_size=16,
        ppo_micro_batch_size=8,
        rollout={"verify_weights": "fingerprints"},
    )
    engine = worker.rollout
    worker.generator.current_rollout()
    before = {name: tensor.clone() for name, tensor in worker.rollout_weights()}
    worker.update_actor(own_shard(experience(16), worker))
    after = {name: tensor.clone() for name, tensor in worker.rollout_weights()}
    copies = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    errors: dict[str, Any] = {}
    for name, fault in faults.items():
        held = engine.tensors
        for each, tensor in copies.items():  # what the engine held before the update
            held[each].copy_(tensor)
        engine.fault = fault
        try:
            worker.generator.current_rollout()
        except WeightsNotArrived as error:
            errors[name] = error
    engine.fault = None
    metrics = worker.generator.current_rollout()[1]  # the engine gets the weights again after an error
    changed = {name: int((before[name] != after[name]).sum()) for name in before}
    return {
        "errors": errors,
        "metrics": metrics,
        "version": (worker.generator.version, worker.state.weights_version),
        "changed": changed,
        "share": sum(changed.values()) / sum(tensor.numel() for tensor in before.values()),
    }


ANY_MODEL: dict[str, Fault] = {"all": all_old, "half": half_of_the_tensors, "rows": half_of_the_rows}
COPIES: dict[str, dict[str, Fault]] = {
    "dense": ANY_MODEL | {"exchanged": exchanged_tensors},
    "tied": ANY_MODEL | {"packed": packed_copy},
    "experts": ANY_MODEL | {"expert": last_expert},
}


def check(found: Mapping[str, Any], faults: Mapping[str, Fault]) -> None:
    assert 0 < found["share"] < 0.02  # one step changes few elements, and of some tensors none
    assert 0 in found["changed"].values()
    assert found["errors"].keys() == faults.keys()
    assert found["version"][0] == found["version"][1]
    assert found["metrics"]["verify_seconds"] > 0
    for name, error in found["errors"].items():
        assert error.update == found["version"][1]
        assert error.tensors and not error.missing and not error.unknown
        if name not in ("exchanged", "rows"):  # a tensor with some old rows has neither the old value nor the new one
            assert error.old == sorted(error.tensors)


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("model", "parallel"),
    [("dense", {"tp": 2, "pp": 2}), ("tied", {"tp": 2, "pp": 2}), ("experts", {"ep": 2, "pp": 2})],
    ids=["dense", "tied", "experts"],
)
def test_engine_with_old_weights_is_reported_with_the_tensors_that_are_old(
    model: str, parallel: dict[str, Any]
) -> None:
    for found in run_ranks(outcomes, 4, parallel, model, COPIES[model]):
        check(found, COPIES[model])
        everything = {name for name, count in found["changed"].items() if count}
        errors = found["errors"]
        assert set(errors["all"].old) == everything
        assert 0 < len(errors["half"].old) < len(everything)
        assert len(errors["rows"].tensors) == 1
        if model == "tied":
            assert errors["packed"].old == ["model.embed_tokens.weight"]
            assert len(errors["packed"].tensors["model.embed_tokens.weight"][1]) == 2  # the tensor, and its copy
        if model == "experts":
            assert len(errors["expert"].old) == 1 and ".experts." in errors["expert"].old[0]


def correct_updates(updates: int) -> tuple[int, set[bool]]:
    """Return how many updates were accepted, some of which change no weight at all."""
    worker = actor(
        {"tp": 2},
        "actor_rollout",
        FaultyEngineWorker,
        model=MODELS["tied"] | {"dtype": "bfloat16"},
        optim=TINY_STEPS,
        ppo_epochs=1,
        ppo_mini_batch_size=16,
        ppo_micro_batch_size=8,
        rollout={"verify_weights": "fingerprints"},
    )
    assert worker.generator.current_rollout()[1]["verify_seconds"] > 0
    changes = set()
    for number in range(updates):
        before = {name: tensor.clone() for name, tensor in worker.rollout_weights()}
        if number % 2:
            worker.state.weights_version += 1  # an update that changes nothing
        else:
            worker.update_actor(own_shard(experience(16), worker))
        changes.add(all(torch.equal(before[name], tensor) for name, tensor in worker.rollout_weights()))
        worker.generator.current_rollout()
    return updates, changes


@pytest.mark.simulated
def test_correct_updates_are_accepted_also_if_they_change_nothing() -> None:
    for accepted, changes in run_ranks(correct_updates, 2, 6):
        assert accepted == 6 and changes == {True, False}


class Unreadable:
    holds_weights = True


class Shared(Unreadable):
    holds_weights = False


def test_engine_without_fingerprints_is_rejected_if_they_are_required(caplog: pytest.LogCaptureFixture) -> None:
    required = RolloutConfig(verify_weights="fingerprints")
    with pytest.raises(ConfigError) as caught:
        EngineWeights(required, Unreadable())  # type: ignore[arg-type]
    assert (caught.value.key, caught.value.value) == ("rollout.verify_weights", "fingerprints")
    EngineWeights(required, Shared())  # type: ignore[arg-type]
    assert not caplog.records
    EngineWeights(RolloutConfig(), Unreadable())  # type: ignore[arg-type]
    assert "not verified after an update" in caplog.text


def test_the_check_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(verify_weights="always")
    assert caught.value.key == "rollout.verify_weights"
    EngineWeights(RolloutConfig(verify_weights="never"), Unreadable())  # type: ignore[arg-type]
    assert "not verified" in caplog.text
