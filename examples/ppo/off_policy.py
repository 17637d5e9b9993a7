"""Train the demo's task on policy and up to four updates off, and print a table and plot the held-out accuracy.

    python -m examples.ppo.off_policy [--seeds 101 102 103] [--names max_staleness=0] [--runs runs/off_policy]

GRPO with actor and rollout in separate groups, and truncated importance sampling by token. The runs differ in
``trainer.max_staleness`` and ``trainer.asynchronous.partial`` alone; from 2 on, the order of events is simulated. A run
takes one process, and has the same result each time. Complete runs are not repeated; the table and
``learning-off-policy.png`` in the folder of the runs have the complete runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.ppo.compare import ALGORITHMS, ONE_PROCESS, Curve, curve, draw
from examples.ppo.main import CONFIG
from examples.ppo.report import accuracy_before_and_after, read_metrics
from mcontroller import LocalWorkerGroup
from trainer import RayPPOTrainer
from trainer.run.config import read_run_config
from trainer.run.parts import make_parts
from trainer.run.pools import pools_of
from trainer.trackers import Run, make_trackers

__all__ = ["SETTINGS", "main"]

SEEDS = (101, 102, 103)
SEPARATE = (*ALGORITHMS["grpo"], "rollout=${actor_rollout_ref}", "algorithm.importance.level=token")
SMALL_STEPS = (
    "trainer.total_training_steps=96",
    "trainer.test_freq=8",
    "actor_rollout_ref.ppo_epochs=1",
    "actor_rollout_ref.optim.lr=5.0e-4",
    "actor_rollout_ref.optim.min_lr=5.0e-5",
    "actor_rollout_ref.optim.total_steps=384",
)
"""A step moves the policy less than the demo's does, with which four steps in a row are far off policy."""
SIMULATED = "{{schedule: simulated, partial: {partial}}}"
SETTINGS: Mapping[str, Sequence[str]] = {
    f"max_staleness={staleness}": (*SEPARATE, *SMALL_STEPS, f"trainer.max_staleness={staleness}")
    for staleness in (0, 1)
} | {
    f"max_staleness={staleness}, {partial}": (
        *(*SEPARATE, *SMALL_STEPS, f"trainer.max_staleness={staleness}"),
        f"trainer.asynchronous={SIMULATED.format(partial=partial)}",
    )
    for staleness in (2, 4)
    for partial in ("continue", "finish", "stop")
}
"""Overrides of ``config.yaml`` by the name in table and plot."""


def trained(settings: Sequence[str], seed: int, directory: Path) -> None:
    """Run one setting with one seed in this process, unless its directory has a complete run."""
    if (directory / "summary.json").is_file():
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    others = (f"seed={seed}", f"run_dir={directory}", "trainer.trace=false", "trainer.save_freq=-1")
    config = read_run_config(CONFIG, [*ONE_PROCESS, *settings, *others]).within(directory)
    parts = make_parts(config)
    trainer = RayPPOTrainer(
        *(config, parts.tokenizer, parts.roles, pools_of(config, parts.roles)),
        lambda pool, init, name_prefix: LocalWorkerGroup(init, 1, name_prefix=name_prefix),
        parts.rewards,
        train_dataset=parts.train,
        val_dataset=parts.val,
        warm_up_dataset=parts.warm_up,
        trackers=make_trackers(config.trackers, Run(directory, name=directory.name, config={})),
    )
    try:
        with trainer:
            trainer.init_workers()
            trainer.fit()
    finally:
        if parts.rewards is not None:
            parts.rewards.close()
    before, after = accuracy_before_and_after(read_metrics(directory / "metrics.jsonl"))
    (directory / "summary.json").write_text(json.dumps({"accuracy_before": before, "accuracy_after": after}))


def table(curves: Mapping[str, Mapping[int, Curve]], runs: Path) -> str:
    """Return the accuracy of each setting, and how many updates its oldest token of a response is behind."""
    rows = [
        "| run | updates behind, mean | accuracy before | after, mean | over synchronous | after, each seed |",
        "|---|---:|---:|---:|---:|---|",
    ]
    synchronous = {seed: points[-1][1] for seed, points in curves[next(iter(SETTINGS))].items()}
    for name, of_seeds in curves.items():
        lines = [line for seed in of_seeds for line in read_metrics(runs / f"{name}-{seed}" / "metrics.jsonl")]
        behind = [line["training/staleness_mean"] for line in lines if "training/staleness_mean" in line]
        before, after = zip(*((points[0][1], points[-1][1]) for points in of_seeds.values()), strict=True)
        numbers = f"{statistics.mean(before):.3f} | {statistics.mean(after):.3f}"
        each = ", ".join(f"{seed}: {value:.3f}" for seed, value in zip(of_seeds, after, strict=True))
        gain = statistics.mean(points[-1][1] - synchronous[seed] for seed, points in of_seeds.items())
        rows.append(f"| `{name}` | {statistics.mean(behind or [0.0]):.2f} | {numbers} | {gain:+.3f} | {each} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table and plot of all complete runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--names", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--runs", type=Path, default=Path("runs/off_policy"))
    parser.add_argument("--overrides", nargs="*", default=[], help="more key=value of examples.ppo.main")
    given = parser.parse_args(arguments)
    runs = given.runs.resolve()
    curves: dict[str, dict[int, Curve]] = {}
    for name in dict.fromkeys([next(iter(SETTINGS)), *given.names]):
        for seed in given.seeds:
            directory = runs / f"{name}-{seed}"
            trained([*SETTINGS[name], *given.overrides], seed, directory)
            curves.setdefault(name, {})[seed] = curve(directory)
    draw(curves, runs / "learning-off-policy.png")
    print(table(curves, runs))


if __name__ == "__main__":
    main()
