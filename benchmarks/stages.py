"""A step of PPO with stages that overlap: its seconds next to the longest path of stages, and next to their sum.

    python benchmarks/stages.py [--steps 3] [--kind sleeping real]

``sleeping``: the roles' methods sleep, on a pool each: actor, reference, critic, reward model, and a reward function in
the controller. ``real``: actor, reference and critic are Megatron models of one single-threaded rank each; they need a
core each to overlap. The paths are computed from the stages of the same steps in sequential order, which run in the
same run: ``longest path`` is the sequence generate, the longest of the scoring stages, advantages, the longer of the
updates; ``sum`` is all stages. The seconds are medians over the steps after the first one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import ray
import torch

from mcontroller import DataProto, Dispatch, MegatronRayWorkerGroup, RayWorkerGroup, register
from mcontroller.ray import ResourcePoolManager
from trainer import AlgorithmConfig, DataConfig, KLControlConfig, PPOConfig, RayPPOTrainer, Role, TrainerConfig
from trainer.rewards.reward import Reward, outcome_scores, weighted_sum
from trainer.stages import SharedDevices
from workers import ActorRolloutRefWorker, CriticWorker
from workers.config import ActorConfig, CriticConfig, load_config
from workers.role_worker import RoleWorker

ROWS, PROMPT, RESPONSE = 32, 32, 96
SECONDS = {
    "generate_sequences": 0.5,
    "compute_log_prob": 0.6,
    "compute_ref_log_prob": 0.8,
    "compute_values": 1.0,
    "compute_rm_score": 0.4,
    "update_critic": 0.7,
    "update_actor": 0.9,
}
SCORING = ("old_log-probs", "reference", "values", "reward_model", "reward")
UPDATES = ("update_critic", "update_actor")


class Sleeping(RoleWorker):
    """A role whose methods sleep."""

    def __init__(self, config: None, **_: Any) -> None:
        pass

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        torch.set_num_threads(1)

    def sleep(self, method: str, data: DataProto, *names: str) -> DataProto:
        time.sleep(SECONDS[method])
        if not names:
            return DataProto(meta_info={"metrics": {"rows": float(len(data))}})
        return DataProto.from_dict({name: torch.zeros(data.batch["responses"].shape) for name in names})


class SleepingActor(Sleeping):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        time.sleep(SECONDS["generate_sequences"])
        ids = prompts.batch["input_ids"]
        responses = torch.zeros(len(ids), RESPONSE, dtype=torch.long)
        mask, whole = torch.ones_like(responses), torch.cat((ids, responses), 1)
        columns = {"responses": responses, "response_mask": mask, "input_ids": whole}
        return DataProto.from_dict({**columns, "attention_mask": torch.ones_like(whole)}, meta_info=prompts.meta_info)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self.sleep("compute_log_prob", data, "old_log_probs")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        return self.sleep("update_actor", data)


class SleepingReference(Sleeping):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self.sleep("compute_ref_log_prob", data, "ref_log_prob")


class SleepingCritic(Sleeping):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return self.sleep("compute_values", data, "values")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        return self.sleep("update_critic", data)


class SleepingModel(Sleeping):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        return self.sleep("compute_rm_score", data, "rm_scores")


SLEEPING = {
    Role.ActorRollout: SleepingActor,
    Role.RefPolicy: SleepingReference,
    Role.Critic: SleepingCritic,
    Role.RewardModel: SleepingModel,
}
REAL = {Role.ActorRollout: ActorRolloutRefWorker, Role.RefPolicy: ActorRolloutRefWorker, Role.Critic: CriticWorker}


def sleeping_reward(batch: DataProto) -> Reward:
    time.sleep(0.3)
    return first_token(batch)


def first_token(batch: DataProto) -> Reward:
    scores = (batch.batch["responses"][:, 0] % 2).float()
    return Reward(outcome_scores(scores, batch.batch["response_mask"]))


class InOrder(SharedDevices):
    """Every group competes with every other one: one stage runs after another."""

    def compete(self, left: Any, right: Any) -> bool:
        return True


class Tokenizer:
    eos_token_id = 1
    pad_token_id = 0


def configs() -> dict[str, Any]:
    model = {"vocab_size": 512, "max_sequence_length": PROMPT + RESPONSE, "num_layers": 4, "hidden_size": 128}
    model |= {"num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 512}
    common = {"model": model, "optim": {"lr": 1e-4}, "ppo_mini_batch_size": ROWS, "ppo_micro_batch_size": 8}
    actor = common | {"rollout": {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}}
    return {
        "actor_rollout_ref": load_config(ActorConfig, actor),
        "ref": load_config(ActorConfig, actor),
        "critic": load_config(CriticConfig, common),
    }


def trainer_of(kind: str) -> RayPPOTrainer:
    roles: Mapping[Role, Any] = SLEEPING if kind == "sleeping" else REAL
    ids = torch.arange(PROMPT) + 2
    settings = configs() if kind == "real" else dict.fromkeys(("actor_rollout_ref", "ref", "critic", "reward_model"), 0)
    config = PPOConfig(
        **settings,
        data=DataConfig(train_batch_size=ROWS),
        algorithm=AlgorithmConfig(kl_ctrl=KLControlConfig(kl_coef=0.01), old_log_probs="policy"),
        trainer=TrainerConfig(total_training_steps=1, save_freq=-1),
    )
    names = {role: str(role) for role in roles}
    return RayPPOTrainer(
        config,
        Tokenizer(),
        roles,
        ResourcePoolManager({name: [1] for name in names.values()}, names, use_gpu=False, threads=1),
        ray_worker_group_cls=RayWorkerGroup if kind == "sleeping" else MegatronRayWorkerGroup,
        reward_fn=sleeping_reward if kind == "sleeping" else first_token,
        combine_rewards=weighted_sum(),
        train_dataset=[{"input_ids": ids, "attention_mask": torch.ones_like(ids)}] * ROWS,
    )


def steps(trainer: RayPPOTrainer, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds of every stage, of ``count`` steps with overlap and as many in order, in turn."""
    ways = trainer.stages.devices, InOrder("never")
    found: list[list[dict[str, float]]] = [[], []]
    trainer.train_step(trainer.draw())
    for _ in range(count):
        for devices, metrics in zip(ways, found, strict=True):
            trainer.stages.devices = devices
            metrics.append(trainer.train_step(trainer.draw()))
    return medians(found[0]), medians(found[1])


def medians(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {
        name.removeprefix("timing_s/"): statistics.median(each.get(name, 0.0) for each in metrics)
        for name in metrics[0]
        if name.startswith("timing_s/")
    }


def report(kind: str, count: int) -> None:
    with trainer_of(kind) as trainer:
        trainer.init_workers()
        overlapping, sequential = steps(trainer, count)
    scoring = max(sequential.get(name, 0.0) for name in SCORING)
    if kind == "sleeping":  # the reward function reads the scores of the reward model
        scoring = max(scoring, sequential["reward_model"] + sequential["reward"])
    updates = max(sequential.get(name, 0.0) for name in UPDATES)
    others = sequential["generate"] + sequential["advantages"] + overlapping["controller"]
    longest, together = others + scoring + updates, sequential["step"]
    shown = {"step": overlapping["step"], "longest path": longest, "sum of the stages": together}
    print(f"{kind:9} " + "  ".join(f"{name} {seconds:.2f} s" for name, seconds in shown.items()))
    ratios = overlapping["step"] / longest, overlapping["step"] / together
    print(f"{'':9} step over longest path {ratios[0]:.2f}, over the sum {ratios[1]:.2f}")
    print(
        f"{'':9} "
        + "  ".join(f"{name} {seconds:.2f}" for name, seconds in overlapping.items() if abs(seconds) >= 0.005)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kind", nargs="+", default=["sleeping", "real"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(num_cpus=8, include_dashboard=False, logging_level="error")
    for kind in arguments.kind:
        report(kind, arguments.steps)
    ray.shutdown()


if __name__ == "__main__":
    main()
