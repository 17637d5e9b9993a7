"""Convert a Hugging Face directory into a Megatron checkpoint, or the reverse.

examples: mcontroller convert Qwen3-0.6B checkpoint --tp 2
          mcontroller convert checkpoint Qwen3-trained --like Qwen3-0.6B

A Megatron checkpoint can be loaded in any layout, whatever the layout of the processes that wrote it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mcontroller.errors import ConfigError, DataError
from mcontroller.files import check_new_directory
from workers.config import ActorConfig, ModelConfig, ParallelConfig
from workers.config.model import model_config_from_hf

if TYPE_CHECKING:
    from mcontroller.group import WorkerGroup

AXES = {"tp": "tensor parallelism", "pp": "pipeline parallelism", "ep": "expert parallelism"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face directory, or a Megatron checkpoint")
    parser.add_argument("target", metavar="TARGET", help="the directory to write, which is new or empty")
    parser.add_argument("--like", metavar="HF_DIR", help="a Hugging Face directory of the same model, to write one")
    parser.add_argument("--dtype", help="type of the weights: float32, bfloat16 or float16; default: the source's")
    add_layout_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Convert, and return the exit status."""
    check_new_directory(arguments.target)
    source, target = Path(arguments.source).resolve(), str(Path(arguments.target).resolve())
    if not source.is_dir():
        raise DataError(f"{arguments.source} is not a directory", path=arguments.source)
    changes = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    if (source / "config.json").is_file():
        on_workers(model_config_from_hf(source, **changes), arguments, lambda group: _save(group, target))
    elif arguments.like is None:
        raise ConfigError(
            f"{arguments.source} has no config.json, so it is read as a Megatron checkpoint: pass --like with a "
            "Hugging Face directory of the same model, whose config.json and tokenizer are used",
            key="--like",
        )
    else:
        model = model_config_from_hf(arguments.like, **changes)
        on_workers(model, arguments, lambda group: _export(group, str(source), target))
    sys.stdout.write(f"{arguments.source} is converted into {target}\n")
    return 0


def _save(group: WorkerGroup, target: str) -> None:
    group.save_checkpoint(target)


def _export(group: WorkerGroup, source: str, target: str) -> None:
    group.load_checkpoint(source)
    group.export_hf(target)


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
