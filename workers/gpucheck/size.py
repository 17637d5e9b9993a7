"""Parts b and c, at the size of a real model: memory of an update, FP8, offload and reload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from workers.actor import ActorRolloutRefWorker
from workers.dry_run import RoleCall
from workers.gpucheck.rows import Run
from workers.gpucheck.scale import GB, LAYERS, batch_of, timed
from workers.memory.planned import estimated
from workers.memory.without_gpus import without_gpus
from workers.parity.computed import difference, mean_difference, scores
from workers.parity.roles import call, policy
from workers.verify.roles import ModelRole

PRECISIONS = ["bfloat16", *(["tensorwise", "delayed", "blockwise"] if LAYERS[-1] == "transformer_engine" else [])]
"""bfloat16, and the recipes of FP8 that Transformer Engine has."""
_LEFT_GB = 0.5
"""Workspaces of libraries that an offload leaves: 0.24 GB were measured on an H100, with FP8."""
_ROUNDS = 3
"""Updates, then offloads with a reload: the first allocates the memory of the host, and leaks grow with each."""


def memory(run: Run) -> None:
    """Compare the peak of an update with the estimate of ``python -m mcontroller check``."""
    actor, rollout = run.actor, run.actor.rollout
    role = ModelRole.of(ActorRolloutRefWorker, actor, "actor", 1)
    update = RoleCall(role, "update_actor", rollout.prompt_length, rollout.response_length)
    limits = {"deviation": 0.03 if LAYERS[-1] == "transformer_engine" else 0.1}
    with run.row("update", limits) as figures, policy(actor) as worker:
        estimate = without_gpus(estimated)(update).peak
        call(worker, "update_actor", batch_of(actor))  # makes the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        figures["seconds"], updated = timed(call, worker, "update_actor", batch_of(actor))
        # No utilization is known for a GPU whose peak is not.
        figures |= {name: value for name, value in updated.meta_info["metrics"].items() if name == "actor/mfu"}
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures |= {"peak_gb": peak / GB, "reserved_gb": reserved / GB, "estimate_gb": estimate / GB}
        figures["deviation"] = abs(peak / estimate - 1)


def precision(run: Run, recipe: str) -> None:
    """Compare scores and updates with those in bfloat16, and offload and reload what was trained.

    Args:
        run: the run.
        recipe: of FP8, or ``bfloat16``.
    """
    batch, results = batch_of(run.actor), run.scores.setdefault(recipe, {})
    expected = run.scores.get("bfloat16", {})
    fields = {} if recipe == "bfloat16" else {"fp8": "hybrid", "fp8_recipe": recipe}
    actor = replace(run.actor, model=replace(run.actor.model, transformer=fields))
    limits = {"mean before": 0.2, "mean after": 0.2} if fields else {"changed by reload": 0.0}
    with run.row(f"update in {recipe}", limits) as figures, policy(actor) as worker:
        results["before"] = scores(worker, batch)
        for _ in range(_ROUNDS):
            call(worker, "update_actor", batch)
        results["after"] = scores(worker, batch)
        figures |= {f"mean {when}": mean_difference(results[when], expected[when]) for when in results}
        for number in range(_ROUNDS):
            _offload(run, f"offload and reload {number + 1} in {recipe}", worker)
        figures["changed by reload"] = difference(scores(worker, batch), results["after"])


def _offload(run: Run, name: str, worker: Any) -> None:
    """Offload, which must free what it reports, and reload, which must not need more than before."""
    torch.cuda.empty_cache()
    held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    away, freed = timed(call, worker, "offload")
    left, driver = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
    back, _ = timed(call, worker, "reload")
    # Blocks of the allocator have 2 MB at least.
    limits = {"left_gb": _LEFT_GB, "kept_by_driver_gb": 0.05 * freed / GB + 0.0625, "grown_gb": 0.001}
    with run.row(name, limits) as figures:
        figures |= {"offload_s": away, "reload_s": back, "freed_gb": freed / GB, "left_gb": left / GB}
        figures["kept_by_driver_gb"] = (freed - driver) / GB
        figures["grown_gb"] = (torch.cuda.memory_allocated() - held) / GB
