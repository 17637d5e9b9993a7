"""Roles that take turns on one device: the numbers stay the same, and idle roles leave nothing on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray import ResourcePoolManager
from tests.ranks import run_ranks
from tests.workers.roles import EOS, MODEL, OPTIM, PAD, PROMPT, RESPONSE, prompts, weights
from trainer import DataConfig, PPOConfig, RayPPOTrainer, Reward, Role, TrainerConfig, rule_only
from trainer.rewards.reward import outcome_scores
from workers import ActorConfig, ActorRolloutRefWorker, CriticConfig, CriticWorker, RewardConfig, RewardModelWorker
from workers.config import load_config
from workers.weights.offload import Sleepable, model_tensors

pytestmark = pytest.mark.simulated

ROLES = {
    Role.ActorRolloutRef: ActorRolloutRefWorker,
    Role.Critic: CriticWorker,
    Role.RewardModel: RewardModelWorker,
}
HAS_GPU = torch.cuda.is_available()


class Tokens:
    eos_token_id = EOS
    pad_token_id = PAD


def evenness(batch: DataProto) -> Reward:
    scores = (batch.batch["responses"] % 2 == 0).float().mean(1)
    return Reward(outcome_scores(scores, batch.batch["response_mask"]), {})


def trainer_of(offload: str, model: dict[str, Any], optim: dict[str, Any], rollout: dict[str, Any]) -> RayPPOTrainer:
    """A trainer whose groups share the one device of this process, as slots of a bundle do."""
    sizes = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 2}
    trained = {"model": MODEL | model, "optim": OPTIM | optim} | sizes
    lengths = {"prompt_length": PROMPT, "response_length": RESPONSE, "seed": 3}
    config = PPOConfig(
        actor_rollout_ref=load_config(ActorConfig, trained | {"rollout": lengths | rollout}),
        critic=load_config(CriticConfig, trained),
        reward_model=load_config(RewardConfig, {"model": MODEL | model}),
        data=DataConfig(train_batch_size=4),
        trainer=TrainerConfig(total_training_steps=2, test_freq=-1, save_freq=-1, offload=offload),
    )
    rows = prompts(8, {}).batch
    return RayPPOTrainer(
        config,
        Tokens(),
        ROLES,
        ResourcePoolManager({"pool": [1]}, dict.fromkeys(ROLES, "pool"), use_gpu=HAS_GPU),
        lambda pool, init, name_prefix: LocalWorkerGroup(init, 1, name_prefix=name_prefix),
        reward_fn=evenness,
        combine_rewards=rule_only,
        train_dataset=[{name: column[row] for name, column in rows.items()} for row in range(8)],
    )


def parts_on_device(worker: Any) -> list[str]:
    """The parts with memory under their tensors; memory that two of them share belongs to the first."""
    parts, counted = [], set()
    for part, content in worker.offloader.parts().items():
        tensors = model_tensors(content.rollout.rollout.chunks) if isinstance(content, Sleepable) else content
        storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
        if any(size for key, size in storages.items() if key not in counted):
            parts.append(part)
        counted |= storages.keys()
    return parts


def trained(offload: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """Two steps of PPO; after every call, record the parts on the device of every role."""
    held: dict[str, dict[str, list[str]]] = {}
    metrics: list[dict[str, float]] = []
    with trainer_of(offload, *changes) as trainer:
        trainer.init_workers()
        workers = {name: group.workers[0] for name, group in trainer.groups.items()}
        for worker in workers.values():
            entered = worker.call_context
            worker.call_context = recording(entered, workers, held)
        for step in range(2):
            metrics.append(trainer.train_step(trainer.train_batches[step]))
        for group in trainer.groups.values():
            group.reload() if offload != "never" else None
        state = {f"{name}.{key}": value for name, worker in workers.items() for key, value in weights(worker).items()}
    return {"metrics": metrics, "held": held, "state": state}


def recording(enter: Callable[[str], Any], workers: dict[str, Any], held: dict[str, Any]) -> Callable[[str], Any]:
    @contextlib.contextmanager
    def entering(method: str) -> Any:
        with enter(method):
            yield
            held[method] = {name: parts_on_device(worker) for name, worker in workers.items()}

    return entering


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}, {}),
    "bfloat16, distributed optimizer": ({"dtype": "bfloat16"}, {"distributed_optimizer": True}, {}),
    "experts": ({"num_moe_experts": 4, "moe_ffn_hidden_size": 32}, {}, {}),
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_training_with_offload_equals_training_without_to_the_bit(changes: Any) -> None:
    offload = "auto" if HAS_GPU else "always"
    (without,), (handing_over,) = run_ranks(trained, 1, "never", *changes), run_ranks(trained, 1, offload, *changes)
    for one, other in zip(without["metrics"], handing_over["metrics"], strict=True):
        losses = {name: value for name, value in one.items() if name.startswith(("actor/", "critic/", "train/"))}
        assert len(losses) > 10 and losses == {name: other[name] for name in losses}
    assert without["state"].keys() == handing_over["state"].keys()
    assert all(torch.equal(without["state"][name], value) for name, value in handing_over["state"].items())
    idle: dict[str, list[str]] = {"actor": [], "critic": [], "reward": []}
    update = ["params", "grads", "optimizer"]
    expected = {
        "generate_sequences": idle | {"actor": ["params"]},
        "compute_log_prob": idle | {"actor": ["params"]},
        "compute_ref_log_prob": idle | {"actor": ["reference"]},
        "compute_values": idle | {"critic": ["params"]},
        "compute_rm_score": idle | {"reward": ["params"]},
        "update_critic": idle | {"critic": update},
        "update_actor": idle | {"actor": update},
    }
    assert {method: handing_over["held"][method] for method in expected} == expected


def left_after(changes: Any) -> tuple[int, list[dict[str, float]]]:
    """Bytes on the device if every role is offloaded after a step, and the memory metrics of the step."""
    with trainer_of("auto" if HAS_GPU else "always", *changes) as trainer:
        trainer.init_workers()
        metrics = trainer.train_step(trainer.train_batches[0])
        for group in trainer.groups.values():
            group.offload()
        return torch.cuda.memory_allocated(), metrics


def test_offloaded_roles_leave_nothing_and_every_stage_reports_its_memory() -> None:
    ((left, metrics),) = run_ranks(left_after, 1, CASES["bfloat16, distributed optimizer"])
    assert left <= 16  # the scalar with the loss scale of each optimizer, which scoring reads too
    stages = ["start", "generate", "old_log-probs", "reference", "update_actor"]
    calls = [f"actor/{stage}" for stage in stages] + ["critic/start", "critic/values", "critic/update_critic"]
    calls += ["reward/start", "reward/reward_model"]
    values = ["allocated_gb", "max_allocated_gb", "reserved_gb"] if HAS_GPU else ["resident_gb"]
    memory = {name: size for name, size in metrics.items() if name.startswith("memory/")}
    assert memory.keys() == {f"memory/{call}/{value}" for call in calls for value in values}
    assert min(memory.values()) > 0
    if HAS_GPU:
        assert memory["memory/actor/update_actor/allocated_gb"] > 3 * memory["memory/actor/reference/allocated_gb"]
