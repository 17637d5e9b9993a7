"""Parts b and c, at the size of the model: memory and speed, offload and reload, save and load."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from workers.gpucheck.case_run import Session, can_save
from workers.gpucheck.cases import prompt_columns
from workers.gpucheck.equality import TOLERANCES, score_difference
from workers.gpucheck.policy import Policy, full_rows, timed
from workers.gpucheck.rows import Figure, Row, at_most, judged, measured, skipped
from workers.role_calls import Lengths, calls_of_run

_GB = 2**30


def memory(session: Session) -> Iterator[Row]:
    """Compare the peak of an update with the estimate of ``python -m mcontroller check``."""
    scale = session.scale
    config = scale.config(session.implementation)
    lengths = Lengths(scale.prompt, scale.response, config.ppo_mini_batch_size)
    fused = session.implementation == "transformer_engine"
    calls = calls_of_run({"actor_rollout_ref": config}, {"actor_rollout_ref": 1}, lengths, fused=fused)
    estimate = next(call for call in calls if call.call == "train").stages[0].total
    with Policy(config, "actor") as policy:
        batch = full_rows(scale, [scale.prompt + scale.response] * config.ppo_mini_batch_size)
        policy.update(batch)  # makes the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        seconds, metrics = timed(lambda: policy.update(batch))
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
    advice = "python -m mcontroller check is wrong for this machine: give a run more room, and report the row"
    figures: dict[str, Figure] = {"estimate_gb": estimate / _GB, "peak_gb": peak / _GB, "reserved_gb": reserved / _GB}
    figures |= {"outside_torch_gb": (total - free - reserved) / _GB, "mfu": metrics.get("mfu", "unknown GPU")}
    figures["tokens_per_s"] = int(batch["attention_mask"].sum()) / seconds
    yield judged("peak of an update", abs(peak / estimate - 1) <= 0.1, "estimate within 10%", advice, **figures)


def decoding(session: Session) -> Iterator[Row]:
    """Measure the time of a generated token, with prompts of different lengths."""
    scale = session.scale
    with Policy(scale.config(session.implementation, rollout={"response_length": scale.decoded}), "rollout") as policy:
        prompts = prompt_columns(scale.rows, scale.prompt, scale.model["vocab_size"])
        generate = functools.partial(policy.generate, prompts, do_sample=False, eos_token_id=[])
        generate()
        torch.cuda.reset_peak_memory_stats()
        whole, _ = timed(generate)
        peak = torch.cuda.max_memory_allocated() / _GB
        short, _ = timed(functools.partial(generate, response_length=scale.decoded // 4))
        of_token = (whole - short) / (scale.decoded - scale.decoded // 4)
        speed = scale.rows * scale.decoded / whole
        yield measured("decoding", ms_per_token=of_token * 1e3, tokens_per_s=speed, peak_gb=peak)


def offload(session: Session) -> Iterator[Row]:
    """Offload a trained model and reload it, three times."""
    with Policy(session.scale.config(session.implementation), "actor") as policy:
        batch = _batch(session)
        policy.update(batch)
        before = policy.scores(batch)
        passes = []
        for number in range(3):
            torch.cuda.empty_cache()
            held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
            out, freed = timed(functools.partial(policy.call, "offload"))
            passes.append(
                {
                    "freed_gb": freed / _GB,
                    "allocator_gb": (held - torch.cuda.memory_allocated()) / _GB,
                    "driver_gb": (torch.cuda.mem_get_info()[0] - free) / _GB,
                    "host_available_gb": _host_gb(),
                    "offload_gb_per_s": freed / out / _GB,
                }
            )
            back, _ = timed(functools.partial(policy.call, "reload"))
            passes[-1] |= {"reload_gb_per_s": freed / back / _GB, "held_gb": torch.cuda.memory_allocated() / _GB}
            yield measured(f"offload and reload {number + 1}", **passes[-1])
        yield from offload_rows(passes)
        difference = float((policy.scores(batch) - before).abs().max())
        yield at_most("scores after reload", difference, 0.0, "weights changed on their way: report this row")


def offload_rows(passes: list[dict[str, float]]) -> Iterator[Row]:
    """Yield the rows of bytes that are freed, and that do not grow from pass to pass.

    Args:
        passes: of each pass, what ``offload`` reports.
    """
    last, freed = passes[-1], passes[-1]["freed_gb"]
    advice = "tensors of the role stay on the device"
    passed = freed > 0 and abs(last["allocator_gb"] - freed) <= max(0.02 * freed, 0.002)
    yield judged("bytes freed in the allocator", passed, "2% of freed_gb", advice, **last)
    advice = "the allocator keeps blocks that still hold a tensor: report this row"
    yield judged(
        "bytes freed in the driver", last["driver_gb"] >= 0.95 * freed - 0.0625, "95% of freed_gb", advice, **last
    )
    growth = last["held_gb"] - passes[0]["held_gb"]
    yield at_most("GPU bytes that grow, GB", growth, 0.001, "a reload does not return what an offload freed")
    growth = passes[0]["host_available_gb"] - last["host_available_gb"]
    advice = "pinned buffers of an offload are not used again by the next: look at memory of the host in long runs"
    yield at_most("host bytes that grow, GB", growth, 4.0 + 0.1 * freed, advice)


def saves(session: Session) -> Iterator[Row]:
    """Save and load a trained model, and compare the step after both."""
    if not can_save():
        yield skipped("save and load", "psutil, which Megatron-Core saves with, is not installed")
        return
    with Policy(session.scale.config(session.implementation), "actor") as policy:
        batch, path = _batch(session), str(session.folder / "saves")
        policy.update(batch)
        needed = 16 * sum(parameter.numel() for _, parameter in policy.parameters())
        if shutil.disk_usage(session.folder).free < needed:
            yield skipped("save and load", f"{session.folder} has no room for {needed / _GB:.0f} GB: pass --folder")
            return
        seconds, _ = timed(lambda: policy.call("save_checkpoint", path, 1))
        yield measured("save", call_s=seconds)
        policy.update(batch)
        expected = policy.scores(batch)
        seconds, _ = timed(lambda: policy.call("load_checkpoint", path))
        yield measured("load", call_s=seconds)
        policy.update(batch)
        tolerance = TOLERANCES["bfloat16"]
        difference = score_difference(policy.scores(batch), expected, tolerance)
        advice = "the step after a load differs from the step after the save: do not resume runs on this machine"
        yield at_most("step after a load", difference, tolerance.again, advice)


def _host_gb() -> float:
    """Return the memory of the host that is available, in units of 2**30 bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) / 2**20


def _batch(session: Session) -> dict[str, torch.Tensor]:
    return full_rows(session.scale, [session.scale.prompt + session.scale.response] * 2)
