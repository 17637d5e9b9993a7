"""Asynchronous training (trainer.max_staleness=k): seconds of a step over the bound and over the synchronous run.

    python benchmarks/asynchronous.py [--steps 10] [--share 0.6] [--staleness 0 1 2 4] [--partial continue finish stop]
    python benchmarks/asynchronous.py --controller 10000
    python benchmarks/asynchronous.py --engine .venv-vllm/bin/python [--requests 200] [--rounds 5] [--gpu 0]

The engine and the trainer sleep, in a process each. The lengths of responses are log-normal with sigma 0.99, cut at 16
times the median, as reported for reasoning runs (median about 500 tokens, p99 about 5,000; jiahuanglin.xyz, "RL
lessons", 22b), of seed 0. A token takes the same time for any number of rows up to the capacity, which is that of one
batch. The training takes the rest of a synchronous step, of which generation is ``--share``: 60 to 80% in reports.
``bound`` is the longer of training and of generation with all rows of the engine in use.

``--controller`` measures the CPU time of the controller for each trajectory over its life, without that of the engine,
and the memory, with so many trajectories in flight.

``--engine`` names an interpreter that has vLLM, and measures an engine of small size on CPUs through the router beside
the same engine called as ``AsyncLLM``, and how long it stops for an update of the weights, without their copy. With
``--gpu`` the model has 1.7B parameters, and is on this GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
import torch

from benchmarks.parts import engine_of_rollout
from mcontroller import DataProto, Dispatch, RayWorkerGroup, register
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray import ResourcePoolManager
from trainer import (
    AlgorithmConfig,
    AsynchronousConfig,
    DataConfig,
    ImportanceConfig,
    PPOConfig,
    RayPPOTrainer,
    Role,
    TrainerConfig,
)
from trainer.rewards.reward import Reward, outcome_scores
from workers.role_worker import RoleWorker

PROMPT, SIGMA, LONGEST = 16, 0.99, 16
STOP, PAD, TOKEN = 1, 0, 7


@dataclasses.dataclass(frozen=True)
class Rollout:
    n: int
    response_length: int
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Sleeps:
    """Settings of both roles.

    Attributes:
        rollout: of the responses.
        median: [tokens] of the lengths.
        token_s: [s] of a token of all rows.
        train_s: [s] of a training step.
        step_tokens: [tokens] of a step of the engine.
        max_rows: of a step of the engine.
    """

    rollout: Rollout
    median: int
    token_s: float = 0.0
    train_s: float = 0.0
    step_tokens: int = 32
    max_rows: int = 1024


def length_of(seed: int, median: int) -> int:
    """Return the tokens of the response with a seed."""
    chance = ((seed * 0x9E3779B97F4A7C15 & (1 << 64) - 1) + 0.5) / (1 << 64)
    return max(1, min(LONGEST * median, round(median * math.exp(SIGMA * NormalDist().inv_cdf(chance)))))


class NothingSent:
    """A transfer of weights that takes no time."""

    policy_version = 0
    fingerprint = None

    def run(self) -> NothingSent:
        return self

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class SleepingEngine(RoleWorker):
    """Both roles: sleeps as long as an engine would generate; the seed of a response has its length."""

    busy: ClassVar[tuple[float, float]] = 0.0, 0.0

    def __init__(self, config: Sleeps, role: str) -> None:
        self.config, self.calls, self.lengths = config, 0, dict[int, int]()

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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self) -> dict[str, float]:
        longest = self.config.rollout.response_length
        return {
            "prompt_length": PROMPT,
            "response_length": longest,
            "max_rows": self.config.max_rows,
            "step_tokens": self.config.step_tokens,
            "vocab_size": 64,
            "n": self.config.rollout.n,
            "temperature": 1.0,
        }

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        began = os.times()
        config, meta = self.config, prompts.meta_info
        if "sample_seed" in prompts.tensor_names:
            seeds, before = prompts.batch["sample_seed"].tolist(), prompts.batch["generated"]
            room = meta["response_length"]
        else:
            prompts, room = prompts.repeat(config.rollout.n), config.rollout.response_length
            seeds = [self.calls * 1_000_003 + row + 1 for row in range(len(prompts))]
            self.calls += 1
            before = torch.zeros(len(prompts), dtype=torch.long)
        for seed in seeds:
            if seed not in self.lengths:
                self.lengths[seed] = length_of(seed, config.median)
        left = torch.tensor([self.lengths[seed] for seed in seeds]) - before
        made = left.clamp(max=room)
        time.sleep(int(made.max()) * config.token_s)
        mask = (torch.arange(room) < made[:, None]).long()
        responses = mask * TOKEN
        ends = (left <= room).nonzero().flatten()
        responses[ends, made[ends] - 1] = STOP
        columns = {"responses": responses, "response_mask": mask, "rollout_log_probs": torch.zeros(responses.shape)}
        columns["policy_version"] = torch.zeros(len(responses), dtype=torch.long)
        if "sample_seed" not in prompts.tensor_names:  # the controller does not read them of a step by trajectory
            columns["prompts"] = prompts.batch["input_ids"]
            columns["input_ids"] = torch.cat((prompts.batch["input_ids"], responses), 1)
            columns["attention_mask"] = torch.cat((prompts.batch["attention_mask"], mask), 1)
        generated = DataProto.from_dict(columns, meta_info=meta)
        spent = (after - start for after, start in zip(os.times(), began, strict=True))
        SleepingEngine.busy = tuple(map(sum, zip(SleepingEngine.busy, spent, strict=False)))
        return generated

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": torch.zeros(data.batch["responses"].shape)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        time.sleep(self.config.train_s)
        return DataProto(meta_info={"metrics": {"rows": float(len(data))}})


class Tokens:
    eos_token_id, pad_token_id = STOP, PAD


def even_rows(batch: DataProto) -> Reward:
    scores = (torch.arange(len(batch)) % 2).float()
    return Reward(outcome_scores(scores, batch.batch["response_mask"]))


def trainer_of(sleeps: Sleeps, problems: int, staleness: int, group_cls: Any, **options: Any) -> RayPPOTrainer:
    roles: Any = {Role.Actor: SleepingEngine, Role.Rollout: SleepingEngine}
    config = PPOConfig(
        actor_rollout_ref=sleeps,
        rollout=sleeps,
        data=DataConfig(train_batch_size=problems),
        algorithm=AlgorithmConfig(adv_estimator="grpo", importance=ImportanceConfig(level="token")),
        trainer=TrainerConfig(
            total_training_steps=1,
            save_freq=-1,
            max_staleness=staleness,
            balance_tokens=False,
            default_local_dir=tempfile.mkdtemp(prefix="asynchronous-"),
            asynchronous=AsynchronousConfig(**options if staleness > 1 else {}),
        ),
    )
    names = {role: f"{role.name}-{staleness}" for role in roles}
    ids = torch.arange(PROMPT) + 2
    pools = ResourcePoolManager({name: [1] for name in names.values()}, names, use_gpu=False, threads=1)
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}] * problems
    return RayPPOTrainer(config, Tokens(), roles, pools, group_cls, reward_fn=even_rows, train_dataset=rows)


def seconds_of(sleeps: Sleeps, problems: int, staleness: int, steps: int, **options: Any) -> tuple[float, str]:
    """Return the seconds of a step, after as many that fill the queue, and the line on the balance."""
    with trainer_of(sleeps, problems, staleness, RayWorkerGroup, **options) as trainer:
        trainer.init_workers()
        for _ in range(staleness + 2):
            trainer.train_step(trainer.draw())
        began = time.perf_counter()
        for _ in range(steps):
            trainer.train_step(trainer.draw())
        return (time.perf_counter() - began) / steps, trainer.step.generations.summary()


def report(arguments: argparse.Namespace) -> None:
    median, problems, n = 32, 16, 4
    rows, token_s = problems * n, arguments.token_ms / 1000
    batches = [[length_of(call * 1_000_003 + row + 1, median) for row in range(rows)] for call in range(200)]
    mean = statistics.fmean(length for batch in batches for length in batch)
    longest = statistics.fmean(max(batch) for batch in batches)
    generation = longest * token_s
    training = generation * (1 / arguments.share - 1)
    bound = max(training, mean * token_s)
    sleeps = Sleeps(Rollout(n, LONGEST * median), median, token_s, training, max_rows=rows)
    print(
        f"lengths: median {median}, mean {mean:.1f}, longest of {rows} {longest:.0f} tokens of {arguments.token_ms} ms"
    )
    print(f"a synchronous step: generation {generation:.2f} s, training {training:.2f} s; bound {bound:.2f} s")
    print("|  k | partial | a step | over the bound | over the synchronous run |\n|--:|---|--:|--:|--:|")
    synchronous = 0.0
    for staleness, partial in itertools.product(arguments.staleness, arguments.partial):
        seconds, line = seconds_of(sleeps, problems, staleness, arguments.steps, partial=partial)
        synchronous = synchronous or seconds
        times = f"{seconds:.2f} s | {seconds / bound:.2f} | {synchronous / seconds:.2f}"
        print(f"| {staleness} | {partial} | {times} | {line}", flush=True)


class ControllerCost(NamedTuple):
    """What a step cost the controller, without the engine.

    Attributes:
        rows: trajectories that the step trains on.
        tokens: theirs.
        recorded: [bytes] of the record of the step.
        cpu_s: [s] of CPU time.
        kernel_s: [s] of it in the kernel: the pages of new memory, which cost several times more if none are huge.
        peak_mib: [MiB] the most memory of the process so far.
        objects: that the garbage collector tracks, after the step.
    """

    rows: int
    tokens: int
    recorded: int
    cpu_s: float
    kernel_s: float
    peak_mib: float
    objects: int

    def __str__(self) -> str:
        return (
            f"{self.rows} trajectories of {self.tokens / self.rows:.0f} tokens, "
            f"{self.recorded / self.tokens:.1f} bytes recorded of a token, "
            f"{self.cpu_s / self.rows * 1e6:.0f} us of CPU a trajectory ({self.kernel_s / self.rows * 1e6:.0f} in the "
            f"kernel), at most {self.peak_mib:.0f} MiB in the process"
        )


def controller(in_flight: int, steps: int) -> list[ControllerCost]:
    """Print what each step costs the controller. No batch is kept: a run does not keep them either."""
    n, staleness, median = 4, 3, 128
    problems = in_flight // n // (staleness + 1)
    sleeps = Sleeps(Rollout(n, LONGEST * median), median, step_tokens=64)

    def local(pool: Any, init: Any, name_prefix: str) -> Any:
        return LocalWorkerGroup(init, 1, name_prefix=name_prefix)

    with trainer_of(sleeps, problems, staleness, local) as trainer:
        trainer.init_workers()
        costs = list[ControllerCost]()
        for step in range(steps):
            costs.append(cost_of_step(trainer))
            print(f"step {step + 1}: {costs[-1]}", flush=True)
        filled = costs[staleness:]
        rows = sum(cost.rows for cost in filled)
        mean, in_kernel = (sum(getattr(cost, name) for cost in filled) / rows * 1e6 for name in ("cpu_s", "kernel_s"))
        print(
            f"mean of the steps after the queue was filled: {mean:.0f} us of CPU a trajectory (limit: 150), "
            f"{in_kernel:.0f} of it in the kernel"
        )
    return costs


def cost_of_step(trainer: RayPPOTrainer) -> ControllerCost:
    """Return what the controller spends until it has the responses of a step."""
    generations = trainer.step.generations
    before, busy = os.times(), SleepingEngine.busy
    batch = generations.exchange(trainer.draw(), trainer.draw).responses
    spent = [after - start for after, start in zip(os.times()[:2], before, strict=False)]
    spent = [seconds - after + start for seconds, after, start in zip(spent, SleepingEngine.busy, busy, strict=True)]
    tokens, recorded = int(batch.batch["response_mask"].sum()), generations.log.files()[-1].stat().st_size
    peak, rows = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, len(batch)
    del batch
    gc.collect()
    return ControllerCost(rows, tokens, recorded, sum(spent), spent[1], peak, len(gc.get_objects()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--token-ms", type=float, default=4.0)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--partial", nargs="+", default=["continue"])
    parser.add_argument("--controller", type=int, default=0)
    parser.add_argument("--engine", default="")
    parser.add_argument("--gpu")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.engine:
        engine_of_rollout.report(arguments.engine, arguments.requests, 64, arguments.rounds, arguments.gpu)
        return
    if arguments.controller:
        controller(arguments.controller, steps=12)
        return
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    report(arguments)
    ray.shutdown()


if __name__ == "__main__":
    main()
