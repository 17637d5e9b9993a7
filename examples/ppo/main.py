"""PPO from one command: a small GPT learns arithmetic on real Megatron ranks in Ray worker processes.

python -m examples.ppo.main [layout=8] [seed=1] [key.of.a.field=value ...]
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import ray
from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape

from examples.ppo.config import Config, check_vocabulary, read_config
from examples.ppo.data import Demonstrations, Problems, Prompts, make_problems
from examples.ppo.report import write_report
from examples.ppo.reward import ReasoningGymReward
from examples.ppo.tokenizer import CharTokenizer
from mcontroller import ResourcePoolManager, Role
from mcontroller.errors import ConfigError, MControllerError
from mcontroller.ppo import ProgressDisplay, RayPPOTrainer
from mcontroller.ppo.run_record import read_record
from mcontroller.trackers import Run, make_trackers
from workers import ActorRolloutRefWorker, CriticWorker

INTERRUPTED = 130


def main(arguments: Sequence[str], console: Console) -> int:
    """Run the example and return the exit status. No process of it is left, however it ends."""
    try:
        config = read_config(arguments)
        problems = make_problems(config.problems)
        tokenizer = _tokenizer(problems)
        check_vocabulary(config, tokenizer.vocab_size)
        run(config, problems, tokenizer, console)
    except MControllerError as error:
        console.print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: all processes of the run have ended", highlight=False)
        return INTERRUPTED
    return 0


def run(config: Config, problems: Problems, tokenizer: CharTokenizer, console: Console) -> None:
    """Train, validate, and write the run directory."""
    started = time.perf_counter()
    directory = Path(config.run_dir or f"runs/ppo-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    _check_unused(directory, config)
    config = config.within(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    tokenizer.save(directory / "tokenizer.json")
    trainer = make_trainer(config, problems, tokenizer, directory, console)
    try:
        with trainer:
            with trainer.stages("start"):
                start_ray(config)
            trainer.init_workers()
            trainer.fit()
    finally:
        ray.shutdown()
    write_report(directory, trainer.stages.totals, time.perf_counter() - started, console)


def make_trainer(
    config: Config, problems: Problems, tokenizer: CharTokenizer, directory: Path, console: Console
) -> RayPPOTrainer:
    """Return the trainer over one pool: actor and reference in one slot of each bundle, the critic in the other."""
    rollout = config.actor_rollout_ref.rollout
    pool = config.pool
    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={Role.ActorRolloutRef: ActorRolloutRefWorker, Role.Critic: CriticWorker},
        resource_pool_manager=ResourcePoolManager(
            resource_pool_spec={"pool": pool.process_on_nodes},
            mapping={Role.ActorRolloutRef: "pool", Role.Critic: "pool"},
            use_gpu=pool.use_gpu,
            max_colocate_count=pool.max_colocate_count,
            isolate_gpus=pool.isolate_gpus,
        ),
        reward_fn=ReasoningGymReward(problems.scorer, tokenizer),
        train_dataset=Prompts(problems.train, tokenizer, rollout.prompt_length),
        val_dataset=Prompts(problems.held_out, tokenizer, rollout.prompt_length),
        warm_up_dataset=Demonstrations(problems.train, tokenizer, rollout.prompt_length, rollout.response_length),
        trackers=make_trackers(config.trackers, _run_of_trackers(config, directory)),
        display=ProgressDisplay(console),
    )


def start_ray(config: Config) -> None:
    """Connect to the cluster of the configuration, or start one on this machine for this run only."""
    cluster, pool = config.cluster, config.pool
    if cluster.address is not None:
        ray.init(address=cluster.address, log_to_driver=False)
        return
    ray.init(
        address="local",
        num_cpus=cluster.num_cpus or sum(pool.process_on_nodes) * pool.max_colocate_count,
        object_store_memory=cluster.object_store_memory,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def _run_of_trackers(config: Config, directory: Path) -> Run:
    trainer = config.trainer
    resumed_at = read_record(Path(trainer.default_local_dir)).last.global_steps if trainer.resume else None
    return Run(directory, name=directory.name, config=dataclasses.asdict(config), resumed_at=resumed_at)


def _tokenizer(problems: Problems) -> CharTokenizer:
    return CharTokenizer.of(
        [entry["question"] for entry in (*problems.train, *problems.held_out)],
        [entry["answer"] for entry in (*problems.train, *problems.held_out)],
    )


def _check_unused(directory: Path, config: Config) -> None:
    """Raise ConfigError if the directory contains another run and this one does not resume it."""
    if (directory / "metrics.jsonl").exists() and not config.trainer.resume:
        raise ConfigError(
            f"run_dir {directory} contains a run already: set another one, or resume it with trainer.resume=true",
            key="run_dir",
            value=str(directory),
        )


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM and SIGINT like Ctrl-C, even if the parent process made this one ignore SIGINT."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.exit(main(sys.argv[1:], Console()))
