"""A step one step off policy (trainer.max_staleness=1): its seconds over the longer of generation and training.

    python benchmarks/one_step_off.py [--steps 6] [--kind sleeping real]

Actor and rollout have a pool each. ``sleeping``: their methods sleep. ``real``: they are Megatron models of one
single-threaded rank each, which need a core each. ``generation`` and ``training`` (everything else but the transfer of
weights) are the medians of the synchronous trainer, which runs first in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import ray
import torch

from mcontroller import DataProto, Dispatch, MegatronRayWorkerGroup, RayWorkerGroup, register
from mcontroller.ray import ResourcePoolManager
from trainer import AlgorithmConfig, DataConfig, ImportanceConfig, PPOConfig, RayPPOTrainer, Role, TrainerConfig
from trainer.rewards.reward import Reward, outcome_scores
from workers import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.role_worker import RoleWorker

ROWS, SAMPLES, PROMPT, RESPONSE = 16, 4, 32, 96
SECONDS = {"generate_sequences": 1.5, "compute_log_prob": 0.4, "update_actor": 1.0}


class NothingSent:
    """A transfer of weights that takes no time."""

    policy_version = 0

    def run(self) -> NothingSent:
        return self

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class SleepingPolicy(RoleWorker):
    """An actor or a rollout whose methods sleep."""

    def __init__(self, config: None, role: str) -> None:
        pass

    @classmethod
    def check_transfer(cls, *_: Any) -> None:
        pass

    @classmethod
    def open_transfer(cls, *_: Any, **__: Any) -> NothingSent:
        return NothingSent()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        time.sleep(SECONDS["generate_sequences"])
        meta = prompts.meta_info
        prompts = prompts.repeat(SAMPLES)
        ids = prompts.batch["input_ids"]
        responses = torch.zeros(len(ids), RESPONSE, dtype=torch.long)
        whole = torch.cat((ids, responses), 1)
        columns = {"responses": responses, "response_mask": torch.ones_like(responses), "input_ids": whole}
        columns |= {"attention_mask": torch.ones_like(whole), "rollout_log_probs": torch.zeros(responses.shape)}
        columns["policy_version"] = torch.zeros(len(ids), dtype=torch.long)
        return DataProto.from_dict(columns, meta_info=meta)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        time.sleep(SECONDS["compute_log_prob"])
        return DataProto.from_dict({"old_log_probs": torch.zeros(data.batch["responses"].shape)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        time.sleep(SECONDS["update_actor"])
        return DataProto(meta_info={"metrics": {"rows": float(len(data))}})


def first_token(batch: DataProto) -> Reward:
    scores = (batch.batch["responses"][:, 0] % 2).float()
    return Reward(outcome_scores(scores, batch.batch["response_mask"]))


class Tokenizer:
    eos_token_id = 1
    pad_token_id = 0


def actor_config() -> ActorConfig:
    model = {"vocab_size": 512, "max_sequence_length": PROMPT + RESPONSE, "num_layers": 4, "hidden_size": 128}
    model |= {"num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 512}
    rollout = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3, "n": SAMPLES}
    sizes = {"ppo_mini_batch_size": ROWS * SAMPLES, "ppo_micro_batch_size": 8}
    return load_config(ActorConfig, {"model": model, "optim": {"lr": 1e-4}, "rollout": rollout, **sizes})


def trainer_of(kind: str, staleness: int) -> RayPPOTrainer:
    worker: Any = SleepingPolicy if kind == "sleeping" else ActorRolloutRefWorker
    roles = {Role.Actor: worker, Role.Rollout: worker}
    settings: Any = 0 if kind == "sleeping" else actor_config()
    config = PPOConfig(
        actor_rollout_ref=settings,
        rollout=settings,
        data=DataConfig(train_batch_size=ROWS),
        algorithm=AlgorithmConfig(adv_estimator="grpo", importance=ImportanceConfig(level="token")),
        trainer=TrainerConfig(total_training_steps=1, save_freq=-1, max_staleness=staleness),
    )
    names = {role: f"{role.name}-{staleness}" for role in roles}
    ids = torch.arange(PROMPT) + 2
    return RayPPOTrainer(
        config,
        Tokenizer(),
        roles,
        ResourcePoolManager({name: [1] for name in names.values()}, names, use_gpu=False, threads=1),
        ray_worker_group_cls=RayWorkerGroup if kind == "sleeping" else MegatronRayWorkerGroup,
        reward_fn=first_token,
        train_dataset=[{"input_ids": ids, "attention_mask": torch.ones_like(ids)}] * ROWS,
    )


def step(trainer: RayPPOTrainer) -> dict[str, float]:
    metrics = trainer.train_step(trainer.draw())
    return {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}


def median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(each.get(name, 0.0) for each in steps)


def report(kind: str, count: int) -> None:
    found: dict[int, list[dict[str, float]]] = {}
    for staleness in (0, 1):
        with trainer_of(kind, staleness) as trainer:
            trainer.init_workers()
            step(trainer)
            step(trainer)
            found[staleness] = [step(trainer) for _ in range(count)]
    synchronous, ahead = found[0], found[1]
    generation = median(synchronous, "generate")
    training = statistics.median(each["step"] - each["generate"] - each.get("weights", 0.0) for each in synchronous)
    longer, step_s = max(generation, training), median(ahead, "step")
    weights = median(ahead, "weights")
    print(f"{kind:9} generation {generation:.2f} s  training {training:.2f} s  weights {weights:.3f} s")
    print(
        f"{'':9} step {step_s:.2f} s, synchronous {median(synchronous, 'step'):.2f} s; over the longer of both "
        f"{step_s / longer:.2f}, over the synchronous step {step_s / median(synchronous, 'step'):.2f}"
    )
    stages = {name: (median(synchronous, name), median(ahead, name)) for name in {**synchronous[0], **ahead[0]}}
    shown = (f"{name} {before:.2f}/{after:.2f}" for name, (before, after) in stages.items() if abs(after) >= 0.005)
    print(f"{'':9} seconds, synchronous/one step off: {'  '.join(shown)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kind", nargs="+", default=["sleeping", "real"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    for kind in arguments.kind:
        report(kind, arguments.steps)
    ray.shutdown()


if __name__ == "__main__":
    main()
