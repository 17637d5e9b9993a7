"""Part c: offload and reload, save and load, at the size of the model."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from workers.gpucheck.case_run import can_save
from workers.gpucheck.equality import TOLERANCES, score_difference
from workers.gpucheck.large import full_rows
from workers.gpucheck.policy import Policy, timed
from workers.gpucheck.rows import Row, at_most, judged, measured, skipped
from workers.gpucheck.session import Session

__all__ = ["host_gb", "offload", "offload_rows", "saves"]

_GB = 2**30


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
                    "host_available_gb": host_gb("/proc/meminfo", "MemAvailable"),
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
        yield _measured("save", policy, "save_checkpoint", path, 1)
        policy.update(batch)
        expected = policy.scores(batch)
        yield _measured("load", policy, "load_checkpoint", path)
        policy.update(batch)
        tolerance = TOLERANCES["bfloat16"]
        difference = score_difference(policy.scores(batch), expected, tolerance)
        advice = "the step after a load differs from the step after the save: do not resume runs on this machine"
        yield at_most("step after a load", difference, tolerance.again, advice)


def _measured(name: str, policy: Policy, method: str, *arguments: object) -> Row:
    """Call a method, and return the row of its seconds and of the peaks of the GPU and of this process."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    resident = host_gb("/proc/self/status", "VmRSS")
    seconds, _ = timed(functools.partial(policy.call, method, *arguments))
    figures = {"gpu_peak_above_gb": (torch.cuda.max_memory_allocated() - held) / _GB}
    figures["host_peak_above_gb"] = host_gb("/proc/self/status", "VmHWM") - resident
    return measured(name, call_s=seconds, **figures)


def host_gb(file: str, name: str) -> float:
    """Return a value of a file of Linux with lines such as ``VmRSS:  12 kB``, in units of 2**30 bytes."""
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 2**20


def _batch(session: Session) -> dict[str, torch.Tensor]:
    return full_rows(session.scale, [session.scale.prompt + session.scale.response] * 2)
