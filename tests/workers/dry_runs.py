"""Peaks of dry runs of roles beside those of real runs on the CPU; ``python -m tests.workers.dry_runs`` is the table.

Left out in both: storages below 16 KiB, such as rows, which are tensors of the host in one and of the device in the
other. A real run has the norm of a GPU, one kernel that saves its input and a number for each token.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from parallel_state.dry_run import counting
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.memory import Memory, Storage
from parallel_state.dry_run.outcome import Use
from parallel_state.dry_run.routing import Choose, routing_of
from parallel_state.dry_run.run import dry_run_of
from parallel_state.releases import language_models
from parallel_state.simulated import exchange, run_ranks
from workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from workers.config import CriticConfig, LoraConfig, ModelConfig, ParallelConfig, RewardConfig
from workers.dry_run import RoleCall
from workers.parity.cases import SMALL
from workers.parity.roles import actor_config, role_config
from workers.verify.roles import ModelRole, variant_of

PROMPT, RESPONSE = 24, 40
TINY_MODEL: dict[str, Any] = SMALL | {
    "vocab_size": 509,
    "max_sequence_length": 64,
    "num_layers": 2,
    "hidden_size": 128,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
}
WIDE = TINY_MODEL | {"hidden_size": 256, "ffn_hidden_size": 1024, "kv_channels": 64}
LOCAL: dict[str, Any] = WIDE | {"dtype": "bfloat16", "transformer_impl": "local"}
EXPERTS = LOCAL | {"num_moe_experts": 4, "moe_ffn_hidden_size": 512, "moe_router_topk": 2}
LORA = LOCAL | {"lora": LoraConfig(rank=4, alpha=8)}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,  # as keys have: torch has no kernel on a CPU for others
    "rope_type": "rope",
}
SEQUENCE: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
GENERATED = "generate_sequences"


class Case(NamedTuple):
    """A call of a role, ``actor``, ``critic`` or ``reward``, on a number of ranks."""

    kind: str
    method: str
    ranks: int
    changed: dict[str, Any]
    routing: str = "balanced"


def _with(**fields: Any) -> dict[str, Any]:
    return {"model": LOCAL | {"transformer": fields}}


UPDATE = ("actor", "update_actor")
CASES: dict[str, Case] = {
    "update": Case(*UPDATE, 1, {"model": LOCAL}),
    "distributed optimizer": Case(*UPDATE, 2, {"model": LOCAL, "optim": {"distributed_optimizer": True}}),
    "tp, pp, sp": Case(*UPDATE, 4, {"model": LOCAL, "parallel": SEQUENCE | {"pp": 2}}),
    "packed rows, tp, sp": Case(*UPDATE, 2, {"model": LOCAL, "packed": True, "parallel": SEQUENCE}),
    "cp": Case(*UPDATE, 2, {"model": LOCAL, "parallel": {"cp": 2}}),
    "vpp": Case(*UPDATE, 2, {"model": LOCAL | {"num_layers": 4}, "parallel": {"pp": 2, "vpp": 2}}),
    "full recomputation": Case(
        *UPDATE, 1, _with(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    ),
    "selective recomputation": Case(
        *UPDATE, 1, _with(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    ),
    "multi-latent attention": Case(*UPDATE, 1, {"model": LOCAL | {"num_query_groups": 4, "transformer": LATENT}}),
    "LoRA": Case(*UPDATE, 1, {"model": LORA}),
    "LoRA, tp, pp, sp": Case(*UPDATE, 4, {"model": LORA, "parallel": SEQUENCE | {"pp": 2}}),
    "experts, tp, ep": Case(*UPDATE, 4, {"model": EXPERTS, "parallel": SEQUENCE | {"ep": 2, "etp": 1}}),
    "experts, skewed routing": Case(*UPDATE, 2, {"model": EXPERTS, "parallel": {"ep": 2}}, "skewed"),
    "experts, router replay": Case(*UPDATE, 1, {"model": EXPERTS, "router_replay": "old_log_probs"}),
    "scores that record experts": Case(
        "actor", "compute_log_prob", 1, {"model": EXPERTS, "router_replay": "old_log_probs"}
    ),
    "scores": Case("actor", "compute_log_prob", 1, {"model": LOCAL}),
    "scores of the reference, pp": Case("actor", "compute_ref_log_prob", 2, {"model": LOCAL, "parallel": {"pp": 2}}),
    "critic, cp": Case("critic", "update_critic", 2, {"model": LOCAL, "parallel": {"cp": 2}}),
    "values": Case("critic", "compute_values", 1, {"model": LOCAL}),
    "reward model, tp": Case("reward", "compute_rm_score", 2, {"model": LOCAL, "parallel": {"tp": 2}}),
    "generation": Case("actor", GENERATED, 1, {"model": LOCAL}),
    "generation, tp, pp": Case("actor", GENERATED, 4, {"model": LOCAL, "parallel": SEQUENCE | {"pp": 2}}),
    "generation, multi-latent attention": Case(
        "actor", GENERATED, 1, {"model": LOCAL | {"num_query_groups": 4, "transformer": LATENT}}
    ),
    "generation that records experts": Case("actor", GENERATED, 1, {"model": EXPERTS, "router_replay": "rollout"}),
    "weights for an engine, tp, pp": Case(
        "actor", "rollout_weights", 4, {"model": EXPERTS, "parallel": SEQUENCE | {"pp": 2, "ep": 2, "etp": 1}}
    ),
}
if len(language_models()) > 1:
    hybrid: dict[str, Any] = {"model": LOCAL | {"hybrid_layer_pattern": "*-" * LOCAL["num_layers"]}}
    CASES["HybridModel, tp, sp"] = Case(*UPDATE, 2, hybrid | {"parallel": SEQUENCE})


def model_role(kind: str, ranks: int, **changed: Any) -> ModelRole:
    """Return an actor with its reference, a critic or a reward model on a number of ranks."""
    if kind == "reward":
        sections = {
            "model": ModelConfig(**changed.get("model", WIDE)),
            "parallel": ParallelConfig(**changed["parallel"]),
        }
        config: Any = RewardConfig(**sections, micro_batch_size=2)
    else:
        settings = {"model": WIDE, "ppo_mini_batch_size": 8, "ppo_micro_batch_size": 2, **changed}
        lengths = {"rollout": {"prompt_length": PROMPT, "response_length": RESPONSE}}
        config = actor_config(settings | lengths) if kind == "actor" else role_config(CriticConfig, settings)
    worker = {"actor": ActorRolloutRefWorker, "critic": CriticWorker, "reward": RewardModelWorker}[kind]
    variant = variant_of(config, config.parallel.layout(ranks))
    return ModelRole(worker, config, "actor_ref" if kind == "actor" else "", variant)


def compared(case: Case) -> list[tuple[Use, Use]]:
    """Return what each rank used in a real run and in a dry run."""
    role = model_role(case.kind, case.ranks, **case.changed)
    sizes: dict[str, Any] = {}
    if case.method == GENERATED:
        role, sizes = replace(role, roles="actor_rollout"), {"micro_batches": 1, "row_count": 16}
    call = RoleCall(role, case.method, PROMPT, RESPONSE, **sizes)

    def on_rank() -> Use:
        mode = CountingMode(Memory(), "cpu")
        with mode:
            return call(mode)

    with mock.patch.object(counting, "Storage", _Large):
        with _as_on_a_gpu(routing_of(case.routing)):
            real = run_ranks(role.variant.layout, on_rank, check_async=False)
        outcome = dry_run_of(call, role.variant, case.routing, every_rank=True)
    assert not outcome.failure, outcome.failure
    return list(zip(real, outcome.uses.values(), strict=True))


class _Large(Storage):
    def __init__(self, memory: Memory, size: int) -> None:
        super().__init__(memory, size if size >= 16384 else 0)


@contextlib.contextmanager
def _as_on_a_gpu(choose: Choose) -> Iterator[None]:
    from megatron.core.transformer.moe import moe_utils, router  # after workers, which prepares it

    compute, plain = exchange.compute, torch.nn.functional.rms_norm
    route = moe_utils.topk_routing_with_score_function

    def compute_uncounted(calls: Any) -> None:
        with _disable_current_modes():
            compute(calls)

    def norm(hidden: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
        return plain(hidden, shape, weight, eps) if weight is None else _Norm.apply(hidden, weight, eps)  # type: ignore[no-any-return,no-untyped-call]

    def routed(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        chosen = choose(*logits.shape, topk).to(logits.device)
        if kwargs.get("router_replay") is not None:  # its column has the same experts
            return route(logits + (1e3 * chosen).to(logits.dtype), topk, *args, **kwargs)
        return torch.softmax(logits, -1) * chosen, chosen

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(exchange, "compute", compute_uncounted))
        stack.enter_context(mock.patch.object(torch.nn.functional, "rms_norm", norm))
        for module in (moe_utils, router):
            stack.enter_context(mock.patch.object(module, route.__name__, routed))
        yield


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        output, inverse = torch.empty_like(hidden), torch.empty(*hidden.shape[:-1], 1)
        with _disable_current_modes():
            inverse.copy_(torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + eps))
            output.copy_(hidden * inverse * weight)
        ctx.save_for_backward(hidden, weight, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, inverse = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)
        with _disable_current_modes():
            normalized, scaled = hidden * inverse, gradients[0] * weight
            of_hidden.copy_(inverse * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)))
            of_weight.copy_((gradients[0] * normalized).flatten(0, -2).sum(0))
        return of_hidden, of_weight, None


def main(names: list[str]) -> None:
    """Print a row for each case: ranks, the peak of the rank that needs the most, and the largest difference."""
    sys.stdout.write("| call | ranks | real peak, MiB | dry run, largest difference |\n|---|--:|--:|--:|\n")
    for name in names or CASES:
        pairs = compared(CASES[name])
        peak = max(real.peak for real, _ in pairs)
        difference = max(abs(dry.peak / real.peak - 1) for real, dry in pairs)
        sys.stdout.write(f"| {name} | {CASES[name].ranks} | {peak / 2**20:.1f} | {difference:.3%} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
