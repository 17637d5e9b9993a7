"""Parts b and c, at the size of a real model: memory and speed, offload and reload, FP8, save and load."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mcontroller import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.dry_run import RoleCall
from workers.gpucheck.computed import scores
from workers.gpucheck.equality import LAYERS, LIMITS, score_difference
from workers.gpucheck.plain_loop import plain_step
from workers.gpucheck.policy import GB, Session, call, fastest, policy, timed
from workers.gpucheck.rows import Figure, Row, at_most, judged, skipped
from workers.memory.planned import estimated
from workers.memory.without_gpus import without_gpus
from workers.verify.roles import ModelRole

_LEFT_GB = 0.5
"""Workspaces of libraries that an offload leaves: 0.24 GB were measured on an H100, with FP8."""


def memory(session: Session) -> Iterator[Row]:
    """Compare an update with the estimate of ``python -m mcontroller check``, and with a loop of Megatron alone."""
    scale, config = session.scale, session.scale.config(LAYERS[-1])
    role = ModelRole.of(ActorRolloutRefWorker, config, "actor", 1)
    estimate = without_gpus(estimated)(RoleCall(role, "update_actor", scale.prompt, scale.response)).peak
    batch = scale.batch()
    with policy(config) as worker:
        call(worker, "update_actor", batch)  # makes the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        seconds, updated = fastest(call, worker, "update_actor", batch)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        with worker.call_context("update_actor"):
            step = plain_step(worker, batch, scale.packed)
            step()
            plain, _ = fastest(step)
    figures = {"estimate_gb": estimate / GB, "peak_gb": peak / GB, "reserved_gb": reserved / GB}
    limit = 0.03 if LAYERS[-1] == "transformer_engine" else 0.1
    advice = "python -m mcontroller check is wrong for this machine: give a run more room, and report the row"
    yield judged("peak of an update", abs(peak / estimate - 1) <= limit, f"within {limit:.0%}", advice, **figures)
    speed = {"seconds": seconds, "plain_s": plain, "of_plain": seconds / plain}
    tokens_per_s = batch.tensors()["input_ids"].numel() / seconds
    yield Row("speed of an update", {**speed, "tokens_per_s": tokens_per_s, **_mfu(updated)})


def _mfu(updated: DataProto) -> dict[str, Figure]:
    metrics = updated.meta_info["metrics"]
    return {"mfu": metrics["actor/mfu"]} if "actor/mfu" in metrics else {}


def decoding(session: Session) -> Iterator[Row]:
    """Measure the time of a generated token, with prompts of different lengths."""
    scale = session.scale
    with policy(scale.config(LAYERS[-1], response_length=scale.decoded), "rollout") as worker:
        prompts = scale.prompts(do_sample=False, eos_token_id=[])
        call(worker, "generate_sequences", prompts)
        torch.cuda.reset_peak_memory_stats()
        seconds, _ = timed(call, worker, "generate_sequences", prompts)
        figures = {"ms_per_token": 1e3 * seconds / scale.decoded, "peak_gb": torch.cuda.max_memory_allocated() / GB}
        yield Row("decoding", {**figures, "tokens_per_s": scale.rows * scale.decoded / seconds})


def fp8(session: Session) -> Iterator[Row]:
    """Compare scores and updates in FP8 with bfloat16, and look for FP8 weights that an offload leaves."""
    if LAYERS[-1] != "transformer_engine":
        yield skipped("FP8", "Transformer Engine is not installed")
        return
    batch, expected = session.scale.batch(), dict[str, torch.Tensor]()
    for recipe in ("none", "tensorwise", "delayed", "blockwise"):
        fields = {} if recipe == "none" else {"fp8": "hybrid", "fp8_recipe": recipe}
        with policy(session.scale.config(LAYERS[-1], transformer=fields)) as worker:
            results = {"before": scores(worker, batch)}
            call(worker, "update_actor", batch)
            seconds, updated = fastest(call, worker, "update_actor", batch)
            results["after"] = scores(worker, batch)
            call(worker, "offload")
            left = torch.cuda.memory_allocated() / GB
        expected = expected or results
        means = {
            f"{when}_mean_difference": float((value - expected[when]).abs().mean()) for when, value in results.items()
        }
        passed = all(mean <= 0.2 for mean in means.values()) and left <= _LEFT_GB
        advice = "more than the error of FP8: report this row, and train in bfloat16"
        figures = {"seconds": seconds, "left_gb": left, **_mfu(updated), **means}
        yield judged(f"FP8 {recipe}", passed, f"differences of 0.2, {_LEFT_GB} GB left", advice, **figures)


def offload(session: Session) -> Iterator[Row]:
    """Offload a trained model and reload it, twice: the first time allocates the memory of the host."""
    with policy(session.scale.config(LAYERS[-1])) as worker:
        batch = session.scale.batch()
        call(worker, "update_actor", batch)
        before = scores(worker, batch)
        for number in (1, 2):
            torch.cuda.empty_cache()
            held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
            away, freed = timed(call, worker, "offload")
            allocator, driver = held - torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
            back, _ = timed(call, worker, "reload")
            yield freed_row(number, freed / GB, allocator / GB, driver / GB, offload_s=away, reload_s=back)
        grown = (torch.cuda.memory_allocated() - held) / GB
        yield at_most("GPU bytes that grow, GB", grown, 0.001, "a reload does not return what an offload freed")
        difference = float((scores(worker, batch) - before).abs().max())
        yield at_most("scores after reload", difference, 0.0, "weights changed on their way: report this row")


def freed_row(number: int, freed_gb: float, allocator_gb: float, driver_gb: float, **seconds: float) -> Row:
    """Return the row of an offload, which must free what it reports, in the allocator and in the driver."""
    kept = abs(allocator_gb - freed_gb) > max(0.02 * freed_gb, 0.002)
    advice = "tensors of the role stay on the device" if kept else "the allocator keeps blocks: report this row"
    passed = freed_gb > 0 and not kept and driver_gb >= 0.95 * freed_gb - 0.0625
    figures = {"freed_gb": freed_gb, "allocator_gb": allocator_gb, "driver_gb": driver_gb, **seconds}
    return judged(f"offload and reload {number}", passed, "freed in the allocator and the driver", advice, **figures)


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
        difference = score_difference("bfloat16", scores(worker, batch), expected)
        limit = LIMITS["bfloat16"]["again"]
        advice = "the step after a load differs from the step after the save: do not resume runs on this machine"
        yield at_most("step after a load", difference, limit, advice, save_s=saved, load_s=loaded)
