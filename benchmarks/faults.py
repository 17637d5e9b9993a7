"""Faults at random moments of a running job, and what becomes of it: TP2 x PP2, four ranks on this machine's CPUs.

    python benchmarks/faults.py [--fault NAME ...] [--repeats 5] [--seed 0] [--list]

A first run is not disturbed; the SHA-256 of every rank's weights after each of its steps is what the others must have.
Faults of ranks and of their helpers hit a second run one after another: each at a random moment of a step, in a random
order. Faults of nodes, of the driver and of disks have runs of their own. The seed gives the moments and the order.

Columns: seconds from the fault until the controller knew it; what it named; processes of before that are left; seconds
until training went on; completed steps that were lost; and whether the weights after the next step are exact.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
import torch
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from mcontroller import Dispatch, register
from mcontroller.errors import MControllerError
from mcontroller.ppo import Callback, Role
from mcontroller.trackers import Samples
from workers.actor import ActorRolloutRefWorker
from workers.run.config import RunConfig, read_run_config
from workers.run.parts import make_parts
from workers.run.training import make_trainer

DEADLINE = 15.0
"""[s] Deadline of calls: after it a rank that is stopped or waits for ever is found."""

ADDRESSES = ("127.0.0.11", "127.0.0.12", "127.0.0.13")

CONFIG = """
pool: {process_on_nodes: [4], use_gpu: false}
model: {vocab_size: 17, max_sequence_length: 12, num_layers: 2, hidden_size: 64, num_attention_heads: 2,
        ffn_hidden_size: 168}
data:
  train_batch_size: 16
  train: {source: reasoning_gym, task: chain_sum, size: 512,
          options: {min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1}}
tokenizer: {kind: characters}
imports: [examples.ppo.tokenizer]
rewards: {functions: {task: {function: "mcontroller.ppo.rewards.functions:reasoning_gym"}}}
algorithm: {adv_estimator: grpo}
trainer: {total_training_steps: 1000, save_freq: -1, memory_save_freq: 1, max_restarts: 1000, val_before_train: false,
          test_freq: -1, restart_on: [ValueError]}
trackers: [jsonl]
actor_rollout_ref:
  model: ${model}
  parallel: {tp: 2, pp: 2}
  rollout: {prompt_length: 8, response_length: 4, n: 2}
  optim: {lr: 1.0e-3}
  ppo_mini_batch_size: 16
  ppo_micro_batch_size: 8
"""


class FaultyActor(ActorRolloutRefWorker):
    """Does what the file of its rank in ``folder`` says, in its next forward pass."""

    folder = ""

    def forward_step(self, model: Any, rows: Any) -> torch.Tensor:
        path = Path(self.folder, f"rank{self.rank}")
        if path.exists():
            how = path.read_text()
            path.unlink()
            if how == "raise":
                raise ValueError("a fault of the benchmark")
            if how == "segfault":
                ctypes.string_at(0)
            if how == "stuck":
                ctypes.PyDLL(None).sleep(600)  # holds the interpreter
            if how == "skip":
                threading.Event().wait()  # of the collectives that the others wait in
        return super().forward_step(model, rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        hashed = hashlib.sha256()
        for chunk in self.model:
            for parameter in chunk.parameters():
                hashed.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()


Inject = Callable[["Faults", random.Random], None]


def kill(count: int, signal_number: int = signal.SIGKILL) -> Inject:
    def inject(faults: Faults, draw: random.Random) -> None:
        for pid in draw.sample(faults.pids, count):
            os.kill(pid, signal_number)

    return inject


def in_forward(how: str, count: int) -> Inject:
    def inject(faults: Faults, draw: random.Random) -> None:
        for rank in draw.sample(range(4), count):
            Path(FaultyActor.folder, f"rank{rank}").write_text(how)

    return inject


def twice(faults: Faults, draw: random.Random) -> None:
    """Kill a rank, and one of those that replace them as soon as they exist."""
    before = faults.pids
    kill(1)(faults, draw)

    def again() -> None:
        while set(faults.pids) & set(before):
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(faults.pids), signal.SIGKILL)

    threading.Thread(target=again, daemon=True).start()


def fill_object_store(faults: Faults, draw: random.Random) -> None:
    faults.held = [ray.put(bytes(20_000_000)) for _ in range(20)]  # 400 MB in a store of 300 MB


def kill_reward_process(faults: Faults, draw: random.Random) -> None:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    scoring = [int(pid) for pid, parent, command in rows if parent == str(os.getpid()) and "rewards" in command]
    os.kill(draw.choice(scoring), signal.SIGKILL)


OF_RANKS: dict[str, Inject] = {
    "SIGKILL of one rank": kill(1),
    "SIGKILL of two ranks": kill(2),
    "SIGKILL of all ranks": kill(4),
    "SIGSTOP of one rank, deadline of 15 s": kill(1, signal.SIGSTOP),
    "exception on one rank": in_forward("raise", 1),
    "exception on all ranks": in_forward("raise", 4),
    "segmentation fault of one rank": in_forward("segfault", 1),
    "one rank skips a collective, deadline of 15 s": in_forward("skip", 1),
    "one rank is stuck in native code, deadline of 15 s": in_forward("stuck", 1),
    "SIGKILL, and another in the recovery": twice,
    "SIGKILL in a save to memory": kill(1),
    "object store full": fill_object_store,
    "SIGKILL of a reward process": kill_reward_process,
}
IN_SAVE = "SIGKILL in a save to memory"


@dataclasses.dataclass
class Trial:
    """What became of a fault."""

    fault: str
    at: float = 0.0
    before: list[int] = dataclasses.field(default_factory=list)
    known: float | None = None
    named: str = "no failure"
    again: float = 0.0
    lost: int = 0
    left: int = 0
    exact: bool = False


class Faults(Callback):
    """Injects faults one after another, each at a random moment of a step; a tracker too, which does nothing.

    Args:
        expected: the digests of the run that was not disturbed, by step.
        plan: the faults.
        seed: of the moments.
    """

    def __init__(self, expected: list[list[str]], plan: list[str], seed: int) -> None:
        self.expected, self.plan, self.draw = expected, plan, random.Random(seed)
        self.trials: list[Trial] = []
        self.is_reference = not plan
        self.seconds = 1.0
        self.held: Any = None
        self._ended = time.monotonic()
        self._running: Trial | None = None

    @property
    def pids(self) -> list[int]:
        return [info.pid for info in self.trainer.actor.executor.processes.handles.infos]

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        trainer.actor.timeout = DEADLINE
        save = trainer.memory.save

        def saving(*arguments: Any) -> None:
            if self._running is not None and self._running.fault == IN_SAVE and not self._running.at:
                self._after(self.draw.uniform(0.0, 0.1))
            save(*arguments)

        trainer.memory.save = saving

    def _after(self, seconds: float) -> None:
        def inject() -> None:
            trial = self._running
            assert trial is not None
            trial.before, trial.at = self.pids, time.time()
            OF_RANKS[trial.fault](self, self.draw)

        timer = threading.Timer(seconds, inject)
        timer.daemon = True
        timer.start()

    def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        self.seconds, self._ended = min(now - self._ended, self.seconds), now  # of the shortest step
        digests = trainer.actor.digest()
        step, trial = trainer.global_steps, self._running
        if self.is_reference:
            self.expected.append(digests)
        if trial is not None and trial.at and (trial.known is not None or time.time() - trial.at > 3 * self.seconds):
            trial.exact = digests == self.expected[step - 1]
            trial.left = sum(Path(f"/proc/{pid}").exists() for pid in trial.before) if trial.known else 0
            self.trials.append(trial)
            self._running = self.held = None
            print(json.dumps(dataclasses.asdict(trial)), flush=True)
        if self._running is None and self.trials and not self.plan:
            trainer.stop()
        elif self._running is None and self.plan:
            self._running = Trial(self.plan.pop())
            if self._running.fault != IN_SAVE:
                self._after(self.draw.uniform(0.0, self.seconds))

    def restarted(self, trainer: Any, failure: Any) -> None:
        trial = self._running
        assert trial is not None
        first = next(each for each in trainer.recovery.failures if each.time >= trial.at)
        trial.known = first.time - trial.at
        rank = failure.details.get("rank", failure.details.get("ranks"))
        trial.named = f"{failure.kind}, {failure.role} rank {rank}"
        trial.again = time.time() - trial.at
        trial.lost = max(trial.lost, failure.step - 1 - trainer.global_steps)

    def log(self, metrics: Any, step: int) -> None:
        pass

    def log_samples(self, samples: Samples, step: int) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def config_in(folder: Path, *overrides: str) -> RunConfig:
    (folder / "run.yaml").write_text(CONFIG)
    return read_run_config(folder / "run.yaml", [f"run_dir={folder / 'run'}", *overrides])


def train(folder: Path, callback: Callback, *overrides: str) -> None:
    """Run until the callback stops it, in the cluster that this process is connected to."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_in(folder, *overrides).within(folder / "run")
    parts = make_parts(config)
    roles = {Role.ActorRolloutRef: FaultyActor}
    with open(os.devnull, "w") as null:
        trainer = make_trainer(config, dataclasses.replace(parts, roles=roles), folder / "run", Console(file=null))
        trainer.callbacks = [callback]
        try:
            with trainer:
                trainer.init_workers()
                trainer.fit()
        finally:
            if parts.rewards is not None:
                parts.rewards.close()


def of_ranks(folder: Path, names: list[str], repeats: int, seed: int) -> list[Trial]:
    """Return the trials of faults of ranks."""
    plan = names * repeats
    random.Random(seed).shuffle(plan)
    FaultyActor.folder = str(folder)
    ray.init("local", num_cpus=4, object_store_memory=300_000_000, include_dashboard=False, logging_level="ERROR",
             log_to_driver=False)  # fmt: skip
    reference = Faults([], [], seed)
    train(folder / "undisturbed", reference, total_steps(8 * len(plan) + 8), "trainer.memory_save_freq=0")
    disturbed = Faults(reference.expected, plan, seed)
    try:
        train(folder / "disturbed", disturbed)
    finally:
        ray.shutdown()
    return disturbed.trials


RAYLET = "SIGKILL of a raylet, with a spare node"


def of_nodes(folder: Path, repeats: int, seed: int) -> list[Trial]:
    """Return the trials of the loss of a node: two ranks on each of two of three nodes, two CPUs each."""
    trials = []
    expected: list[list[str]] = []
    for number in range(-1, repeats):
        small = {"object_store_memory": 100_000_000}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
        nodes = {each: cluster.add_node(num_cpus=2, node_ip_address=each, **small) for each in ADDRESSES}
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

        def lose_node(faults: Faults, draw: random.Random, nodes: Any = nodes, cluster: Any = cluster) -> None:
            cluster.remove_node(nodes[draw.choice(faults.trainer.actor.executor.nodes)], allow_graceful=False)

        OF_RANKS[RAYLET] = lose_node
        faults = Faults(expected, [RAYLET] if number >= 0 else [], seed + number)
        train(folder / f"nodes{number}", faults, "pool.process_on_nodes=[2, 2]", total_steps(6 if number < 0 else 1000))
        trials += faults.trials
        ray.shutdown()
        cluster.shutdown()
    return trials


OF_THE_DRIVER = {
    "SIGKILL of the driver, then resume": signal.SIGKILL,
    "SIGTERM in a step, then resume": signal.SIGTERM,
    "SIGINT in a step, then resume": signal.SIGINT,
    "disk full (as root), then space and resume": None,
}


def of_the_driver(folder: Path, names: list[str], repeats: int, seed: int) -> list[Trial]:
    """Return the trials of signals to the program of a run with checkpoints every two steps of six."""
    draw = random.Random(seed)
    expected = Program(folder / "whole").finish()
    trials = []
    for fault in names * repeats:
        number = OF_THE_DRIVER[fault]
        program = Program(folder / f"driver{len(trials)}", disk=number is None)
        while len(program.steps()) < 3:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.5))
        trial = Trial(fault, at=time.time())
        with program.full_disk() if number is None else contextlib.nullcontext():
            if number is not None:
                os.kill(program.process.pid, number)
            trial.named = f"exit code {program.process.wait()}"
        trial.known = time.time() - trial.at
        while program.left() and time.time() - trial.at < 90:  # agents of Ray look for its end now and then
            time.sleep(0.1)
        trial.left, done = len(program.left()), len(program.steps())
        program.start("resume", str(program.folder / "run"))
        while not any("resuming from step" in line for line in program.output()):
            time.sleep(0.01)
        saved = next(line for line in program.output() if "resuming from step" in line)
        trial.lost = max(done - int(saved.split()[3]), 0)
        lines = len(program.steps())
        while len(program.steps()) <= min(lines, 5) and program.process.poll() is None:
            time.sleep(0.01)
        trial.again = time.time() - trial.at
        trial.exact = program.finish() == expected
        if number is None:
            subprocess.run(["umount", "--lazy", str(program.checkpoints)], check=True)
        trials.append(trial)
        print(json.dumps(dataclasses.asdict(trial)), flush=True)
    return trials


class Program:
    """``mcontroller train`` of six steps in a process of its own."""

    def __init__(self, folder: Path, disk: bool = False) -> None:
        self.folder, self.mark = folder, f"FAULTS_RUN={folder}"
        self.checkpoints = folder / "run" / "checkpoints"
        folder.mkdir(parents=True)
        if disk:
            self.checkpoints.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(self.checkpoints)], check=True)
        (folder / "run.yaml").write_text(CONFIG)
        self.start(
            "train", str(folder / "run.yaml"), f"run_dir={folder / 'run'}", total_steps(6), "trainer.save_freq=2"
        )

    def start(self, *arguments: str) -> None:
        environment = os.environ | dict([self.mark.split("=", 1)])
        with open(self.folder / "output", "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mcontroller", *arguments], env=environment, stdout=output, stderr=output
            )

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        with open(self.checkpoints / "other", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield
        (self.checkpoints / "other").unlink()

    def output(self) -> list[str]:
        return (self.folder / "output").read_text().splitlines()

    def steps(self) -> list[str]:
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def left(self) -> list[int]:
        """Return the processes that this one and its children have started, whoever their parent is."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def finish(self) -> dict[str, str]:
        """Wait for the end, and return the SHA-256 of the shards of the last checkpoint."""
        if self.process.wait():
            raise SystemExit("\n".join(self.output()))
        manifest = self.checkpoints / "actor" / "global_step_6" / "manifest.json"
        files = json.loads(manifest.read_text())["files"]
        return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


def total_steps(number: int) -> str:
    return f"trainer.total_training_steps={number}"


def show(trials: list[Trial]) -> None:
    table = Table("fault", "times", "known, s", "named", "left", "training again, s", "steps lost", "exact weights")
    for name in dict.fromkeys(trial.fault for trial in trials):
        found = [trial for trial in trials if trial.fault == name]
        failed = [trial for trial in found if trial.known is not None]

        def span(values: list[float]) -> str:
            return f"{statistics.median(values):.1f}, at most {max(values):.1f}" if values else "-"

        table.add_row(
            name,
            str(len(found)),
            span([trial.known for trial in failed if trial.known is not None]),
            "; ".join(sorted({trial.named.partition(",")[0] for trial in found})),
            str(sum(trial.left for trial in found)),
            span([trial.again for trial in failed]),
            str(max((trial.lost for trial in failed), default=0)),
            f"{sum(trial.exact for trial in found)} of {len(found)}",
        )
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join([*OF_RANKS, RAYLET, *OF_THE_DRIVER]))
        return
    names = arguments.fault or [*OF_RANKS, RAYLET, *OF_THE_DRIVER]
    if unknown := set(names) - {*OF_RANKS, RAYLET, *OF_THE_DRIVER}:
        parser.error(f"there is no fault {unknown.pop()!r}; --list prints them")
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        trials: list[Trial] = []
        rest = arguments.repeats, arguments.seed
        if chosen := [name for name in names if name in OF_RANKS]:
            trials += of_ranks(folder, chosen, *rest)
        if chosen := [name for name in names if name in OF_THE_DRIVER]:
            trials += of_the_driver(folder, chosen, *rest)
        if RAYLET in names:
            trials += of_nodes(folder, *rest)
        show(trials)
    except MControllerError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
