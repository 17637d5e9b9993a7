"""Checks of speed: how often the host waits for the device, tokens per second, and the share of the peak (MFU)."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from workers.gpucheck.course import Case
from workers.gpucheck.memory import large_policy
from workers.gpucheck.policy import PROMPT, RESPONSE, ROWS, ppo_columns
from workers.gpucheck.rows import Result, Row, compared
from workers.gpucheck.session import CHECKS, Session
from workers.model.utilization import peak_tflops, training_flops

__all__ = ["count_waits", "waits_row"]

_WAITS_OF_A_STEP = 10.0
_WAITS_OF_A_TOKEN = 2.0


@CHECKS.register("synchronisations")
def synchronisations(session: Session) -> Iterator[Row]:
    """Count how often the host waits for the device, per optimizer step and per generated token."""
    if not session.on_gpu:
        yield Row("synchronisations", "", result=Result.SKIPPED, note="the host waits for no device")
        return
    implementation = session.implementations[-1]
    batch = ppo_columns()
    for variant in (None, "packed"):
        with Case("dense", "bfloat16", variant, implementation).policy() as policy:
            policy.update(batch)
            waits = count_waits(functools.partial(policy.update, batch))
            steps = -(-ROWS // policy.config.ppo_mini_batch_size)
        name = f"synchronisations: optimizer step{' packed' if variant else ''}"
        # Packed rows wait in every layer without Transformer Engine's rotary embedding, which reads lengths on the GPU.
        limit = None if variant and implementation == "local" else _WAITS_OF_A_STEP
        yield waits_row(name, waits, steps, limit)
    with Case("dense", "bfloat16", None, implementation).policy() as policy:
        policy.generate(batch, do_sample=False)
        waits = count_waits(lambda: policy.generate(batch, do_sample=False, eos_token_id=0))
    yield waits_row("synchronisations: generated token", waits, RESPONSE, _WAITS_OF_A_TOKEN)


def count_waits(call: Callable[[], object]) -> Counter[str]:
    """Run ``call`` and return how often the host waited for the device, by the line of code that waited."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{each.filename}:{each.lineno}" for each in seen if "synchronizing CUDA" in str(each.message))


def waits_row(name: str, waits: Counter[str], units: int, limit: float | None) -> Row:
    """Return the row of waits per unit; the note has the lines that wait most.

    Args:
        name: of the row.
        waits: see ``count_waits``.
        units: optimizer steps, or tokens.
        limit: most waits per unit; None for a figure without a limit.
    """
    value = sum(waits.values()) / units
    if limit is None:
        return Row(name, f"{value:.1f}", note="without Transformer Engine, packed rows wait in every layer")
    lines = ", ".join(f"{count}x {line}" for line, count in waits.most_common(3))
    return compared(name, value <= limit, f"{value:.1f}", "", f"{limit:g}", note=f"the host waits at {lines}")


@CHECKS.register("training")
def training(session: Session) -> Iterator[Row]:
    """Measure tokens per second of training, and the share of the device's peak."""
    rows, prompt, response = (ROWS, PROMPT, RESPONSE) if session.small else (16, 512, 1536)
    peak = peak_tflops(torch.cuda.get_device_name()) if session.on_gpu else None
    with large_policy(session, prompt=prompt, response=response, role="actor", vocabulary=32_000) as policy:
        for label, longest in (("full rows", None), ("short responses", response // 4)):
            batch = ppo_columns(rows, prompt, response)
            batch = _of_length(batch, prompt, longest or response, equal=longest is None)
            policy.update(batch)
            seconds = session.seconds(functools.partial(policy.update, batch))
            tokens = int(batch["attention_mask"].sum())
            flops = training_flops(policy.worker.model, batch["attention_mask"].sum(1), policy.worker.context.pg)
            share = "n/a" if peak is None else f"{flops / seconds / (peak * 1e12):.1%} MFU"
            yield Row(f"training: {label}, tokens/s", f"{tokens / seconds:.0f}", share)
    if session.on_gpu:
        yield Row("training: peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def _of_length(batch: dict[str, torch.Tensor], prompt: int, longest: int, *, equal: bool) -> dict[str, torch.Tensor]:
    """Return the batch with prompts of full length, and responses of ``longest`` tokens (or at most, unless equal)."""
    rows, width = batch["responses"].shape
    generator = torch.Generator().manual_seed(8)
    lengths = torch.full((rows, 1), longest)
    if not equal:
        lengths = torch.randint(1, longest + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).long()
    attention = torch.cat((torch.ones(rows, prompt, dtype=torch.long), mask), 1)
    ids = torch.randint(2, 500, attention.shape, generator=generator) * attention
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "responses": ids[:, prompt:],
        "response_mask": mask,
        "old_log_probs": -6.0 * mask,
        "advantages": torch.randn(mask.shape, generator=generator) * mask,
    }
