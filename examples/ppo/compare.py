"""Train the algorithms on the demo's task with fixed seeds, print a table and plot the held-out accuracy.

    python -m examples.ppo.compare [--algorithms grpo rloo] [--seeds 101 102] [--runs runs/compare]

Every run is ``python -m examples.ppo.main`` with one process for each role. A run that is complete in ``--runs`` is not
repeated, so an interrupted comparison continues where it ended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

__all__ = ["ALGORITHMS", "Curve", "curve", "draw", "learning_table", "trained"]

SEEDS = (101, 102, 103, 104, 105)
"""Seeds that were not used to choose settings."""
ONE_PROCESS = ("layout=1", "actor_rollout_ref.parallel={tp: 1, pp: 1}", "trackers=[jsonl]")
NO_CRITIC = (
    *("trainer.critic_warmup=0", "algorithm.lam=1.0"),
    *("algorithm.use_kl_in_reward=false", "actor_rollout_ref.use_kl_loss=false"),
)
GROUPS = (*NO_CRITIC, "data.train_batch_size=128", "actor_rollout_ref.rollout.n=8")
ALGORITHMS: Mapping[str, Sequence[str]] = {
    "gae": (),
    "grpo": ("algorithm.adv_estimator=grpo", *GROUPS),
    "rloo": ("algorithm.adv_estimator=rloo", *GROUPS),
    "reinforce_plus_plus": ("algorithm.adv_estimator=reinforce_plus_plus", *NO_CRITIC),
    "dapo": (
        "algorithm.adv_estimator=grpo",
        *GROUPS,
        "actor_rollout_ref.clip_ratio_high=0.28",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=accuracy",
        "algorithm.filter_groups.max_batches=3",
        "algorithm.overlong.buffer=1",
        "algorithm.overlong.penalty=0.5",
    ),
}
"""Overrides of ``config.yaml`` for every algorithm; each trains on 1024 responses a step."""

Curve = Sequence[tuple[int, float]]


def trained(algorithm: Sequence[str], seed: int, directory: Path, overrides: Sequence[str]) -> None:
    """Run one algorithm, given as overrides, with one seed, unless its directory has a complete run."""
    if (directory / "summary.json").is_file():
        return
    shutil.rmtree(directory, ignore_errors=True)
    settings = [*ONE_PROCESS, *algorithm, f"seed={seed}", f"run_dir={directory}", *overrides]
    subprocess.run([sys.executable, "-m", "examples.ppo.main", *settings], check=True)


def curve(directory: Path) -> Curve:
    """Return the held-out accuracy by step of a complete run."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [(each["global_step"], each["held_out/accuracy"]) for each in records if "held_out/accuracy" in each]


def learning_table(curves: Mapping[str, Mapping[int, Curve]]) -> str:
    """Return a table in Markdown: runs, mean accuracy before and after, mean gain and smallest gain of each algorithm.

    Args:
        curves: of every run, by algorithm and seed.
    """
    rows = [
        "| algorithm | seeds | accuracy before | after | mean gain | smallest gain |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for algorithm, of_seeds in curves.items():
        ends = [(points[0][1], points[-1][1]) for points in of_seeds.values()]
        gains = [after - before for before, after in ends]
        before, after = (statistics.mean(side) for side in zip(*ends, strict=True))
        seeds = ", ".join(map(str, of_seeds))
        numbers = " | ".join(f"{value:.3f}" for value in (before, after, statistics.mean(gains), min(gains)))
        rows.append(f"| `{algorithm}` | {seeds} | {numbers} |")
    return "\n".join(rows)


def draw(curves: Mapping[str, Mapping[int, Curve]], path: Path) -> None:
    """Draw the held-out accuracy over the steps of each algorithm: the mean of its seeds, and the least to the most."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for algorithm, of_seeds in curves.items():
        steps = [step for step, _ in next(iter(of_seeds.values()))]
        accuracies = list(zip(*([accuracy for _, accuracy in points] for points in of_seeds.values()), strict=True))
        (line,) = axes.plot(steps, [statistics.mean(at_step) for at_step in accuracies], label=algorithm)
        least, most = zip(*((min(at_step), max(at_step)) for at_step in accuracies), strict=True)
        axes.fill_between(steps, least, most, color=line.get_color(), alpha=0.1, linewidth=0)
    axes.set(xlabel="step", ylabel="held-out accuracy, greedy", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table and plot of all complete runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"))
    parser.add_argument("--overrides", nargs="*", default=[], help="more key=value of examples.ppo.main")
    given = parser.parse_args(arguments)
    runs = given.runs.resolve()
    curves: dict[str, dict[int, Curve]] = {}
    for seed in given.seeds:
        for algorithm in given.algorithms:
            directory = runs / f"{algorithm}-{seed}"
            trained(ALGORITHMS[algorithm], seed, directory, given.overrides)
            curves.setdefault(algorithm, {})[seed] = curve(directory)
    draw(curves, runs / "learning.png")
    print(learning_table(curves))


if __name__ == "__main__":
    main()
