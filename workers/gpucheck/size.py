"""Parts b and c, at the size of a real model: memory and speed, FP8, offload and reload, save and load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mcontroller import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.dry_run import RoleCall
from workers.gpucheck.equality import LAYERS
from workers.gpucheck.plain_loop import MicroBatch, plain_step
from workers.gpucheck.rows import Figure, Row
from workers.gpucheck.scale import GB, Session, fastest, timed
from workers.memory.planned import estimated
from workers.memory.without_gpus import without_gpus
from workers.parity.computed import mean_difference, scores
from workers.parity.roles import call, policy
from workers.verify.roles import ModelRole

_LEFT_GB = 0.5
"""Workspaces of libraries that an offload leaves: 0.24 GB were measured on an H100, with FP8."""
_FP8_RECIPES = ("tensorwise", "delayed", "blockwise") if LAYERS[-1] == "transformer_engine" else ()


def memory(session: Session) -> Iterator[Row]:
    """Compare an update with the estimate of ``python -m mcontroller check``, and with a loop of Megatron alone."""
    scale, config = session.scale, session.scale.config(LAYERS[-1])
    role = ModelRole.of(ActorRolloutRefWorker, config, "actor", 1)
    estimate = without_gpus(estimated)(RoleCall(role, "update_actor", scale.prompt, scale.response)).peak
    batch = scale.batch()
    with policy(config) as worker:
        seconds, updated = _update(worker, batch)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        with worker.call_context("update_actor"):
            step = worker.model[0], worker.state.optimizer, _packed(batch, scale.packed, worker.device)
            plain_step(*step)
            plain, _ = fastest(plain_step, *step)
    figures = {"estimate_gb": estimate / GB, "peak_gb": peak / GB, "reserved_gb": reserved / GB}
    limits = {"deviation": 0.03 if LAYERS[-1] == "transformer_engine" else 0.1}
    yield Row("peak of an update", {**figures, "deviation": abs(peak / estimate - 1)}, limits)
    speed = {"seconds": seconds, "plain_s": plain, "of_plain": seconds / plain}
    tokens_per_s = batch.tensors()["input_ids"].numel() / seconds
    yield Row("speed of an update", {**speed, "tokens_per_s": tokens_per_s, **_mfu(updated)})


def _update(worker: Any, batch: DataProto) -> tuple[float, DataProto]:
    """Update once, which makes the optimizer's state, and return the seconds and the result of a later update."""
    call(worker, "update_actor", batch)
    torch.cuda.reset_peak_memory_stats()
    return fastest(call, worker, "update_actor", batch)


def _mfu(updated: DataProto) -> dict[str, Figure]:
    metrics = updated.meta_info["metrics"]
    return {"mfu": metrics["actor/mfu"]} if "actor/mfu" in metrics else {}


def _packed(batch: DataProto, count: int, device: torch.device) -> Sequence[MicroBatch]:
    """Return micro-batches of ``count`` rows in one sequence; all rows of the batch have all their tokens."""
    ids, mask = (batch.tensors()[name].to(device) for name in ("input_ids", "response_mask"))
    length, response = ids.size(1), mask.size(1)
    counted = torch.zeros_like(ids)
    counted[:, -response - 1 : -1] = mask
    positions = torch.arange(length, device=device).expand_as(ids)
    columns = {"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1), "loss_mask": counted}
    bounds = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    sequences = PackedSeqParams("thd", bounds, bounds, None, None, length, length)
    return [
        {name: column[first : first + count].reshape(1, -1) for name, column in columns.items()}
        | {"packed_seq_params": sequences}
        for first in range(0, len(ids), count)
    ]


def precisions(session: Session) -> Iterator[Row]:
    """Compare scores and updates in FP8 with bfloat16, and offload and reload what was trained."""
    batch, expected = session.scale.batch(), dict[str, torch.Tensor]()
    for recipe in ("bfloat16", *_FP8_RECIPES):
        fields = {} if recipe == "bfloat16" else {"fp8": "hybrid", "fp8_recipe": recipe}
        with policy(session.scale.config(LAYERS[-1], transformer=fields)) as worker:
            results = {"before": scores(worker, batch)}
            seconds, updated = _update(worker, batch)
            results["after"] = scores(worker, batch)
            expected = expected or results
            means = {f"mean {when}": mean_difference(value, expected[when]) for when, value in results.items()}
            limits = dict.fromkeys(means, 0.2)
            yield Row(f"update in {recipe}", {"seconds": seconds, **_mfu(updated), **means}, limits)
            yield _offloaded(f"offload and reload in {recipe}", worker)  # allocates the memory of the host
            if recipe == "bfloat16":
                yield _offloaded("offload and reload again", worker)
                changed = float((scores(worker, batch) - results["after"]).abs().max())
                yield Row("scores after reload", {"difference": changed}, {"difference": 0.0})
    if not _FP8_RECIPES:
        yield Row("FP8", {"error": "Transformer Engine is not installed"}, is_skipped=True)


def _offloaded(name: str, worker: Any) -> Row:
    """Return the row of an offload, which must free what it reports, and of a reload, which must not need more."""
    torch.cuda.empty_cache()
    held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    away, freed = timed(call, worker, "offload")
    left, driver = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
    back, _ = timed(call, worker, "reload")
    figures = {"offload_s": away, "reload_s": back, "freed_gb": freed / GB, "left_gb": left / GB}
    figures |= {"kept_by_driver_gb": (freed - driver) / GB, "grown_gb": (torch.cuda.memory_allocated() - held) / GB}
    # Blocks of the allocator have 2 MB at least.
    limits = {"left_gb": _LEFT_GB, "kept_by_driver_gb": 0.05 * freed / GB + 0.0625, "grown_gb": 0.001}
    return Row(name, figures, limits)


def saves(session: Session) -> Iterator[Row]:
    """Save and load a trained model, and compare the step after both."""
    with policy(session.scale.config(LAYERS[-1])) as worker:
        batch, path = session.scale.batch(), str(session.folder / "saves")
        call(worker, "update_actor", batch)
        saved, _ = timed(call, worker, "save_checkpoint", path, 1)
        call(worker, "update_actor", batch)
        expected = scores(worker, batch)
        loaded, _ = timed(call, worker, "load_checkpoint", path)
        call(worker, "update_actor", batch)
        mean = mean_difference(scores(worker, batch), expected)
    yield Row("step after a load", {"mean": mean, "save_s": saved, "load_s": loaded}, {"mean": 2e-2})
