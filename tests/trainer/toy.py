"""A task of one token, and roles that learn it from a table: the next letter after the prompt's last one."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray import ResourcePoolManager
from trainer import (
    AlgorithmConfig,
    DataConfig,
    KLControlConfig,
    PPOConfig,
    RayPPOTrainer,
    Reward,
    Role,
    TrainerConfig,
)
from trainer.rewards.reward import outcome_scores
from workers.role_worker import RoleWorker

LETTERS = 6
DIRECTORY = tempfile.TemporaryDirectory(prefix="toy-")
"""The directory of runs that are given none."""

CALLS: list[str] = []
"""The methods of toy roles that were called, in order; a test clears it."""


class ToyTokenizer:
    eos_token_id = LETTERS
    pad_token_id = LETTERS + 1


class ToyRole(RoleWorker):
    """Keeps a table by letter, and saves and loads it."""

    kept: tuple[str, ...] = ("table",)
    table: Tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        path: str,
        global_step: int,
        max_to_keep: int | None = None,
        asynchronous: bool = False,
        reshardable: bool = True,
    ) -> str:
        target = Path(path) / f"global_step_{global_step}"
        target.mkdir(parents=True, exist_ok=True)
        np.savez(target / "state.npz", **{name: np.asarray(getattr(self, name)) for name in self.kept})
        (target.parent / "latest").write_text(target.name)
        link = target.with_name(f"iter_{global_step}")
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        if max_to_keep is not None:
            others = [directory for directory in target.parent.glob("global_step_*") if directory != target]
            for directory in sorted(others)[: len(others) + 1 - max_to_keep]:
                shutil.rmtree(directory)
        return str(target)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def verify_checkpoint(self, path: str) -> str:
        try:
            with np.load(Path(path) / "state.npz") as state:
                missing = set(self.kept) - set(state)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            return str(error)
        return f"without {missing}" if missing else ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> int:
        with np.load(Path(path) / "state.npz") as state:
            for name in self.kept:
                setattr(self, name, torch.from_numpy(state[name]) if state[name].ndim else int(state[name]))
        return int(path.rpartition("_")[2])

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def save_to_memory(self, path: str) -> int:
        with open(path, "wb") as file:
            np.savez(file, **{name: np.asarray(getattr(self, name)) for name in self.kept})
            return file.tell()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def load_from_memory(self, path: str) -> None:
        with np.load(path) as state:
            for name in self.kept:
                setattr(self, name, torch.from_numpy(state[name]) if state[name].ndim else int(state[name]))


class ToyActor(ToyRole):
    """A policy ``table[letter]`` of logits over the answer, and a frozen copy of it."""

    kept = ("table", "reference", "samples")

    def __init__(self, config: float, role: str) -> None:
        self.lr, self.role, self.samples = config, role, 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.table = torch.zeros(LETTERS, LETTERS)
        self.sync_reference()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_reference(self) -> None:
        self.reference = self.table.clone()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        CALLS.append("generate_sequences")
        prompts = prompts.repeat(prompts.meta_info.get("n", 1))
        logits = self.table[prompts.batch["input_ids"][:, -1]]
        if prompts.meta_info.get("do_sample", True):
            generator = torch.Generator().manual_seed(self.samples)
            self.samples += 1
            answers = torch.multinomial(logits.softmax(1), 1, generator=generator)
        else:
            answers = logits.argmax(1, keepdim=True)
        ids = torch.cat((prompts.batch["input_ids"], answers), 1)
        ones = torch.ones_like(answers)
        columns = {
            "responses": answers,
            "response_mask": ones,
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
        }
        return DataProto.from_dict(columns, meta_info=prompts.meta_info)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        CALLS.append("compute_log_prob")
        return DataProto.from_dict({"old_log_probs": self._log_probs(self.table, data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        CALLS.append("compute_ref_log_prob")
        return DataProto.from_dict({"ref_log_prob": self._log_probs(self.reference, data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        CALLS.append("update_actor")
        prompts, answers = data.batch["input_ids"][:, -2], data.batch["responses"][:, 0]
        gradient = torch.nn.functional.one_hot(answers, LETTERS) - self.table[prompts].softmax(1)
        self.table.index_add_(0, prompts, self.lr * data.batch["advantages"] * gradient)
        return DataProto(meta_info={"metrics": {"actor/lr": self.lr}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_sft(self, batch: DataProto) -> DataProto:
        CALLS.append("update_sft")
        prompts, answers = batch.batch["input_ids"].unbind(1)
        self.table.index_put_((prompts, answers), torch.tensor(0.1), accumulate=True)
        return DataProto(meta_info={"metrics": {"sft/loss": 1.0}})

    @staticmethod
    def _log_probs(table: Tensor, data: DataProto) -> Tensor:
        prompts, answers = data.batch["input_ids"][:, -2], data.batch["responses"]
        return table[prompts].log_softmax(1).gather(1, answers)


class ToyCritic(ToyRole):
    """A value by letter."""

    def __init__(self, config: float) -> None:
        self.lr = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.table = torch.zeros(LETTERS)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        CALLS.append("compute_values")
        return DataProto.from_dict({"values": self.table[data.batch["input_ids"][:, -2:-1]]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        CALLS.append("update_critic")
        errors = data.batch["returns"] - data.batch["values"]
        self.table.index_add_(0, data.batch["input_ids"][:, -2], self.lr * errors[:, 0])
        return DataProto(meta_info={"metrics": {"critic/vf_loss": float(errors.square().mean())}})


def problems(rows: int) -> list[dict]:
    ids = [torch.tensor([number % LETTERS]) for number in range(rows)]
    return [{"input_ids": row, "attention_mask": torch.ones(1, dtype=torch.long), "asked": int(row)} for row in ids]


def experience(trainer: RayPPOTrainer, problems: DataProto | None = None) -> tuple[DataProto, Reward, dict[str, float]]:
    """Return what a step of the trainer generates and scores, by default for the next problems."""
    step, problems = trainer.step, trainer.draw() if problems is None else problems
    groups = step.empty_groups(len(problems))
    step.score(step.generations.exchange(problems, trainer.draw), groups)
    return step.choose(groups)


def demonstrations(rows: int) -> list[dict]:
    return [{"input_ids": torch.tensor([at % LETTERS, (at + 1) % LETTERS])} for at in range(rows)]


def next_letter(batch: DataProto) -> Reward:
    letters = torch.tensor(batch.non_tensor_batch["asked"].tolist())
    right = (batch.batch["responses"][:, 0] == (letters + 1) % LETTERS).float()
    return Reward(outcome_scores(right, batch.batch["response_mask"]), {"accuracy": right.tolist()})


def toy_config(steps: int = 30, **trainer) -> PPOConfig:
    return PPOConfig(
        actor_rollout_ref=0.5,
        critic=0.01,
        data=DataConfig(train_batch_size=48),
        algorithm=AlgorithmConfig(kl_ctrl=KLControlConfig(kl_coef=0.01)),
        trainer=TrainerConfig(
            total_training_steps=steps, **{"save_freq": -1, "default_local_dir": DIRECTORY.name, **trainer}
        ),
    )


def toy_trainer(config: PPOConfig, roles: dict | None = None, **others) -> RayPPOTrainer:
    """A trainer whose groups are one rank each, in this process."""
    roles = {Role.ActorRolloutRef: ToyActor, Role.Critic: ToyCritic} if roles is None else roles
    defaults = {
        "tokenizer": ToyTokenizer(),
        "resource_pool_manager": ResourcePoolManager({"pool": [1]}, dict.fromkeys(roles, "pool"), use_gpu=False),
        "ray_worker_group_cls": lambda pool, init, name_prefix: LocalWorkerGroup(init, 1, name_prefix=name_prefix),
        "reward_fn": next_letter,
        "train_dataset": problems(96),
        "val_dataset": problems(LETTERS + 4),
    }
    return RayPPOTrainer(config=config, role_worker_mapping=roles, **(defaults | others))
