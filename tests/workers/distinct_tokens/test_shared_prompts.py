"""Passes that compute a prompt once have the results of passes that compute it for every response."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mcontroller.data.batch import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import MODEL, PROMPT, actor, critic, experience, largest_difference, own_shard, weights
from workers.actor import ActorRolloutRefWorker

pytestmark = pytest.mark.simulated

TOLERANCE = 1e-5
ROWS, SAMPLES = 16, 4
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2-sp-dp2": (4, {"tp": 2, "sequence_parallel": True}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
}
MODELS: dict[str, dict[str, Any]] = {
    "rope, tied": {"tie_embeddings": True},
    "learned positions, biases": {"position_embedding_type": "learned_absolute", "add_bias_linear": True},
    "head norms, all recomputed": {"qk_layernorm": True, "transformer": RECOMPUTED},
    "attention recomputed": {
        "transformer": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    },
}


def groups() -> DataProto:
    """Samples for equal prompts, of which a micro-batch of 6 rows cuts some; one row has no target."""
    batch = experience(ROWS)
    for name in ("input_ids", "attention_mask"):
        column = batch.batch[name]
        column[:, :PROMPT] = column[::SAMPLES, :PROMPT].repeat_interleave(SAMPLES, 0)
    batch.batch["response_mask"][5] = 0
    return batch


class Counting(ActorRolloutRefWorker):
    """Counts the tokens of all passes."""

    tokens = 0

    def init_model(self) -> None:
        super().init_model()
        for module in self.model[0].modules():
            if type(module).__name__.endswith("LanguageModelEmbedding"):
                module.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module: Any, args: Any, kwargs: Any) -> None:
        self.tokens += kwargs["input_ids"].numel()


def computed(parallel: dict[str, Any], model: dict[str, Any], share_prompts: bool, **changes: Any) -> dict[str, Any]:
    """Scores, and weights and metrics after updates, of actor and critic."""
    sizes = {"ppo_micro_batch_size": 6, "ppo_mini_batch_size": ROWS, "share_prompts": share_prompts} | changes
    policy = actor(parallel, "actor_ref", Counting, model=MODEL | model, **sizes)
    value = critic(parallel, model=MODEL | model | {"tie_embeddings": False}, **sizes)
    mine = own_shard(groups(), policy)
    scores = [policy.compute_log_prob(mine), policy.compute_ref_log_prob(mine), value.compute_values(mine)]
    metrics = policy.update_actor(mine).meta_info["metrics"] | value.update_critic(mine).meta_info["metrics"]
    names = ("old_log_probs", "ref_log_prob", "values")
    return {
        "dp": policy.context.pg.dp.rank(),
        "scores": {name: batch.batch[name] for name, batch in zip(names, scores, strict=True) if batch is not None},
        "metrics": {name: metric for name, metric in metrics.items() if "mfu" not in name and "flops" not in name},
        "weights": {f"actor.{name}": tensor for name, tensor in weights(policy).items()}
        | {f"critic.{name}": tensor for name, tensor in weights(value).items()},
        "tokens": policy.tokens,
    }


@functools.cache
def of_whole_rows(model: str) -> dict[str, Any]:
    return run_ranks(computed, 1, {}, MODELS[model], False)[0]


@pytest.mark.parametrize(
    ("layout", "model"),
    [("one process", model) for model in MODELS]
    + [("tp2-sp-dp2", "rope, tied"), ("pp2-vpp2", "head norms, all recomputed")],
)
def test_shared_prompts_have_the_results_of_whole_rows(layout: str, model: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    expected = of_whole_rows(model)
    ranks = run_ranks(computed, world_size, parallel, MODELS[model], True)
    shards = 1 + max(rank["dp"] for rank in ranks)
    for rank in ranks:
        assert largest_difference(expected["weights"], rank["weights"]) < TOLERANCE
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE, rel=TOLERANCE)
        whole = {name: expected["scores"][name].chunk(shards)[rank["dp"]] for name in rank["scores"]}
        assert not whole or largest_difference(whole, rank["scores"]) < TOLERANCE
    assert any(rank["scores"] for rank in ranks)
    if world_size == 1:
        assert ranks[0]["tokens"] < 0.75 * expected["tokens"]


class Overriding(Counting):
    """Its forward pass is not known to take distinct tokens."""

    def forward_step(self, model: Any, rows: Any) -> Any:
        return super().forward_step(model, rows)


def tokens_of_a_pass(worker_class: type[Counting], model: dict[str, Any], share_prompts: bool = True) -> int:
    sizes = {"ppo_micro_batch_size": ROWS, "share_prompts": share_prompts}
    worker = actor({}, "actor", worker_class, model=MODEL | model, **sizes)
    worker.compute_log_prob(groups())
    return worker.tokens


@pytest.mark.parametrize(
    ("model", "share_prompts"),
    [({}, False), ({"num_moe_experts": 4, "moe_ffn_hidden_size": 32}, True), ({"hidden_dropout": 0.1}, True)],
    ids=["switched off", "experts", "dropout"],
)
def test_all_rows_are_computed_whole_where_it_would_not_be_the_same(model: dict[str, Any], share_prompts: bool) -> None:
    width = int(groups().batch["attention_mask"].sum(1).max())
    assert run_ranks(tokens_of_a_pass, 1, Counting, model, share_prompts) == [ROWS * width]
    assert run_ranks(tokens_of_a_pass, 1, Counting, {})[0] < 0.75 * ROWS * width


def test_a_worker_with_a_forward_pass_of_its_own_gets_whole_rows() -> None:
    width = int(groups().batch["attention_mask"].sum(1).max())
    assert run_ranks(tokens_of_a_pass, 1, Overriding, {}) == [ROWS * width]
