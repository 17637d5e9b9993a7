"""Engines whose log-probabilities do not follow one bfloat16 update at a learning rate of 1e-6 are reported."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.workers.generate.test_arrival import (
    MODELS,
    TINY_STEPS,
    Fault,
    FaultyEngineWorker,
    Tensors,
    all_old,
)
from tests.workers.roles import actor, experience, own_shard
from workers.actor import ActorRolloutRefWorker
from workers.generate.rollout_protocol import Generated, PolicyWeights, Prompts
from workers.generate.sampling import Sampling
from workers.weights.hf.config import hf_config_of
from workers.weights.not_arrived import CanariesNotFollowed

pytestmark = pytest.mark.simulated

transformers = pytest.importorskip("transformers")


class CachingEngine:
    """A model of transformers with a prefix cache: it computes keys and values of a prompt once per update."""

    holds_weights = True
    fault: Fault | None = None
    keeps_cache = False

    def __init__(self, worker: ActorRolloutRefWorker) -> None:
        config = transformers.AutoConfig.for_model(**hf_config_of(worker.config.model))
        dtype = getattr(torch, worker.config.model.dtype)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.output = self.model.get_output_embeddings().weight  # a packed copy if the policy has none of its own
        if config.tie_word_embeddings:
            self.output = self.output.detach().clone()
        self.cache: dict[tuple[int, ...], Any] = {}

    def held(self) -> Tensors:
        return {name: each.data for name, each in self.model.named_parameters()} | {"packed": self.output.data}

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        held = self.held()
        old = {name: tensor.clone() for name, tensor in held.items()}
        for name, tensor in weights:
            held[name].copy_(tensor)
            if name == "model.embed_tokens.weight" and self.model.config.tie_word_embeddings:
                self.output.copy_(tensor)
        if self.fault is not None:
            self.fault(held, old)
        if not self.keeps_cache:
            self.cache.clear()
        return {}

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated:
        samples = prompts.samples()
        key = tuple(samples.ids[:, :-1].flatten().tolist())
        if key not in self.cache:
            self.cache[key] = self.model.model(samples.ids[:, :-1], use_cache=True).past_key_values
        past, tokens = copy.deepcopy(self.cache[key]), samples.ids[:, -1:]
        generators = [torch.Generator().manual_seed(int(seed)) for seed in samples.seeds.flatten()]
        chosen, scores = [], []
        for _ in range(sampling.response_length):
            hidden = self.model.model(tokens, past_key_values=past, use_cache=True).last_hidden_state
            log_probs = (hidden[:, -1] @ self.output.T).float().log_softmax(-1)
            noise = torch.stack([torch.rand(log_probs.size(1), generator=each) for each in generators])
            tokens = (log_probs - (-noise.log()).log()).argmax(-1, keepdim=True)
            chosen.append(tokens)
            scores.append(log_probs.gather(1, tokens))
        responses = torch.cat(chosen, 1)
        return Generated(responses, torch.ones_like(responses), torch.cat(scores, 1))


class CachingWorker(ActorRolloutRefWorker):
    def build_rollout(self) -> Any:
        return CachingEngine(self)


def packed_output(held: Tensors, old: Tensors) -> None:
    held["packed"].copy_(old["packed"])


def half_of_the_changed(held: Tensors, old: Tensors) -> None:
    names = [name for name in sorted(held) if not torch.equal(held[name], old[name])]
    for name in names[::2]:
        held[name].copy_(old[name])


def two_experts_of_every_layer(held: Tensors, old: Tensors) -> None:
    for name in held:
        if ".experts." in name and name.endswith(("0", "1")):
            held[name].copy_(old[name])


def updated(worker: Any) -> Mapping[str, float]:
    with worker.call_context("generate_sequences"):
        metrics: Mapping[str, float] = worker.generator.current_rollout()[1]
    return metrics


def outcomes(
    worker_class: type[ActorRolloutRefWorker],
    parallel: dict[str, Any],
    model: str,
    dtype: str,
    faults: Mapping[str, Fault | str],
    updates: int = 2,
) -> dict[str, Any]:
    """Update a correct engine after tiny steps of the policy, and once for every fault after the last one."""
    worker = actor(
        parallel,
        "actor_rollout",
        worker_class,
        model=MODELS[model] | {"dtype": dtype},
        optim=TINY_STEPS,
        ppo_epochs=1,
        ppo_mini_batch_size=16,
        ppo_micro_batch_size=8,
        log_prob_micro_batch_size=64,
        rollout={
            "parallel": {} if worker_class is FaultyEngineWorker else None,
            "verify_weights": "canaries",
        },
    )
    engine = worker.rollout
    metrics = [updated(worker)]
    for _ in range(updates):
        worker.update_actor(own_shard(experience(16), worker))
        metrics.append(updated(worker))
    held = {name: tensor.clone() for name, tensor in engine.held().items()}
    worker.update_actor(own_shard(experience(16), worker))
    errors: dict[str, Any] = {}
    for name, fault in faults.items():
        for each, tensor in engine.held().items():  # what the engine held before the update
            tensor.copy_(held[each])
        if isinstance(engine, CachingEngine):
            engine.cache.clear()
            engine.keeps_cache = fault == "cache"
        engine.fault = None if isinstance(fault, str) else fault
        try:
            errors[name] = updated(worker)
            worker.generator.version -= 1
        except CanariesNotFollowed as error:
            errors[name] = error
    engine.fault, engine.keeps_cache = None, False
    if isinstance(engine, CachingEngine):
        engine.cache.clear()
    metrics.append(updated(worker))
    return {"errors": errors, "metrics": metrics, "update": worker.state.weights_version}


EVERY_ENGINE: dict[str, Fault | str] = {"old": all_old, "half": half_of_the_changed}
CASES: list[tuple[type[ActorRolloutRefWorker], dict[str, Any], str, dict[str, Fault | str]]] = [
    (CachingWorker, {"tp": 2}, "dense", {"cache": "cache"}),
    (CachingWorker, {"pp": 2}, "tied", {"cache": "cache", "packed": packed_output}),
    (FaultyEngineWorker, {"ep": 2}, "experts", {"experts": two_experts_of_every_layer}),
]


@pytest.mark.parametrize(("engine", "parallel", "model", "more"), CASES, ids=["dense", "tied", "experts"])
def test_engine_that_does_not_follow_an_update_is_reported_with_its_share(
    engine: type[ActorRolloutRefWorker], parallel: dict[str, Any], model: str, more: dict[str, Fault | str]
) -> None:
    faults = EVERY_ENGINE | more
    for found in run_ranks(outcomes, 2, engine, parallel, model, "float32", faults, 1):
        first, *later = found["metrics"]
        assert first["canary_judged"] == 0.0  # there was no change yet
        assert [each["canary_judged"] for each in later] == [1.0] * 2
        assert all(abs(each["canary_lost"]) < 1e-3 for each in later)
        for name, error in found["errors"].items():
            assert isinstance(error, CanariesNotFollowed), name
            assert error.update == found["update"] and error.prompts and error.shards
            share = {"old": (1, 1), "half": (0.1, 0.9), "cache": (0.1, 0.9)}.get(name, (0.001, 0.9))
            assert share[0] <= error.lost <= share[1], (name, error)


@pytest.mark.parametrize(("engine", "parallel", "model", "_"), CASES, ids=["dense", "tied", "experts"])
def test_bfloat16_engine_is_reported_with_old_weights_and_not_with_new_ones(
    engine: type[ActorRolloutRefWorker], parallel: dict[str, Any], model: str, _: object
) -> None:
    """One update changes log-probabilities less than rounding does: half of it may be undecided, and is reported so."""
    for found in run_ranks(outcomes, 1, engine, {}, model, "bfloat16", EVERY_ENGINE, 2):
        assert isinstance(found["errors"]["old"], CanariesNotFollowed)
        half = found["errors"]["half"]
        assert isinstance(half, CanariesNotFollowed) or half["canary_judged"] == 0.0
