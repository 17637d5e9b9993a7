"""Train the demo's task on policy and one step off policy, and write a table and a plot of the held-out accuracy.

    python -m examples.ppo.off_policy [--seeds 101 102 103] [--runs runs/off_policy] [--docs docs]

GRPO with actor and rollout in separate groups, one process each, and truncated importance sampling. The runs differ in
``trainer.max_staleness`` alone. Complete runs are not repeated; ``learning-off-policy.md`` and
``img/learning-off-policy.png`` have the complete runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.ppo.compare import ALGORITHMS, Curve, curve, draw, learning_table, trained
from examples.ppo.report import read_metrics

__all__ = ["SETTINGS", "main"]

SEEDS = (101, 102, 103)
SEPARATE = (*ALGORITHMS["grpo"], "rollout=${actor_rollout_ref}", "algorithm.importance.level=token")
SETTINGS: Mapping[str, Sequence[str]] = {
    f"max_staleness={staleness}": (*SEPARATE, f"trainer.max_staleness={staleness}") for staleness in (0, 1)
}
"""Overrides of ``config.yaml`` by the name in table and plot."""
PAGE = """# Learning one step off policy

Held-out accuracy on the demo's task (chain_sum of reasoning-gym) before and after GRPO with actor and rollout in
separate groups, on policy and one step off policy ([placement](placement.md#one-step-off-policy)), by
`python -m examples.ppo.off_policy`; one line of the plot is one seed.

{table}

![Held-out accuracy over steps](img/learning-off-policy.png)

The seconds are medians over steps and seeds, with one process for each role on cores that other programs used too. The
responses of this task have four tokens, so generation is a small part of a step: `benchmarks/one_step_off.py` measures
steps in which it is not.

{seconds}
"""


def medians(directory: Path) -> tuple[float, float]:
    """Return the median seconds of a step of a complete run, and of its wait for responses."""
    steps = [each for each in read_metrics(directory / "metrics.jsonl") if "timing_s/step" in each]
    step, generate = (statistics.median(each[f"timing_s/{name}"] for each in steps) for name in ("step", "generate"))
    return step, generate


def write(curves: Mapping[str, Mapping[int, Curve]], runs: Path, docs: Path) -> None:
    """Write ``learning-off-policy.md`` and ``img/learning-off-policy.png``."""
    draw(curves, docs / "img" / "learning-off-policy.png")
    rows = ["| run | a step | of it, waiting for responses |", "|---|---:|---:|"]
    for name, of_seeds in curves.items():
        seconds = zip(*(medians(runs / f"{name}-{seed}") for seed in of_seeds), strict=True)
        step, generate = (statistics.median(each) for each in seconds)
        rows.append(f"| `{name}` | {step:.2f} s | {generate:.2f} s |")
    text = PAGE.format(table=learning_table(curves), seconds="\n".join(rows))
    (docs / "learning-off-policy.md").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the table and the plot of all complete runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--runs", type=Path, default=Path("runs/off_policy"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--overrides", nargs="*", default=[], help="more key=value of examples.ppo.main")
    given = parser.parse_args(arguments)
    runs = given.runs.resolve()
    curves: dict[str, dict[int, Curve]] = {}
    for seed in given.seeds:
        for name, settings in SETTINGS.items():
            directory = runs / f"{name}-{seed}"
            trained(settings, seed, directory, given.overrides)
            curves.setdefault(name, {})[seed] = curve(directory)
            write(curves, runs, given.docs)


if __name__ == "__main__":
    main()
