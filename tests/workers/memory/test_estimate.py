"""Estimated memory: parameters are those of real models, and bytes those that the pretended device counts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcontroller.data.protocol import DataProto
from mcontroller.errors import ConfigError
from tests.forking import run_ranks
from tests.workers.roles import MODEL, SAMPLED, actor, be_a_worker, callable_directly, critic, own_shard
from workers import ModelConfig, OptimConfig, ParallelConfig, RewardConfig, RewardModelWorker
from workers.config import load_config
from workers.memory.estimate import Batch, Memory, PlannedRole
from workers.memory.parameters import Parameters, count_parameters

PROMPT, RESPONSE, ROWS, MICRO, VOCABULARY = 64, 64, 16, 4, 1000
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 384,
    "vocab_size": VOCABULARY,
    "max_sequence_length": PROMPT + RESPONSE,
    "num_layers": 4,
}
BF16 = {"dtype": "bfloat16"}
SHARDED = {"distributed_optimizer": True}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 256}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp 2, sequence parallel, bfloat16": ({"tp": 2, "sequence_parallel": True}, BF16, {}),
    "pp 2, float32": ({"pp": 2}, {}, {}),
    "dp 2, sharded optimizer, bfloat16, recomputed": ({}, BF16 | {"transformer": RECOMPUTED}, SHARDED),
    "ep 2, sharded optimizer, bfloat16": ({"ep": 2}, BF16 | EXPERTS, SHARDED),
}

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "dense": ({"tp": 2}, {}, False),
    "stages": ({"pp": 2, "vpp": 2}, {"tie_embeddings": True}, False),
    "tied": ({}, {"tie_embeddings": True}, False),
    "biases": ({"tp": 2}, {"add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False}, False),
    "learned positions": ({"pp": 2}, {"position_embedding_type": "learned_absolute", "add_qkv_bias": True}, False),
    "head norms, value head": ({"pp": 2}, {"qk_layernorm": True, "tie_embeddings": True}, True),
    "experts": ({"ep": 2, "tp": 2, "sequence_parallel": True}, EXPERTS, False),
    "some layers with experts": (
        {"ep": 2, "pp": 2},
        EXPERTS | {"transformer": {"moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 96}},
        True,
    ),
}


def built(parallel: dict[str, Any], model: dict[str, Any], value_head: bool) -> tuple[int, Parameters]:
    worker = (critic if value_head else actor)(parallel, **({} if value_head else {"role": "rollout"}), model=model)
    counted = {True: 0, False: 0}
    for chunk in worker.model:
        for parameter in chunk.parameters():
            counted[getattr(parameter, "allreduce", True)] += parameter.numel()
    return worker.context.pg.pp.rank(), Parameters(counted[True], counted[False])


@pytest.mark.parametrize(("parallel", "model", "value_head"), SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_exactly(parallel: dict[str, Any], model: dict[str, Any], value_head: bool) -> None:
    config, axes = load_config(ModelConfig, MODEL | model), ParallelConfig(**parallel)
    for pp_rank, real in run_ranks(built, 4, parallel, model, value_head):
        estimated = count_parameters(config, axes, pp_rank, value_head=value_head)
        if "ep" not in parallel:  # then Megatron replicates experts as it does all parameters
            estimated = Parameters(estimated.dense + estimated.expert)
        assert estimated == real


def sequences(rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (rows, PROMPT + RESPONSE), generator=generator)
    ones = torch.ones(rows, RESPONSE)
    noise = torch.randn(rows, RESPONSE, generator=generator)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, PROMPT:]}
    further = {"response_mask": ones.long(), "old_log_probs": -7 * ones, "advantages": noise, "values": noise}
    return DataProto.from_dict(columns | further | {"returns": noise.clone()})


def questions(rows: int) -> DataProto:
    ids = sequences(rows).batch["input_ids"][:, :PROMPT]
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return DataProto.from_dict(columns, meta_info=SAMPLED | {"do_sample": False})


def _measured(call: Callable[[DataProto], Any], batch: DataProto) -> tuple[int, int]:
    """Return the bytes before the call and the most during it."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(batch)
    return before, torch.cuda.max_memory_allocated()


def peaks(
    parallel: dict[str, Any], model: dict[str, Any], optim: dict[str, Any]
) -> tuple[int, dict[str, tuple[int, int]]]:
    """The bytes before each call and the most during it, each of a role that is alone on the device."""
    sizes = {"ppo_micro_batch_size": MICRO, "ppo_mini_batch_size": ROWS, "ppo_epochs": 1, "optim": optim}
    lengths = {"prompt_length": PROMPT, "response_length": RESPONSE}
    unfused = {"bias_activation_fusion": False, "bias_dropout_fusion": False}  # which run uncompiled here
    model = SIZES | model | {"transformer": unfused | model.get("transformer", {})}

    def reward() -> Any:
        be_a_worker()
        config = load_config(RewardConfig, {"model": MODEL | model, "parallel": parallel, "micro_batch_size": MICRO})
        worker = callable_directly(RewardModelWorker(config))
        worker.init_model()
        return worker

    def policy(role: str) -> Any:
        return actor(parallel, role, model=model, rollout=lengths, **sizes)

    batch, asked = sequences(ROWS), questions(ROWS)
    roles: dict[str, tuple[Callable[[], Any], tuple[tuple[str, DataProto], ...]]] = {
        "actor": (lambda: policy("actor"), (("update_actor", batch), ("compute_log_prob", batch))),
        "reference": (lambda: policy("ref"), (("compute_ref_log_prob", batch),)),
        "rollout": (lambda: policy("rollout"), (("generate_sequences", asked),)),
        "critic": (
            lambda: critic(parallel, model=model, **sizes),
            (("update_critic", batch), ("compute_values", batch)),
        ),
        "reward": (reward, (("compute_rm_score", batch),)),
    }
    found: dict[str, tuple[int, int]] = {}
    pp_rank = 0
    for build, calls in roles.values():
        worker = build()
        pp_rank = worker.context.pg.pp.rank()
        for method, argument in calls:
            getattr(worker, method)(own_shard(argument, worker))  # the first step creates the optimizer's state
        for method, argument in calls:
            times = 1 if method.startswith("update") else 2  # an update changes where tokens go among experts
            measured = [_measured(getattr(worker, method), own_shard(argument, worker)) for _ in range(times)]
            found[method] = min(measured, key=lambda both: both[1])  # tensors that Python freed late are in one only
        worker.offload()
        del worker
        gc.collect()
    return pp_rank, found


def estimates(
    parallel: dict[str, Any], model: dict[str, Any], optim: dict[str, Any], pp_rank: int
) -> dict[str, Memory]:
    config, axes = load_config(ModelConfig, MODEL | SIZES | model), ParallelConfig(**parallel)
    trained = load_config(OptimConfig, optim)
    dp = axes.layout(2).dp
    batch = Batch(MICRO, PROMPT + RESPONSE, RESPONSE, count=ROWS // MICRO // dp, chunk_tokens=4096)
    policy, value = (PlannedRole(config, axes, 2, trained, value_head=head) for head in (False, True))
    frozen, reward = (PlannedRole(config, axes, 2, value_head=head) for head in (False, True))
    return {
        "update_actor": policy.train(pp_rank, batch),
        "compute_log_prob": policy.score(pp_rank, batch),
        "compute_ref_log_prob": frozen.score(pp_rank, batch),
        "generate_sequences": frozen.generate(pp_rank, ROWS // dp, PROMPT, RESPONSE),
        "update_critic": value.train(pp_rank, batch),
        "compute_values": value.score(pp_rank, batch),
        "compute_rm_score": reward.score(pp_rank, batch),
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bytes are counted on a pretended device, or on a GPU")
@pytest.mark.parametrize(("parallel", "model", "optim"), LAYOUTS.values(), ids=LAYOUTS)
def test_estimates_are_within_a_tenth_of_the_counted_bytes(
    parallel: dict[str, Any], model: dict[str, Any], optim: dict[str, Any]
) -> None:
    ratios = {}
    by_stage: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for pp_rank, counted in run_ranks(peaks, 2, parallel, model, optim):
        for method, both in counted.items():
            by_stage.setdefault(pp_rank, {}).setdefault(method, []).append(both)
    for pp_rank, of_ranks in by_stage.items():
        for method, memory in estimates(parallel, model, optim, pp_rank).items():
            # The ranks of a stage hold the same tensors; what one of them freed late is not in the least peak.
            before, most = min(of_ranks[method], key=lambda both: both[1])
            estimated, moving = memory.total - memory.nccl, memory.activations + memory.logits + memory.cache
            ratios[pp_rank, method] = estimated / most
            if method.startswith("update"):
                ratios[pp_rank, f"activations of {method}"] = moving / (most - before)
            print(  # noqa: T201
                f"stage {pp_rank} {method}: estimated {estimated:,}, counted {most:,} bytes; "
                f"without weights and optimizer {moving:,}, {most - before:,}"
            )
    assert {call: ratio for call, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == {}


def test_an_optimizer_whose_state_is_not_known_is_rejected_by_its_field() -> None:
    model = load_config(ModelConfig, MODEL)
    with pytest.raises(ConfigError, match=r"model\.transformer\.attention_output_gate=True: its parameters are not"):
        PlannedRole(
            load_config(ModelConfig, MODEL | {"transformer": {"attention_output_gate": True}}), ParallelConfig(), 1
        )
    assert PlannedRole(model, ParallelConfig(), 1).idle(0).gradients == 0
