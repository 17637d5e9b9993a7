"""Parts b and c, at the size of a real model: memory and speed, FP8, offload and reload, save and load."""

from __future__ import annotations

from typing import Any

import torch

from workers.actor import ActorRolloutRefWorker
from workers.dry_run import RoleCall
from workers.gpucheck.scale import GB, LAYERS, Session, fastest, timed
from workers.memory.planned import estimated
from workers.memory.without_gpus import without_gpus
from workers.parity.computed import mean_difference, scores
from workers.parity.roles import call, policy
from workers.verify.roles import ModelRole

_LEFT_GB = 0.5
"""Workspaces of libraries that an offload leaves: 0.24 GB were measured on an H100, with FP8."""


def memory(session: Session) -> None:
    """Compare the peak of an update with the estimate of ``python -m mcontroller check``."""
    scale, config = session.scale, session.scale.config()
    role = ModelRole.of(ActorRolloutRefWorker, config, "actor", 1)
    estimate = without_gpus(estimated)(RoleCall(role, "update_actor", scale.prompt, scale.response)).peak
    limits = {"deviation": 0.03 if LAYERS[-1] == "transformer_engine" else 0.1}
    with policy(config) as worker, session.report.row("update", limits) as figures:
        figures |= _update(worker, session)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures |= {"peak_gb": peak / GB, "reserved_gb": reserved / GB, "estimate_gb": estimate / GB}
        figures["deviation"] = abs(peak / estimate - 1)


def _update(worker: Any, session: Session) -> dict[str, float]:
    """Update once, which makes the optimizer's state, and return the speed of a later update."""
    batch = session.scale.batch()
    call(worker, "update_actor", batch)
    torch.cuda.reset_peak_memory_stats()
    seconds, updated = fastest(call, worker, "update_actor", batch)
    tokens_per_s = batch.tensors()["input_ids"].numel() / seconds
    # No utilization is known for a GPU whose peak is not.
    mfu = {name: value for name, value in updated.meta_info["metrics"].items() if name == "actor/mfu"}
    return {"seconds": seconds, "tokens_per_s": tokens_per_s, **mfu}


def precisions(session: Session) -> None:
    """Compare scores and updates in FP8 with bfloat16, and offload and reload what was trained."""
    report, batch, expected = session.report, session.scale.batch(), dict[str, torch.Tensor]()
    recipes = ("tensorwise", "delayed", "blockwise") if LAYERS[-1] == "transformer_engine" else ()
    for recipe in ("bfloat16", *recipes):
        fields = {} if recipe == "bfloat16" else {"fp8": "hybrid", "fp8_recipe": recipe}
        with policy(session.scale.config(transformer=fields)) as worker:
            with report.row(f"update in {recipe}", {"mean before": 0.2, "mean after": 0.2}) as figures:
                results = {"before": scores(worker, batch)}
                figures |= _update(worker, session)
                results["after"] = scores(worker, batch)
                expected = expected or results
                figures |= {f"mean {when}": mean_difference(results[when], expected[when]) for when in results}
            _offload(session, f"offload and reload in {recipe}", worker)  # allocates the memory of the host
            if recipe == "bfloat16":
                _offload(session, "offload and reload again", worker)
                with report.row("scores after reload", {"difference": 0.0}) as figures:
                    figures["difference"] = float((scores(worker, batch) - results["after"]).abs().max())
    if not recipes:
        report.skip("FP8", "Transformer Engine is not installed")


def _offload(session: Session, name: str, worker: Any) -> None:
    """Offload, which must free what it reports, and reload, which must not need more than before."""
    torch.cuda.empty_cache()
    held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    away, freed = timed(call, worker, "offload")
    left, driver = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
    back, _ = timed(call, worker, "reload")
    # Blocks of the allocator have 2 MB at least.
    limits = {"left_gb": _LEFT_GB, "kept_by_driver_gb": 0.05 * freed / GB + 0.0625, "grown_gb": 0.001}
    with session.report.row(name, limits) as figures:
        figures |= {"offload_s": away, "reload_s": back, "freed_gb": freed / GB, "left_gb": left / GB}
        figures["kept_by_driver_gb"] = (freed - driver) / GB
        figures["grown_gb"] = (torch.cuda.memory_allocated() - held) / GB


def saves(session: Session) -> None:
    """Save and load a trained model, and compare the step after both."""
    batch, path = session.scale.batch(), str(session.folder / "saves")
    with policy(session.scale.config()) as worker, session.report.row("step after a load", {"mean": 2e-2}) as figures:
        call(worker, "update_actor", batch)
        figures["save_s"], _ = timed(call, worker, "save_checkpoint", path, 1)
        call(worker, "update_actor", batch)
        expected = scores(worker, batch)
        figures["load_s"], _ = timed(call, worker, "load_checkpoint", path)
        call(worker, "update_actor", batch)
        figures["mean"] = mean_difference(scores(worker, batch), expected)
