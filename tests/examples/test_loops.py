"""Each loop of examples/loops learns in seconds, on one rank in the calling process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.loops import grpo
from mcontroller.testing import simulated_worker_group
from workers import ActorConfig, ActorRolloutRefWorker

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from examples.loops import asynchronous, best_of_n, distillation, dpo, grpo
loops = {module.__name__.rpartition(".")[2]: module for module in (asynchronous, best_of_n, distillation, dpo, grpo)}
curves = {name: loop.main() for name, loop in loops.items()}
distillation.TOP_K, distillation.STEPS = 4, 25
curves["distillation of 4 tokens"] = distillation.main()
sys.stderr.write(json.dumps(curves))
"""


@pytest.fixture(scope="module")
def curves() -> dict[str, list[Any]]:
    """What each loop returns; in another process, in which they initialize torch.distributed."""
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=one, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.processes
@pytest.mark.parametrize(("loop", "least"), [("grpo", 0.6), ("best_of_n", 0.55), ("asynchronous", 0.6)])
def test_a_loop_with_rewards_raises_the_score(curves: dict[str, list[Any]], loop: str, least: float) -> None:
    assert mean(curves[loop][:3]) < 0.2 and mean(curves[loop][-5:]) > least


@pytest.mark.processes
def test_dpo_starts_at_log_2_and_prefers_the_chosen_responses(curves: dict[str, list[Any]]) -> None:
    assert curves["dpo"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert curves["dpo"][-1] < 0.01


@pytest.mark.processes
@pytest.mark.parametrize("loop", ["distillation", "distillation of 4 tokens"])
def test_distillation_brings_the_student_to_the_teacher(curves: dict[str, list[Any]], loop: str) -> None:
    kl, score = zip(*curves[loop], strict=True)
    assert kl[0] > 3 and mean(kl[-5:]) < 0.5 and mean(score[-5:]) > 0.9


@pytest.mark.simulated
def test_a_loop_on_two_ranks_computes_what_it_does_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(ranks: int) -> list[float]:
        def start(config: ActorConfig, role: str) -> Any:
            return simulated_worker_group(ActorRolloutRefWorker, ranks, config, role=role)

        monkeypatch.setattr(grpo, "START", start)
        return grpo.main()

    monkeypatch.setattr(grpo, "STEPS", 6)
    assert simulated(1) == simulated(2)  # sampled with the same random numbers, from weights that differ by rounding
