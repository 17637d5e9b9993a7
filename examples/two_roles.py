"""Two roles on the same bundles: each in its processes, and both in one. They train to the same loss.

python -m examples.two_roles
"""

from __future__ import annotations

import os
import time
from statistics import median

import psutil
import ray

from examples.loops.task import actor_config, problems, responses, right_answers
from mcontroller import (
    Dispatch,
    MegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    create_colocated_worker_cls_fused,
    register,
)
from trainer import supervised_rows
from workers import ActorRolloutRefWorker

RANKS, STEPS, PROMPTS = 2, 10, 32


class Role(ActorRolloutRefWorker):
    """An actor that reports its process."""

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> tuple[int, float]:
        """Return the id of the process, and its memory in MiB; a page that n processes share counts 1/n."""
        return os.getpid(), psutil.Process().memory_full_info().pss / 2**20


CLASSES = {
    "student": RayClassWithInitArgs(Role, actor_config(parallel={"tp": 2}), role="actor"),
    "teacher": RayClassWithInitArgs(Role, actor_config(), role="actor"),
}


def train(name: str, groups: list[MegatronRayWorkerGroup[Role]], began: float) -> float:
    """Train both roles in turn; print processes, memory, and seconds; return the last loss of the student."""
    for group in groups:
        group.init_model()
    ready, seconds = time.perf_counter() - began, []
    for step in range(STEPS):
        prompts = problems(PROMPTS, seed=step)
        rows = supervised_rows(responses(prompts, right_answers(prompts)))
        started = time.perf_counter()
        losses = [group.update_sft(rows).meta_info["metrics"]["sft/loss"][0] for group in groups]
        seconds.append(time.perf_counter() - started)
    processes = dict(process for group in groups for process in group.process())
    print(
        f"{name}: {len(processes)} processes, {sum(processes.values()):.0f} MiB, ready after {ready:.1f} s, "
        f"{1000 * median(seconds):.0f} ms a step, loss of the student {losses[0]:.4f}"
    )
    return float(losses[0])


def main() -> tuple[float, float]:
    """Train in both placements, and return the last losses."""
    ray.init("local", num_cpus=2 * RANKS, object_store_memory=200_000_000, log_to_driver=False)
    with RayResourcePool([1], use_gpu=False) as pool:  # the first process of a node imports what others are forked with
        MegatronRayWorkerGroup(pool, CLASSES["teacher"])
    began = time.perf_counter()
    with RayResourcePool([RANKS], use_gpu=False, max_colocate_count=2) as pool:  # a slot for each role
        groups = [MegatronRayWorkerGroup(pool, init, name_prefix=role) for role, init in CLASSES.items()]
        apart = train("a process for each role", groups, began)
    began = time.perf_counter()
    with RayResourcePool([RANKS], use_gpu=False) as pool:
        group = MegatronRayWorkerGroup(pool, create_colocated_worker_cls_fused(CLASSES))
        together = train("both in one process", [group.student, group.teacher], began)
    ray.shutdown()
    return apart, together


if __name__ == "__main__":
    main()
