"""Every benchmark in its smallest size: the equality or limit that it prints holds. No test asserts a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import (
    asynchronous,
    checkpoints,
    models,
    parity,
    roundtrip,
    scale,
    train_step,
    weights,
)
from benchmarks.parts import train_step_plain
from mcontroller import DataProto
from parallel_state import ParallelLayout
from tests.forking import run_ranks as run_forked
from tests.ranks import run_ranks
from tests.workers.roles import be_a_worker, callable_directly
from workers import ActorRolloutRefWorker

SMALL_ACTOR = {"hidden_size": 64, "ffn_hidden_size": 64, "num_layers": 2, "num_attention_heads": 2}


@pytest.mark.simulated
def test_parity_of_a_layout_is_within_the_tolerance() -> None:
    _, passed = parity.table("float32", ["TP2"], run_ranks)
    assert passed


@pytest.mark.simulated
def test_a_model_loads_exports_and_generates_as_transformers_does(tmp_path: Path) -> None:
    load, export, log_probs, gradients, *packed, tokens = models.row(models.Reference("llama", tmp_path), "TP2 with SP")
    assert (load, export, tokens) == ("equal", "equal", "same tokens")
    assert all(float(difference) <= 1e-5 for difference in (log_probs, gradients, *packed))


@pytest.mark.simulated
def test_a_training_step_is_that_of_the_plain_loop() -> None:
    model = train_step_plain.model_of(hidden=64, layers=2, sequence=8)
    plain, controlled = (run_ranks(side, train_step_plain.WORLD_SIZE, model) for side in (plain_steps, steps_of_worker))
    for name in ("losses", "norms"):
        sides = [[train_step.Round(0.0, *ranks[-1][0])] for ranks in (plain, controlled)]
        assert train_step.largest_difference(*sides, name) <= train_step.TOLERANCE
    assert [products for _, products in plain] == [products for _, products in controlled]


@pytest.mark.usefixtures("ray_cluster")
def test_a_call_returns_the_column_that_bare_ray_returns() -> None:
    layout = ParallelLayout(2, pp=2)
    with roundtrip.RayResourcePool([2], use_gpu=False) as pool, roundtrip.group_of(layout, pool) as group:
        bare = roundtrip.BareRay(layout)
        assert roundtrip.same_columns(group, bare, roundtrip.make_batch(0.2))
        bare.close()


@pytest.mark.usefixtures("ray_cluster")
def test_light_endpoints_answer_a_call() -> None:
    process = scale.LightProcess()
    group = scale.light_group(scale.start_light([process], 8))
    assert group.empty() == [None] * 8
    group.shutdown()
    process.process.kill()
    process.process.join()


@pytest.mark.usefixtures("ray_cluster")
def test_a_transfer_of_weights_sends_no_more_than_the_target_has() -> None:
    reports, nbytes = weights.measure({}, {}, hidden=64, rounds=1)
    for report in reports:
        assert 0 < report.bytes_sent <= nbytes
        assert weights.buckets(report) <= 2
        assert report.verify_seconds is not None


@pytest.mark.processes
def test_loads_restore_the_weights_that_were_saved(tmp_path: Path) -> None:
    ranks = run_forked(checkpoints.measure, 2, str(tmp_path), SMALL_ACTOR, {"tp": 2}, 1, False)
    assert [rank["difference"] for rank in ranks] == [0.0, 0.0]
    assert all(rank["written"] > 0 for rank in ranks)


def test_a_controller_keeps_nothing_of_trajectories_that_were_trained_on() -> None:
    costs = asynchronous.controller(in_flight=64, steps=8)
    assert [cost.rows for cost in costs] == [16] * 8
    assert all(cost.recorded < 9 * cost.tokens + 4096 for cost in costs)
    assert costs[-1].objects - costs[3].objects < 16  # less than one of each that four steps train on


class Products(TorchDispatchMode):
    """Counts the products of matrices of the layers by operation and shapes.

    Not those of the output layer, which the plain loop runs over the last column of a row too.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vocabulary = model.vocab_size // train_step_plain.PARALLEL.tp
        self.counts: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("mm", "linear")):
            shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
            self.counts[str(func), shapes] += not any(self.vocabulary in shape for shape in shapes)
        return func(*args, **(kwargs or {}))


def plain_steps(model: Any) -> Any:
    """Return losses and norms of two steps on this rank, and the products of a third."""
    loop = train_step_plain.PlainLoop(model)
    with loop.context.activate():
        made = [loop.step(train_step_plain.batch_of(step, model)) for step in range(2)]
        with Products(model) as products:
            loop.step(train_step_plain.batch_of(2, model))
    losses, norms = zip(*made, strict=True)
    return (list(losses), list(norms)), products.counts


def steps_of_worker(model: Any) -> Any:
    """Return the same of a worker of the controller."""
    be_a_worker()
    worker = callable_directly(ActorRolloutRefWorker(train_step.config_of(model), "actor"))
    worker.init_model()

    def step(number: int) -> dict[str, float]:
        group = worker.context.pg.dp
        rows = DataProto.from_dict(train_step_plain.batch_of(number, model)).chunk(group.size())[group.rank()]
        made = worker.update_sft(rows)
        return {} if made is None else made.meta_info["metrics"]

    metrics = [step(number) for number in range(2)]
    with Products(model) as products:
        step(2)
    losses, norms = ([made.get(f"sft/{name}", 0.0) for made in metrics] for name in ("loss", "grad_norm"))
    return (losses, norms), products.counts


@pytest.mark.processes
@pytest.mark.parametrize(("program", "error"), [("train_step_plain.py", ""), ("train_step_gpu.py", "torch ")])
def test_a_part_finds_its_modules_by_itself_and_ends_early_without_a_gpu(
    tmp_path: Path, program: str, error: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, Path(train_step_plain.__file__).with_name(program), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == bool(error) and done.stderr.startswith(error)
