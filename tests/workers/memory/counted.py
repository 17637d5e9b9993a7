"""Bytes that the calls of each role take on a device, next to their estimates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from mcontroller.data.batch import DataProto
from tests.forking import run_ranks
from tests.workers.roles import MODEL, SAMPLED, actor, be_a_worker, callable_directly, critic, own_shard
from workers import ModelConfig, OptimConfig, ParallelConfig, RewardConfig, RewardModelWorker
from workers.config import load_config
from workers.memory.estimate import Batch, Memory, PlannedRole

PROMPT, RESPONSE, ROWS, MICRO, VOCABULARY = 96, 32, 16, 4, 1000
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
WHOLE = {"distributed_optimizer": False}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 256}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Layout = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Fields of ParallelConfig, ModelConfig and OptimConfig."""


def sequences(rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (rows, PROMPT + RESPONSE), generator=generator)
    ones = torch.ones(rows, RESPONSE)
    noise = torch.randn(rows, RESPONSE, generator=generator)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, PROMPT:]}
    extra = {"response_mask": ones.long(), "old_log_probs": -7 * ones, "advantages": noise, "values": noise}
    return DataProto.from_dict(columns | extra | {"returns": noise.clone()})


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
    unfused = {"bias_dropout_fusion": False}  # compiled on a GPU, but not on the fake CUDA device
    if model.get("transformer_impl") != "transformer_engine":
        unfused["bias_activation_fusion"] = False
    model = SIZES | model | {"transformer": unfused | model.get("transformer", {})}

    def reward() -> Any:
        be_a_worker()
        config = load_config(RewardConfig, {"model": MODEL | model, "parallel": parallel, "micro_batch_size": MICRO})
        worker = callable_directly(RewardModelWorker(config))
        worker.init_model()
        return worker

    def policy(role: str) -> Any:
        return actor(_axes_of(role, parallel), role, model=model, rollout=lengths, **sizes)

    batch, prompts = sequences(ROWS), questions(ROWS)
    roles: dict[str, tuple[Callable[[], Any], tuple[tuple[str, DataProto], ...]]] = {
        "actor": (lambda: policy("actor"), (("update_actor", batch), ("compute_log_prob", batch))),
        "reference": (lambda: policy("ref"), (("compute_ref_log_prob", batch),)),
        "rollout": (lambda: policy("rollout"), (("generate_sequences", prompts),)),
        "critic": (
            lambda: critic(parallel, model=model, **sizes),
            (("update_critic", batch), ("compute_values", batch)),
        ),
        "reward": (reward, (("compute_rm_score", batch),)),
    }
    peaks_of: dict[str, tuple[int, int]] = {}
    pp_rank = 0
    for build, calls in roles.values():
        worker = build()
        pp_rank = worker.context.pg.pp.rank()
        if calls[0][0].startswith("update"):  # the first step creates the optimizer's state
            getattr(worker, calls[0][0])(own_shard(calls[0][1], worker))
        for method, argument in calls:
            peaks_of[method] = _measured(getattr(worker, method), own_shard(argument, worker))
        worker.offload()
        del worker
        gc.collect()
    return pp_rank, peaks_of


def _axes_of(role: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Generation runs without context parallelism."""
    return {axis: size for axis, size in parallel.items() if axis != "cp"} if role == "rollout" else parallel


def estimates(
    parallel: dict[str, Any], model: dict[str, Any], optim: dict[str, Any], pp_rank: int
) -> dict[str, Memory]:
    config, axes = load_config(ModelConfig, MODEL | SIZES | model), ParallelConfig(**parallel)
    trained = load_config(OptimConfig, optim)
    fused = config.transformer_impl == "transformer_engine"
    dp = axes.layout(2).dp
    batch = Batch(MICRO, PROMPT + RESPONSE, RESPONSE, count=ROWS // MICRO // dp, chunk_tokens=4096)
    policy, value = (
        PlannedRole(config, axes, 2, trained, value_head=head, fused=fused, compiled=False) for head in (False, True)
    )
    generating = ParallelConfig(**_axes_of("rollout", parallel))
    rollout = PlannedRole(config, generating, 2, fused=fused, compiled=False)
    frozen, reward = (
        PlannedRole(config, axes, 2, value_head=head, fused=fused, compiled=False) for head in (False, True)
    )
    return {
        "update_actor": policy.train(pp_rank, batch),
        "compute_log_prob": policy.score(pp_rank, batch),
        "compute_ref_log_prob": frozen.score(pp_rank, batch),
        "generate_sequences": rollout.generate(pp_rank, ROWS // rollout.layout.dp, PROMPT, RESPONSE),
        "update_critic": value.train(pp_rank, batch),
        "compute_values": value.score(pp_rank, batch),
        "compute_rm_score": reward.score(pp_rank, batch),
    }


def ratios(layout: Layout) -> dict[tuple[int, str], float]:
    """Return estimated / counted bytes of every call on every stage, of two ranks, and print both."""
    ratios_of = {}
    by_stage: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for pp_rank, counted in run_ranks(peaks, 2, *layout):
        for method, both in counted.items():
            by_stage.setdefault(pp_rank, {}).setdefault(method, []).append(both)
    for pp_rank, of_ranks in by_stage.items():
        for method, memory in estimates(*layout, pp_rank).items():
            before, most = max(of_ranks[method], key=lambda both: both[1])
            estimated, moving = memory.total - memory.nccl, memory.activations + memory.logits + memory.cache
            ratios_of[pp_rank, method] = estimated / most
            if method.startswith("update"):
                ratios_of[pp_rank, f"activations of {method}"] = moving / (most - before)
            print(  # noqa: T201
                f"stage {pp_rank} {method}: estimated {estimated:,}, counted {most:,} bytes; "
                f"without weights and optimizer {moving:,}, {most - before:,}"
            )
    return ratios_of


def far_off(layout: Layout) -> dict[tuple[int, str], float]:
    """Return the ratios that are more than a tenth from 1."""
    return {call: ratio for call, ratio in ratios(layout).items() if not 0.9 <= ratio <= 1.1}
