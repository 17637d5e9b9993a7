"""How wrong the predictions of `mcontroller check` are: fitted to half of published rows, tested on the other half.

    python benchmarks/prediction.py           # fit, print the fitted numbers and the errors
    python benchmarks/prediction.py --write   # the same with the numbers of hardware.toml; writes docs/prediction.md

The rows were read on 2026-11-24 from their publishers: Megatron-Bridge's performance summary (release 0.4.2 and its
archive) and NeMo-RL v0.6's (its page "performance summary"), on DGX-H100. Rows at odd positions are fitted, at even
positions tested. Layers are rounded up to whole chunks. Multi-latent attention counts as attention with as many
parameters; the shared expert and the dense first layers of DeepSeek-V3 count as experts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from workers.communication.estimate import StepRows, communication_of_step
from workers.config import ActorConfig, ModelConfig, ParallelConfig, load_config
from workers.prediction.step_time import (
    Hardware,
    generation_seconds,
    hardware_of,
    step_time,
    weight_seconds,
)

SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("vocab_size", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
)
MODELS: dict[str, tuple[int, ...]] = {
    "Llama 3 8B": (32, 4096, 32, 8, 128, 14336, 128256),
    "Llama 3 70B": (80, 8192, 64, 8, 128, 28672, 128256),
    "Llama 3.1 405B": (126, 16384, 128, 8, 128, 53248, 128256),
    "gpt-oss 120B": (36, 2880, 64, 8, 64, 2880, 201088, 128, 4, 2880),
    "Qwen3-30B-A3B": (48, 2048, 32, 4, 128, 6144, 151936, 128, 8, 768),
    "Qwen3-235B-A22B": (94, 4096, 64, 4, 128, 12288, 151936, 128, 8, 1536),
    "DeepSeek-V3": (61, 7168, 96, 8, 128, 18432, 129280, 256, 9, 2048),
}
# release, model, GPUs, precision, rows of a micro-batch, global batch, sequence, (tp, pp, cp, vpp, ep), tokens/s/GPU
PRE_TRAINING: list[tuple[Any, ...]] = [
    ("26.04", "Llama 3 70B", 64, "FP8", 1, 256, 8192, (4, 8, 1, 5, 1), 1633),
    ("26.04", "gpt-oss 120B", 64, "BF16", 1, 1280, 4096, (1, 4, 1, 0, 8), 5810),
    ("26.04", "Qwen3-30B-A3B", 16, "FP8", 1, 1024, 4096, (1, 1, 1, 0, 16), 8901),
    ("26.02.01", "Qwen3-30B-A3B", 16, "FP8", 1, 1024, 4096, (1, 2, 1, 12, 8), 9058),
    ("26.04", "Qwen3-235B-A22B", 256, "FP8", 1, 8192, 4096, (2, 8, 1, 4, 32), 1686),
    ("26.02", "Llama 3.1 405B", 1024, "FP8", 1, 1536, 8192, (8, 8, 2, 8, 1), 311),
    ("25.11", "Llama 3 8B", 8, "FP8", 1, 128, 8192, (1, 1, 1, 0, 1), 14451),
    ("25.11", "Llama 3 70B", 64, "FP8", 1, 128, 8192, (4, 8, 1, 5, 1), 1602),
    ("25.11", "Llama 3.1 405B", 1024, "FP8", 1, 512, 8192, (8, 8, 2, 8, 1), 292),
    ("25.11", "gpt-oss 120B", 64, "BF16", 4, 512, 4096, (1, 4, 1, 0, 8), 5630),
    ("25.11", "Qwen3-235B-A22B", 256, "FP8", 1, 2048, 4096, (2, 8, 1, 4, 32), 1575),
    ("25.09", "DeepSeek-V3", 1024, "FP8", 1, 8192, 4096, (2, 8, 1, 4, 64), 1297),
]
# model, batches ahead, GPUs, samples generated, trained at once, max and mean length, tp of generation,
# (tp, pp, cp, vpp, ep) of training, seconds of a step
REINFORCEMENT: list[tuple[Any, ...]] = [
    ("DeepSeek-V3", 0, 256, 512, 512, 1536, 701, 32, (1, 16, 1, 0, 16), 134),
    ("DeepSeek-V3", 0, 512, 512, 512, 1536, 697, 32, (1, 16, 1, 0, 16), 111),
    ("DeepSeek-V3", 1, 512, 512, 512, 1536, 710, 32, (1, 16, 1, 0, 16), 64.1),
    ("Qwen3-235B-A22B", 0, 128, 512, 512, 8192, 5698, 16, (2, 8, 2, 0, 16), 395),
    ("Qwen3-235B-A22B", 0, 256, 512, 512, 8192, 5713, 16, (2, 8, 2, 0, 16), 312),
    ("Qwen3-235B-A22B", 1, 256, 512, 512, 8192, 5721, 8, (4, 8, 1, 0, 16), 231),
    ("Qwen3-30B-A3B", 0, 32, 2048, 512, 4096, 3203, 2, (1, 1, 1, 0, 8), 192),
    ("Qwen3-30B-A3B", 1, 32, 2048, 512, 4096, 3201, 2, (1, 2, 1, 0, 8), 152),
    ("Qwen3-30B-A3B", 8, 192, 2048, 512, 4096, 3206, 2, (1, 1, 1, 0, 8), 34.5),
]


@dataclass(frozen=True)
class Row:
    """A published step: its name, its seconds, and its prediction on some hardware."""

    name: str
    published: float
    predict: Callable[[Hardware], float]


def training(
    name: str, gpus: int, micro: int, rows: int, length: int, axes: Sequence[int]
) -> tuple[ActorConfig, int, list[tuple[str, str, int]]]:
    """Return the configuration of a row, the micro-batches of a rank, and the bytes of its step."""
    tp, pp, cp, vpp, ep = axes
    sizes = dict(zip(SIZES, MODELS[name], strict=False))
    chunks = pp * (vpp or 1)
    sizes |= {"num_layers": -(-sizes["num_layers"] // chunks) * chunks}
    model = {**sizes, "max_sequence_length": length, "dtype": "bfloat16"}
    if ep > 1:
        model["transformer"] = {"moe_router_load_balancing_type": "none"}
    parallel = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "vpp": vpp or None, "sequence_parallel": tp > 1}
    fields = {
        **{"model": model, "parallel": parallel | ({"etp": 1} if ep > 1 else {})},
        **{"optim": {"distributed_optimizer": True}, "ppo_micro_batch_size": micro, "ppo_mini_batch_size": rows},
        "rollout": {"prompt_length": 1, "response_length": length - 1, "parallel": {"tp": 1}},
    }
    config: ActorConfig = load_config(ActorConfig, fields)
    traffic = communication_of_step(config, gpus, StepRows(rows, length, length))
    dp = gpus // (tp * pp * cp)
    return config, rows // dp // micro, [(each.axis, each.operation, each.nbytes) for each in traffic]


def pre_training() -> list[Row]:
    """Return the rows of pre-training."""
    rows = []
    for release, name, gpus, precision, micro, batch, length, axes, speed in PRE_TRAINING:
        config, count, traffic = training(name, gpus, micro, batch, length, axes)
        arguments = (config.model, config.parallel, gpus, count, micro, length, traffic)
        fp8 = precision == "FP8"

        def seconds(hardware: Hardware, arguments: Any = arguments, fp8: bool = fp8) -> float:
            return step_time(*arguments, hardware, fp8=fp8).seconds

        layout = "TP{} PP{} CP{} VPP{} EP{}".format(*axes)
        title = f"{name}, {release}, {gpus} GPUs, {precision}, {batch} rows, {layout}"
        rows.append(Row(title, batch * length / gpus / speed, seconds))
    return rows


def reinforcement() -> list[Row]:
    """Return the rows of GRPO.

    A step generates, scores with two models, trains, and moves weights. One that generates ahead does both at once: it
    trains on the largest half of the GPUs that divides the samples, and generates on the others.
    """
    rows = []
    for name, ahead, gpus, samples, batch, longest, mean, tp, axes, published in REINFORCEMENT:
        group = axes[0] * axes[1] * axes[2]
        trains = gpus if not ahead else max(n for n in range(group, gpus // 2 + 1, group) if not batch % (n // group))
        generates = gpus if not ahead else gpus - trains
        length = -(-mean // 64) * 64
        config, count, traffic = training(name, trains, 1, batch, length, axes)
        arguments = (config.model, config.parallel, trains, count, 1, mean, traffic)
        engine = ParallelConfig(tp=tp)

        def seconds(
            hardware: Hardware,
            arguments: Any = arguments,
            model: ModelConfig = config.model,
            engine: ParallelConfig = engine,
            sizes: Any = (generates, samples, mean, longest, trains, batch, ahead),
        ) -> float:
            generates, samples, mean, longest, trains, batch, ahead = sizes
            last = mean if ahead else longest  # a batch that is ahead does not wait for its longest response
            generated = generation_seconds(model, engine, generates, samples, mean, last, hardware)
            step = step_time(*arguments, hardware)
            learned = samples / batch * step.seconds + 2 / 3 * samples / batch * (step.seconds - step.once)
            moved = weight_seconds(model, trains, generates, hardware)
            return moved + (max(generated, learned) if ahead else generated + learned + hardware.fixed)

        kind = "on policy" if not ahead else f"{ahead} off"
        rows.append(Row(f"{name}, {kind}, {gpus} GPUs, {samples} samples of {mean}", published, seconds))
    return rows


def loss(rows: Sequence[Row], hardware: Hardware) -> float:
    """Return the mean of the logarithms' distances."""
    return sum(abs(math.log(row.predict(hardware) / row.published)) for row in rows) / len(rows)


def fit(rows: Sequence[Row], hardware: Hardware, names: Sequence[str]) -> Hardware:
    """Return the hardware whose named numbers have the least loss: smaller and smaller steps of each of them."""
    factor, best = 1.5, loss(rows, hardware)
    while factor > 1.005:
        moved = False
        for name in names:
            for by in (factor, 1 / factor):
                value = getattr(hardware, name) * by
                tried = replace(hardware, **{name: min(value, 1.0) if name in ("products", "exposed") else value})
                if (found := loss(rows, tried)) < best - 1e-9:
                    hardware, best, moved = tried, found, True
        if not moved:
            factor = math.sqrt(factor)
    return hardware


def rank_correlation(some: Sequence[float], others: Sequence[float]) -> float:
    """Return Spearman's rank correlation of numbers without equal ones."""
    ranks = [[sorted(values).index(value) for value in values] for values in (some, others)]
    n = len(some)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (n * (n * n - 1))


def correlation_of(rows: Sequence[Row], hardware: Hardware) -> float:
    """Return the rank correlation of predicted and published seconds."""
    return rank_correlation([row.predict(hardware) for row in rows], [row.published for row in rows])


PAGE = """# Predictions and their errors

`mcontroller check` predicts the seconds of a step before anything starts, and ranks the layouts that fit. **It is for
the order of layouts, not for milliseconds.** `benchmarks/prediction.py --write` wrote this page; without `--write`, it
fits five numbers of `workers/prediction/hardware.toml` again.

The rows are published ones, of DGX-H100, read on 2026-11-24: pre-training from the performance summary of
Megatron-Bridge 0.4.2 and its archive, GRPO from that of NeMo-RL v0.6 (its page *performance summary*). The rows at
odd positions are fitted, the others tested. The form of the formula for runs that generate ahead was chosen after the
errors of all rows were known; no number was fitted to a tested row. What the sources do not say is assumed: the script
says what.

{tables}

Weights: 472 GB of Qwen3-235B from 8 to 8 GPUs take 3.3 s (vLLM#43375); predicted are {weights:.1f} s, at the full
speed of the links. Other published rows do not say how many GPUs there are, so nothing is fitted here.

Measured on one H100, with local layers and the shape of Qwen3-1.7B: an update of two rows of 8192 tokens took 0.86 s,
predicted are 0.52 s (-40%). 32 responses of 128 tokens after prompts of 1024 took 3.9 s in the workers, to which
`decoding_in_workers` is fitted.

What is not predicted: imbalance of experts and of lengths, the input pipeline, saving, fp8 in generation, and an engine
outside of the workers.
"""


def table_of(title: str, rows: Sequence[Row], hardware: Hardware) -> str:
    """Return the table of a family of rows with its errors and rank correlations."""
    errors = [row.predict(hardware) / row.published - 1 for row in rows]
    lines = [f"## {title}", "", "| row | | published, s | predicted, s | error |", "|---|---|--:|--:|--:|"]
    for index, (row, error) in enumerate(zip(rows, errors, strict=True)):
        used = "tested" if index % 2 else "fitted"
        lines.append(f"| {row.name} | {used} | {row.published:.1f} | {row.predict(hardware):.1f} | {error:+.0%} |")
    middle = [median(map(abs, errors[first::2])) for first in (0, 1)]
    lines += [
        "",
        f"Median error: {middle[0]:.0%} of the fitted rows, {middle[1]:.0%} of the tested rows. Spearman's rank",
        f"correlation of the seconds: {correlation_of(rows[1::2], hardware):.2f} of the tested rows, "
        f"{correlation_of(rows, hardware):.2f} of all.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Fit and print, or write the page."""
    hardware, trained, learned = hardware_of("h100"), pre_training(), reinforcement()
    if "--write" not in sys.argv:
        hardware = fit(trained[::2], hardware, ("products", "passes", "exposed"))
        hardware = fit(learned[::2], hardware, ("decoding", "fixed"))
        print({name: getattr(hardware, name) for name in ("products", "passes", "exposed", "decoding", "fixed")})
    families = (("Steps of pre-training", trained), ("Steps of GRPO", learned))
    tables = "\n\n".join(table_of(title, rows, hardware) for title, rows in families)
    model = training("Qwen3-235B-A22B", 8, 1, 8, 64, (1, 1, 1, 0, 8))[0].model
    page = PAGE.format(tables=tables, weights=weight_seconds(model, 8, 8, hardware))
    if "--write" in sys.argv:
        Path("docs/prediction.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
