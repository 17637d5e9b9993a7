"""Weights between Hugging Face directories and Megatron's checkpoints, by worker processes in any layout."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from workers.config import ActorConfig, ModelConfig, ParallelConfig

if TYPE_CHECKING:
    from mcontroller.group import WorkerGroup

AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "ep": "expert parallelism",
}


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the layout of the processes that convert."""
    for axis, meaning in AXES.items():
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{meaning} of the processes; default: 1")
    parser.add_argument("--use-gpu", action="store_true", help="load the model into GPUs instead of host memory")


def layout_of_arguments(arguments: argparse.Namespace) -> tuple[ParallelConfig, int]:
    """Return the layout of the arguments and its smallest number of processes."""
    sizes = {axis: getattr(arguments, axis) for axis in AXES}
    return ParallelConfig(**sizes, sequence_parallel=sizes["tp"] > 1), sizes["tp"] * sizes["pp"] * sizes["ep"]


def on_workers(model: ModelConfig, arguments: argparse.Namespace, action: Callable[[WorkerGroup], object]) -> None:
    """Start a group with the model, without optimizer, call ``action`` with it, and end it.

    Args:
        model: the model, whose weights are read from its ``hf_path``.
        arguments: the layout, of ``add_layout_arguments``.
        action: called with the group after ``init_model``.
    """
    import ray  # here, so that help and mistakes do not wait for it, nor for torch

    from mcontroller.ray.class_with_init import RayClassWithInitArgs
    from mcontroller.ray.resource_pool import RayResourcePool
    from mcontroller.ray.worker_group import MegatronRayWorkerGroup
    from workers.actor import ActorRolloutRefWorker

    parallel, world_size = layout_of_arguments(arguments)
    starts = not ray.is_initialized()
    if starts:
        ray.init(
            "local", num_cpus=world_size, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING
        )
    try:
        pool = RayResourcePool([world_size], use_gpu=arguments.use_gpu)
        worker = RayClassWithInitArgs(ActorRolloutRefWorker, ActorConfig(model=model, parallel=parallel), "rollout")
        with MegatronRayWorkerGroup(pool, worker, name_prefix="convert") as group:
            group.init_model()
            action(group)
        pool.shutdown()
    finally:
        if starts:
            ray.shutdown()
