"""Part b: the peak of an update beside its estimate, micro-batches of different widths, and decoding."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from workers.gpucheck.cases import prompt_columns
from workers.gpucheck.large import full_rows
from workers.gpucheck.policy import Policy, timed
from workers.gpucheck.rows import Row, at_most, judged, measured
from workers.gpucheck.session import Session
from workers.run.role_calls import Lengths, calls_of_run

__all__ = ["count_waits", "decoding", "memory", "waits_row", "widths"]

_GB = 2**30
_WAITS_OF_A_STEP, _WAITS_OF_A_TOKEN = 10.0, 2.0


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
        policy.update(batch)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
    advice = "python -m mcontroller check is wrong for this machine: give a run more room, and report the row"
    figures = {"estimate_gb": estimate / _GB, "peak_gb": peak / _GB, "reserved_gb": reserved / _GB}
    figures["outside_torch_gb"] = (total - free - reserved) / _GB
    yield judged("peak of an update", abs(peak / estimate - 1) <= 0.1, "estimate within 10%", advice, **figures)


def widths(session: Session) -> Iterator[Row]:
    """Train on micro-batches of different widths, twice, and compare the times of both passes."""
    scale = session.scale
    longest = scale.prompt + scale.response
    shrinking = (longest // 2 - 1) / (scale.widths - 1)  # two rows together exceed the limit of tokens
    batch = full_rows(scale, [longest - int(index * shrinking) for index in range(scale.widths)])
    tokens = int(batch["attention_mask"].sum())
    for packed in (False, True):
        name = "packed" if packed else "padded"
        sizes = {"ppo_max_tokens_per_micro_batch": longest, "ppo_mini_batch_size": scale.widths}
        config = scale.config(session.implementation, packed=packed, **sizes)
        with Policy(config, "actor") as policy:
            policy.update(full_rows(scale, [longest]))
            update = functools.partial(policy.update, batch)
            first, _ = timed(update)
            second, metrics = timed(update)
            waits = count_waits(update)
        advice = "the second pass should find every plan of the first: look for recompilation in TORCH_LOGS=recompiles"
        figures = {"first_s": first, "second_s": second, "first_over_second": first / second}
        figures |= {"tokens_per_s": tokens / second, "mfu": metrics.get("mfu", "unknown GPU")}
        yield at_most(f"second pass over the first, {name}", second / first, scale.slower, advice, **figures)
        # Packed rows wait in every layer without Transformer Engine's rotary embedding, which reads lengths on the GPU.
        limited = session.implementation != "local" or not packed
        yield waits_row(f"waits of an optimizer step, {name}", waits, 1, _WAITS_OF_A_STEP if limited else None)


def decoding(session: Session) -> Iterator[Row]:
    """Measure the time of a generated token, and how often the host waits, for equal and for unequal prompts."""
    scale = session.scale
    lengths = {"response_length": scale.decoded}
    with Policy(scale.config(session.implementation, rollout=lengths), "rollout") as policy:
        unequal = prompt_columns(scale.rows, scale.prompt, scale.model["vocab_size"])
        equal = unequal | {"attention_mask": torch.ones_like(unequal["attention_mask"])}
        equal["input_ids"] = unequal["input_ids"].clamp(min=2)
        for name, batch in (("equal", equal), ("unequal", unequal)):
            generate = functools.partial(policy.generate, batch, do_sample=False, eos_token_id=[])
            short = functools.partial(generate, response_length=scale.decoded // 4)
            generate()
            torch.cuda.reset_peak_memory_stats()
            whole, _ = timed(generate)
            peak = torch.cuda.max_memory_allocated() / _GB
            seconds = (whole - timed(short)[0]) / (scale.decoded - scale.decoded // 4)
            figures = {
                "ms_per_token": seconds * 1e3,
                "tokens_per_s": scale.rows * scale.decoded / whole,
                "peak_gb": peak,
            }
            yield measured(f"decoding, {name} prompts", **figures)
            waits = count_waits(generate)
            yield waits_row(f"waits of a token, {name} prompts", waits, scale.decoded, _WAITS_OF_A_TOKEN)


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
    """Return the row of waits per unit; the reason has the lines that wait most.

    Args:
        name: of the row.
        waits: see ``count_waits``.
        units: optimizer steps, or tokens.
        limit: most waits per unit; None for a figure without a limit.
    """
    value = sum(waits.values()) / units
    if limit is None:
        return measured(name, value=value)
    lines = ", ".join(f"{count}x {line}" for line, count in waits.most_common(3))
    return at_most(name, value, limit, f"the host waits at {lines}")
