"""Parts b and c, at the size of a real model: memory and speed, offload and reload, FP8, save and load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import torch

from mcontroller import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig
from workers.dry_run import RoleCall
from workers.gpucheck.parity import CAN_SAVE, LAYERS, TOLERANCES, Session
from workers.gpucheck.plain_loop import plain_steps
from workers.gpucheck.policy import GB, Policy, fastest, timed
from workers.gpucheck.rows import Figure, Row, at_most, judged, skipped
from workers.memory.planned import estimated
from workers.memory.without_gpus import without_gpus
from workers.verify.roles import ModelRole

_LEFT_GB = 0.5
"""Workspaces of libraries that an offload leaves: 0.24 GB were measured on an H100, with FP8."""


def memory(session: Session) -> Iterator[Row]:
    """Compare an update with the estimate of ``python -m mcontroller check``, and with a loop of Megatron alone."""
    config = session.scale.config(LAYERS[-1])
    with Policy(config, "actor") as policy:
        batch = session.scale.batch()
        policy.call("update_actor", batch)  # makes the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        seconds, updated = fastest(lambda: policy.call("update_actor", batch))
        peak = torch.cuda.max_memory_allocated()
        estimate = _estimate(config, session)
        figures = {"estimate_gb": estimate / GB, "peak_gb": peak / GB}
        figures |= {"reserved_gb": torch.cuda.max_memory_reserved() / GB}
        limit = 0.03 if config.model.transformer_impl == "transformer_engine" else 0.1
        advice = "python -m mcontroller check is wrong for this machine: give a run more room, and report the row"
        yield judged("peak of an update", abs(peak / estimate - 1) <= limit, f"within {limit:.0%}", advice, **figures)
        with policy.worker.call_context("update_actor"):
            worker = policy.worker
            step = plain_steps(worker.model, worker.state.optimizer, batch, worker.device, session.scale.packed)
            step()
            plain, _ = fastest(step)
    speed: dict[str, Figure] = {"seconds": seconds, "plain_s": plain, "of_plain": seconds / plain}
    speed["tokens_per_s"] = batch.tensors()["input_ids"].numel() / seconds
    yield Row("speed of an update", speed | _mfu(updated))


def _mfu(updated: DataProto) -> dict[str, Figure]:
    metrics = updated.meta_info["metrics"]
    return {"mfu": metrics["actor/mfu"]} if "actor/mfu" in metrics else {}


def _estimate(config: ActorConfig, session: Session) -> int:
    role = ModelRole.of(ActorRolloutRefWorker, config, "actor", 1)
    update = RoleCall(role, "update_actor", session.scale.prompt, session.scale.response)
    return without_gpus(estimated)(update).peak


def fp8(session: Session) -> Iterator[Row]:
    """Compare scores and updates in FP8 with bfloat16, and look for FP8 weights that an offload leaves."""
    if LAYERS[-1] != "transformer_engine":
        yield skipped("FP8", "Transformer Engine is not installed")
        return
    batch, expected = session.scale.batch(), dict[str, torch.Tensor]()
    for recipe in ("none", "tensorwise", "delayed", "blockwise"):
        fields = {} if recipe == "none" else {"fp8": "hybrid", "fp8_recipe": recipe}
        with Policy(session.scale.config(LAYERS[-1], transformer=fields), "actor") as policy:
            scores = {"before": policy.scores(batch)}
            policy.call("update_actor", batch)
            seconds, updated = fastest(lambda policy=policy: policy.call("update_actor", batch))  # type: ignore[misc]
            scores["after"] = policy.scores(batch)
            policy.call("offload")
            left = torch.cuda.memory_allocated() / GB
        figures: dict[str, Figure] = {"seconds": seconds, "left_gb": left, **_mfu(updated)}
        expected = expected or scores
        for when, value in scores.items():
            figures[f"{when}_mean_difference"] = float((value - expected[when]).abs().mean())
        worst = max(float(figures["before_mean_difference"]), float(figures["after_mean_difference"]))
        advice = "more than the error of FP8: report this row, and train in bfloat16"
        passed = worst <= 0.2 and left <= _LEFT_GB
        yield judged(f"FP8 {recipe}", passed, f"differences of 0.2, {_LEFT_GB} GB left", advice, **figures)


def decoding(session: Session) -> Iterator[Row]:
    """Measure the time of a generated token, with prompts of different lengths."""
    scale = session.scale
    with Policy(scale.config(LAYERS[-1], response_length=scale.decoded), "rollout") as policy:
        prompts = scale.prompts(do_sample=False, eos_token_id=[])
        policy.call("generate_sequences", prompts)
        torch.cuda.reset_peak_memory_stats()
        seconds, _ = timed(policy.call, "generate_sequences", prompts)
        peak = torch.cuda.max_memory_allocated() / GB
        figures: dict[str, Figure] = {"ms_per_token": 1e3 * seconds / scale.decoded, "peak_gb": peak}
        yield Row("decoding", figures | {"tokens_per_s": scale.rows * scale.decoded / seconds})


def offload(session: Session) -> Iterator[Row]:
    """Offload a trained model and reload it, twice: the first time allocates the memory of the host."""
    with Policy(session.scale.config(LAYERS[-1]), "actor") as policy:
        batch = session.scale.batch()
        policy.call("update_actor", batch)
        before = policy.scores(batch)
        for number in (1, 2):
            torch.cuda.empty_cache()
            held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
            away, freed = timed(policy.call, "offload")
            allocator, driver = held - torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
            back, _ = timed(policy.call, "reload")
            sizes = {"freed_gb": freed / GB, "allocator_gb": allocator / GB, "driver_gb": driver / GB}
            yield freed_row(number, **sizes, offload_s=away, reload_s=back)
        grown = (torch.cuda.memory_allocated() - held) / GB
        yield at_most("GPU bytes that grow, GB", grown, 0.001, "a reload does not return what an offload freed")
        difference = float((policy.scores(batch) - before).abs().max())
        yield at_most("scores after reload", difference, 0.0, "weights changed on their way: report this row")


def freed_row(number: int, *, freed_gb: float, allocator_gb: float, driver_gb: float, **seconds: float) -> Row:
    """Return the row of an offload, which must free what it reports, in the allocator and in the driver."""
    kept = abs(allocator_gb - freed_gb) > max(0.02 * freed_gb, 0.002)
    advice = "tensors of the role stay on the device" if kept else "the allocator keeps blocks: report this row"
    passed = freed_gb > 0 and not kept and driver_gb >= 0.95 * freed_gb - 0.0625
    figures = {"freed_gb": freed_gb, "allocator_gb": allocator_gb, "driver_gb": driver_gb, **seconds}
    return judged(f"offload and reload {number}", passed, "freed in the allocator and the driver", advice, **figures)


def saves(session: Session) -> Iterator[Row]:
    """Save and load a trained model, and compare the step after both."""
    if not CAN_SAVE:
        yield skipped("save and load", "psutil, which Megatron-Core saves with, is not installed")
        return
    with Policy(session.scale.config(LAYERS[-1]), "actor") as policy:
        batch, path = session.scale.batch(), str(session.folder / "saves")
        policy.call("update_actor", batch)
        needed = 16 * sum(parameter.numel() for chunk in policy.worker.model for parameter in chunk.parameters())
        if shutil.disk_usage(session.folder).free < needed:
            yield skipped("save and load", f"{session.folder} has no room for {needed / GB:.0f} GB: pass --folder")
            return
        saved, _ = timed(policy.call, "save_checkpoint", path, 1)
        policy.call("update_actor", batch)
        expected = policy.scores(batch)
        loaded, _ = timed(policy.call, "load_checkpoint", path)
        policy.call("update_actor", batch)
        tolerance = TOLERANCES["bfloat16"]
        difference = tolerance.difference(policy.scores(batch), expected)
        advice = "the step after a load differs from the step after the save: do not resume runs on this machine"
        yield at_most("step after a load", difference, tolerance.again, advice, save_s=saved, load_s=loaded)
