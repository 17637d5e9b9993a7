"""Bytes and memory of a training step's batch: columns that stay on the workers against columns in the controller.

    python benchmarks/batch_bytes.py [--rows 1024] [--prompt 1024] [--response 7168]

Runs the scoring and the updates of a PPO step by RayPPOTrainer, with workers that compute nothing: actor, reference,
critic and reward model, of two ranks each but the last, on Ray. ``by reference`` is the trainer as it is; ``through the
controller`` fetches the result of every call and sends it with the next, as the trainer did before. Both run in one
run, each in a separate process. Printed, for each:

* ``controller wrote``: bytes that the controller put into messages and the object store;
* ``workers wrote``: bytes that the workers put there, which is each result once;
* ``peak``: the most private memory of the controller, above that before the step;
* ``step``: seconds.

The batch is what one group computes and another reads, each column once: the problems, the columns of the responses,
what the stages add to them, and the advantages and returns of the controller. That is the least that has to be written.
It is also what each node reads at most once, however many ranks of it read a column: nodes other than the writer's copy
the value from its object store. Token-level scores and rewards are read by the controller alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import ray
import torch

from mcontroller import DataProto, Dispatch, RayWorkerGroup, register
from mcontroller.ray import ResourcePoolManager
from mcontroller.ray.values import wire
from mcontroller.transport import Future
from trainer import (
    AlgorithmConfig,
    DataConfig,
    KLControlConfig,
    PPOConfig,
    RayPPOTrainer,
    Role,
    TrainerConfig,
)
from workers.role_worker import RoleWorker

SIZES = {"rows": 1024, "prompt": 1024, "response": 7168}
SAMPLE_SECONDS = 0.005


class Written:
    """Counts the bytes that this process serializes."""

    def __init__(self) -> None:
        self.bytes = 0
        self._pack = wire.pack
        wire.pack = self._counted

    def _counted(self, value: Any) -> Any:
        packed = self._pack(value)
        self.bytes += packed.nbytes if isinstance(packed, wire.Packed) else 0
        return packed


def reads(*names: str) -> Any:
    return classmethod(lambda cls, config: names)


class Role_(RoleWorker):
    """A role of a model that is not there."""

    def __init__(self, config: dict[str, int], **_: Any) -> None:
        self.sizes = config
        self.written = Written()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bytes_written(self) -> int:
        return self.written.bytes

    def per_token(self, data: DataProto, *names: str) -> DataProto:
        shape = data.batch["responses"].shape
        return DataProto.from_dict({name: torch.zeros(shape) for name in names})

    def read(self, data: DataProto, *names: str) -> DataProto:
        """Read the columns that a model would."""
        total = sum(int(data.batch[name].sum()) for name in ("input_ids", "attention_mask", "response_mask"))
        sums = {name: float(data.batch[name].sum()) for name in names}
        return DataProto(meta_info={"metrics": {"read": float(total)} | sums})


class Actor(Role_):
    columns_read = reads("advantages", "old_log_probs")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        shape = len(prompts), self.sizes["response"]
        ids = prompts.batch["input_ids"]
        responses, mask = torch.randint(0, 1000, shape), torch.ones(shape, dtype=torch.long)
        attention = torch.cat((prompts.batch["attention_mask"], mask), 1)
        columns = {
            "prompts": ids,
            "responses": responses,
            "response_mask": mask,
            "rollout_log_probs": torch.zeros(shape),
            "input_ids": torch.cat((ids, responses), 1),
            "attention_mask": attention,
            "position_ids": attention.cumsum(1) - 1,
        }
        return DataProto.from_dict(columns, meta_info=prompts.meta_info)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self.per_token(data, "old_log_probs", "entropys")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        return self.read(data, "advantages", "old_log_probs")


class Reference(Role_):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self.per_token(data, "ref_log_prob")


class Critic(Role_):
    columns_read = reads("values", "returns")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return self.per_token(data, "values")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        return self.read(data, "values", "returns")


class RewardModel(Role_):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        return self.per_token(data, "rm_scores")


class Tokenizer:
    eos_token_id = 1
    pad_token_id = 0


ROLES = {
    Role.ActorRollout: (Actor, 2),
    Role.RefPolicy: (Reference, 2),
    Role.Critic: (Critic, 2),
    Role.RewardModel: (RewardModel, 1),
}


class Peak:
    """The most private memory of this process while the block runs, above that at its start."""

    def __enter__(self) -> Peak:
        self._process, self._ended = psutil.Process(), threading.Event()
        self._start = self.most = self._process.memory_full_info().uss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.most = max(self.most, self._process.memory_full_info().uss)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.most - self._start


def trainer_of(sizes: dict[str, int]) -> RayPPOTrainer:
    ids = torch.randint(0, 1000, (sizes["prompt"],))
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = PPOConfig(
        actor_rollout_ref=sizes,
        ref=sizes,
        critic=sizes,
        reward_model=sizes,
        data=DataConfig(train_batch_size=sizes["rows"]),
        algorithm=AlgorithmConfig(kl_ctrl=KLControlConfig(kl_coef=0.01)),
        trainer=TrainerConfig(total_training_steps=1, save_freq=-1),
    )
    pools = {str(role): [ranks] for role, (_, ranks) in ROLES.items()}
    return RayPPOTrainer(
        config,
        Tokenizer(),
        {role: cls for role, (cls, _) in ROLES.items()},
        ResourcePoolManager(pools, {role: str(role) for role in ROLES}, use_gpu=False),
        ray_worker_group_cls=RayWorkerGroup,
        train_dataset=[row] * sizes["rows"],
    )


def through_the_controller(future: Future[DataProto], kept: Any) -> DataProto:
    return future.get()


def measure(way: str, sizes: dict[str, int]) -> dict[str, float]:
    torch.set_num_threads(1)
    if way == "through the controller":
        DataProto.later = staticmethod(through_the_controller)  # type: ignore[assignment]
    ray.init(num_cpus=8, include_dashboard=False, logging_level="error")
    with trainer_of(sizes) as trainer:
        trainer.init_workers()
        workers = [group for group in trainer.groups.values()]
        problems, own = trainer.draw(), Written()
        before = sum(sum(group.bytes_written()) for group in workers)
        own.bytes, started = 0, time.perf_counter()
        with Peak() as peak:
            trainer.train_step(problems)
        seconds, written = time.perf_counter() - started, own.bytes
        by_workers = sum(sum(group.bytes_written()) for group in workers) - before
    ray.shutdown()
    return {"controller wrote": written, "workers wrote": by_workers, "peak": peak.bytes, "step": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--way")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in SIZES}
    if arguments.way:
        print(json.dumps(measure(arguments.way, sizes)))
        return
    tokens, answers = sizes["rows"] * (sizes["prompt"] + sizes["response"]), sizes["rows"] * sizes["response"]
    problems = 8 * 2 * sizes["rows"] * sizes["prompt"]
    responses = 8 * (3 * tokens + sizes["rows"] * sizes["prompt"] + 2 * answers) + 4 * answers
    batch = problems + responses + 4 * 7 * answers  # 5 columns of the stages, advantages and returns
    print(f"{sizes['rows']} rows of {sizes['prompt']} + {sizes['response']} tokens: a batch of {batch / 1e6:.0f} MB")
    print(f"{'':24} {'controller wrote':>17} {'workers wrote':>14} {'peak':>9} {'step':>7}")
    found = {}
    for way in ("through the controller", "by reference"):
        options = [option for name, size in sizes.items() for option in (f"--{name}", str(size))]
        command = [sys.executable, __file__, "--way", way, *options]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        each = found[way] = json.loads(output.splitlines()[-1])
        megabytes = [each[name] / 1e6 for name in ("controller wrote", "workers wrote", "peak")]
        print(f"{way:24} {megabytes[0]:14.0f} MB {megabytes[1]:11.0f} MB {megabytes[2]:6.0f} MB {each['step']:5.1f} s")
    before, after = found["through the controller"], found["by reference"]
    ratios = [f"{name} {before[name] / max(after[name], 1e-9):.1f}" for name in ("controller wrote", "peak", "step")]
    moved = (after["controller wrote"] + after["workers wrote"]) / batch
    earlier = (before["controller wrote"] + before["workers wrote"]) / batch
    print(f"before over after: {', '.join(ratios)}; bytes moved over the batch's: {earlier:.2f} -> {moved:.2f}")


if __name__ == "__main__":
    main()
