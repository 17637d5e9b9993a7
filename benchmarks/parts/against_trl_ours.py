"""The project's side of ``against_trl.py``: the run that ``python -m mcontroller train`` makes of a configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from benchmarks.against_trl import PROMPT, PROMPTS, RESPONSE, SAMPLES, Blocks, Settings, share_correct
from mcontroller.config.load import load_config
from trainer.lifecycle import Callback, RunLifecycle
from trainer.run.config import RunConfig
from trainer.run.parts import make_parts
from trainer.run.training import make_trainer, start_ray


def reward(prompt: str, response: str) -> float:
    """Return the reward of a response; called in the processes of the reward functions."""
    return share_correct(prompt, response)


def configuration(settings: Settings) -> RunConfig:
    """Return the configuration of the run."""
    actor = {
        "model": {"hf_path": str(settings.model), "max_sequence_length": PROMPT + RESPONSE},
        "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "n": SAMPLES, "seed": settings.seed},
        "optim": {"lr": settings.lr, "betas": [0.9, 0.999], "weight_decay": 0.0, "clip_grad": 1.0},
        "ppo_mini_batch_prompts": PROMPTS,
        "ppo_micro_batch_size": settings.micro_batch // settings.ranks,
        "use_kl_loss": False,
        "seed": settings.seed,
    }
    return load_config(
        RunConfig,
        {
            "actor_rollout_ref": actor,
            "algorithm": {"adv_estimator": "grpo"},
            "data": {"train": {"path": str(settings.prompts)}, "train_batch_size": PROMPTS, "seed": settings.seed},
            "tokenizer": {"kind": "huggingface"},
            "rewards": {"functions": {"task": {"function": f"{__file__}:reward"}}, "processes": 1},
            "pool": {"process_on_nodes": [settings.ranks], "threads": settings.threads},
            "trainer": {"total_training_steps": settings.steps, "save_freq": -1, "test_freq": -1},
        },
    )


class Stepping(Callback):
    """Runs the trainer in the blocks of the parent."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def started(self, trainer: RunLifecycle) -> None:
        if not self.blocks.start():
            trainer.stop()

    def step_ended(self, trainer: RunLifecycle, metrics: dict[str, float]) -> None:
        if not self.blocks.step_ended(metrics["train/score"]):
            trainer.stop()


def run(settings: Settings) -> None:
    """Train in blocks until the parent ends them, and print the seconds of every stage."""
    config, directory = configuration(settings), Path(settings.socket).with_suffix(".run")
    directory.mkdir()
    config = config.within(directory)
    parts = make_parts(config)
    trainer = make_trainer(config, parts, directory, Console(quiet=True))
    trainer.callbacks = [Stepping(Blocks(settings.socket))]
    with trainer:
        start_ray(config)
        trainer.init_workers()
        trainer.fit()
    totals: dict[str, Any] = dict(trainer.stages.totals)
    print("seconds by stage: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in totals.items()), flush=True)
    if parts.rewards is not None:
        parts.rewards.close()
    ray.shutdown()


if __name__ == "__main__":
    run(Settings.parsed(sys.argv[1]))
