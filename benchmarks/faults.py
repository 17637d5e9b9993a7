"""Faults at random moments of a running job, and what becomes of it: TP2 x PP2, four ranks on this machine's CPUs.

    python benchmarks/faults.py [--fault NAME ...] [--repeats 5] [--seed 0] [--list]

Every trial is a line of build/faults.jsonl, with its seed; the table of docs/results.md is written from them.

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
import functools
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
import torch
from ray.cluster_utils import Cluster
from rich.console import Console

from benchmarks.parts.faults_of_programs import OF_PROGRAMS, Trial, of_programs, total_steps, write_config
from mcontroller import Dispatch, register
from mcontroller.errors import MControllerError
from trainer import Callback
from trainer.run.config import RunConfig, read_run_config
from trainer.run.parts import make_parts
from trainer.run.training import make_trainer
from trainer.saving.recovery import RESIZED
from trainer.trackers import Samples
from workers.actor import ActorRolloutRefWorker

DEADLINE = 15.0
"""[s] Deadline of calls: after it a rank that is stopped or waits for ever is found."""

HEAD = """\
| fault | known after, s | named | again, s | steps lost | exact |
|---|---:|---|---:|---:|---|
"""
"""The head of the table: seconds are the median, and the most in brackets if it differs."""

ROOT = Path(__file__).resolve().parents[1]

ADDRESSES = ("127.0.0.11", "127.0.0.12", "127.0.0.13")


class FaultyActor(ActorRolloutRefWorker):
    """Does what the file of its rank in ``folder`` says, in its next forward pass."""

    folder = ""

    def forward_step(self, model: Any, rows: Any) -> torch.Tensor:
        path = Path(self.folder, f"rank{self.rank}")
        if path.exists() and (how := path.read_text()) != "rows":
            path.unlink()
            if how == "raise":
                raise ValueError("a fault of the benchmark")
            if how == "segfault":
                ctypes.string_at(0)
            if how == "stuck":
                ctypes.PyDLL(None).sleep(600)  # holds the interpreter
            if how == "memory":
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
                torch.zeros(1 << 28)
            if how == "skip":
                threading.Event().wait()  # of the collectives that the others wait in
        return super().forward_step(model, rows)

    def compute_ref_log_prob(self, data: Any) -> Any:
        scored = super().compute_ref_log_prob(data)
        path = Path(self.folder, f"rank{self.rank}")
        if path.exists() and path.read_text() == "rows":
            return None if scored is None else scored.slice(0, len(scored) - 1)
        return scored

    compute_ref_log_prob.__dict__.update(ActorRolloutRefWorker.compute_ref_log_prob.__dict__)

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


def pending() -> list[Path]:
    """Return the files of ranks that have not done yet what these say."""
    return list(Path(FaultyActor.folder).glob("rank*")) if FaultyActor.folder else []


def stop_for_10_s(faults: Faults, draw: random.Random) -> None:
    faults.trainer.actor.timeout = None
    pid = draw.choice(faults.pids)
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        os.kill(pid, signal.SIGCONT)
        faults.trainer.actor.timeout = DEADLINE

    threading.Timer(10.0, go_on).start()


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


def of_reward_process(number: int) -> Inject:
    def inject(faults: Faults, draw: random.Random) -> None:
        os.kill(draw.choice(reward_processes()), number)

    return inject


def reward_processes() -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, parent, command in rows if parent == str(os.getpid()) and "rewards" in command]


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
    "SIGKILL of a reward process": of_reward_process(signal.SIGKILL),
    "SIGSTOP of a reward process": of_reward_process(signal.SIGSTOP),
    "SIGSTOP of one rank for 10 s, without a deadline": stop_for_10_s,
    "memory limit of one rank": in_forward("memory", 1),
}


IN_GENERATION = "SIGKILL of a rank of the group that generates, in generation"
IN_UPDATE = "SIGKILL of a rank of the group that generates, in an update of its weights"
OF_ROLLOUT: dict[str, Inject] = {IN_GENERATION: kill(1), IN_UPDATE: kill(1)}
"""Faults of a group that only generates."""
OF_ROLLOUT_OVERRIDES = ("rollout={}", "actor_rollout_ref.parallel.pp=1", "pool.process_on_nodes=[2]")
IN_STAGE: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "SIGKILL in a save to memory": lambda trainer: (trainer.memory, "save"),
    IN_GENERATION: lambda trainer: (trainer.step.generations, "exchange"),
    IN_UPDATE: lambda trainer: (trainer.step.weights, "update"),
}
"""Faults in a stage, and the method that runs it."""


LONGEST = {
    "SIGSTOP of one rank for 10 s, without a deadline": 12.0,
    "SIGSTOP of a reward process": 24.0,
    "SIGKILL of a fault-tolerant GCS, which is started again after 5 s": 15.0,
}
"""[s] Time after which a fault that fails nothing has had its effect, if it is more than three steps."""


class Warnings(logging.Handler):
    """Keeps the warnings of this program."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []
        self.emit = self.records.append  # type: ignore[method-assign]
        logging.getLogger("mcontroller").addHandler(self)


class Faults(Callback):
    """Injects faults one after another, each at a random moment of a step; a tracker too, which does nothing.

    Args:
        expected: the digests of the run that was not disturbed, by step.
        plan: the faults.
        seed: of the moments.
    """

    def __init__(self, expected: list[list[str]], plan: list[str], seed: int) -> None:
        self.expected, self.plan, self.seed, self.draw = expected, plan, seed, random.Random(seed)
        self.recorded = 0
        self.is_reference = not plan
        self.seconds = 1.0
        self.warnings = Warnings()
        self.held: Any = None
        self.cluster: Any = None
        self.nodes: dict[str, Any] = {}
        self.lost: str | None = None
        self.small: list[str] = []
        self._ended = time.monotonic()
        self.trial: Trial | None = None

    @property
    def pids(self) -> list[int]:
        struck = self.trainer.rollout if self.trial and self.trial.fault in OF_ROLLOUT else self.trainer.actor
        return [info.pid for info in struck.executor.processes.handles.infos]

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        trainer.actor.timeout = DEADLINE
        for fault in IN_STAGE:
            self._strike_in(fault, *IN_STAGE[fault](trainer))

    def _strike_in(self, fault: str, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def struck(*arguments: Any, **options: Any) -> Any:
            if self.trial is not None and self.trial.fault == fault and not self.trial.at:
                self._after(self.draw.uniform(0.0, 0.1))
            return method(*arguments, **options)

        setattr(owner, name, struck)

    def _after(self, seconds: float) -> None:
        def inject() -> None:
            trial = self.trial
            assert trial is not None
            trial.seed, trial.before, trial.at = self.seed, self.pids, time.time()
            (OF_RANKS | OF_ROLLOUT | OF_NODES | THAT_END_RUNS)[trial.fault](self, self.draw)

        timer = threading.Timer(seconds, inject)
        timer.daemon = True
        timer.start()

    def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
        if metrics["train/unscored"]:
            raise SystemExit("a reward took longer than rewards.timeout_s: this machine is too busy to compare weights")
        now = time.monotonic()
        self.seconds, self._ended = min(now - self._ended, self.seconds), now  # of the shortest step
        digests = trainer.actor.digest()
        step, trial = trainer.global_steps, self.trial
        if self.is_reference:
            self.expected.append(digests)
        if trial is not None and trial.fault == RETURNS and self.lost:
            self.small = digests  # the last before the run grows
            return
        long_ago = trial is not None and time.time() - trial.at > max(3 * self.seconds, LONGEST.get(trial.fault, 0))
        long_ago = long_ago and not pending()
        if trial is not None and trial.at and (trial.known is not None or long_ago):
            trial.exact = trial.exact if trial.fault == RETURNS else digests == self.expected[step - 1]
            trial.left = sum(Path(f"/proc/{pid}").exists() for pid in trial.before) if trial.known else 0
            if trial.known is None and (said := [it for it in self.warnings.records if it.created > trial.at]):
                trial.named = f"logged after {said[0].created - trial.at:.1f} s: {said[0].getMessage():.120}"
            trial.record()
            self.recorded += 1
            if trial.fault == SPARE and self.lost:
                self.nodes[self.lost] = self.cluster.add_node(num_cpus=2, node_ip_address=self.lost, **SMALL)
            self.trial = self.held = None
        if self.trial is None and self.recorded and not self.plan:
            trainer.stop()
        elif self.trial is None and self.plan and step > 2:
            self.trial = Trial(self.plan.pop())
            if self.trial.fault not in IN_STAGE:
                self._after(self.draw.uniform(0.0, self.seconds))

    def restarted(self, trainer: Any, failure: Any) -> None:
        trial = self.trial
        assert trial is not None
        trainer.actor.timeout = DEADLINE
        for path in pending():  # of ranks that were ended before they could do it
            path.unlink()
        if failure.kind == RESIZED:  # back to full size: both replicas have the weights of the one before
            trial.named += f"; back to 4 ranks after {time.time() - trial.at:.0f} s"
            digests = trainer.actor.digest()
            trial.exact, self.lost = trial.exact and digests == self.small * 2, None
            return
        first = next(failure for failure in trainer.recovery.failures if failure.time >= trial.at)
        trial.known = first.time - trial.at
        rank = failure.details.get("rank", failure.details.get("ranks"))
        trial.named = f"{failure.kind}, {failure.role} rank {rank}"
        trial.again = time.time() - trial.at
        trial.lost = max(trial.lost, failure.step - 1 - trainer.global_steps)
        if trial.fault == RETURNS:
            self.small = trainer.actor.digest()
            trial.exact = self.small == self.expected[trainer.global_steps - 1][:2]
            trial.named += f"; on with {trainer.actor.world_size} ranks"
            self.nodes[self.lost] = self.cluster.add_node(num_cpus=2, node_ip_address=self.lost, **SMALL)

    def log(self, metrics: Any, step: int) -> None:
        pass

    def log_samples(self, samples: Samples, step: int) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def config_in(folder: Path, *overrides: str) -> RunConfig:
    return read_run_config(write_config(folder), [f"run_dir={folder / 'run'}", *overrides])


def train(folder: Path, callback: Callback, *overrides: str) -> None:
    """Run until the callback stops it, in the cluster that this process is connected to."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_in(folder, *overrides).within(folder / "run")
    parts = make_parts(config)
    roles = {role: FaultyActor for role in parts.roles}
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


@contextlib.contextmanager
def local_cluster(folder: Path) -> Iterator[Path]:
    """Start Ray for runs in a new folder, which has the files for ``FaultyActor`` too."""
    folder.mkdir(parents=True)
    FaultyActor.folder = str(folder)
    ray.init("local", num_cpus=4, object_store_memory=300_000_000, include_dashboard=False, logging_level="ERROR",
             log_to_driver=False)  # fmt: skip
    try:
        yield folder
    finally:
        ray.shutdown()


def of_ranks(folder: Path, names: list[str], repeats: int, seed: int, overrides: Sequence[str] = ()) -> None:
    """Record the trials of faults of ranks, in one run."""
    plan = names * repeats
    random.Random(seed).shuffle(plan)
    steps = total_steps(6 * len(plan) + 80)
    reference = Faults([], [], seed)
    with local_cluster(folder):
        train(folder / "undisturbed", reference, steps, "trainer.memory_save_freq=0", *overrides)
        train(folder / "disturbed", Faults(reference.expected, plan, seed), *overrides)


def drop_a_row(faults: Faults, draw: random.Random) -> None:
    Path(FaultyActor.folder, "rank2").write_text("rows")  # the rank whose log-probabilities are collected


THAT_END_RUNS: dict[str, Inject] = {"wrong number of rows from one rank": drop_a_row}


def that_end_runs(folder: Path, names: list[str], repeats: int, seed: int) -> None:
    """Record the trials of faults after which a run does not go on, because they are its own."""
    for number, fault in enumerate(names * repeats):
        with local_cluster(folder / str(number)) as run_folder:
            faults = Faults([], [fault], seed + number)
            faults.is_reference = True
            try:
                train(run_folder, faults)
                error = "no failure"
            except MControllerError as raised:
                error = f"{type(raised).__name__}, rank 2" if "rank 2 " in str(raised) else f"{raised:.200}"
            trial = faults.trial or Trial(fault)
            trial.known, trial.named = time.time() - trial.at, f"{error}; the run ends"
            trial.left = sum(Path(f"/proc/{pid}").exists() for pid in trial.before)
        trial.record()


def lose_node(faults: Faults, draw: random.Random) -> None:
    faults.lost = draw.choice(faults.trainer.actor.executor.nodes)
    faults.cluster.remove_node(faults.nodes.pop(faults.lost), allow_graceful=False)


def restart_gcs(faults: Faults, draw: random.Random) -> None:
    head = faults.cluster.head_node
    (gcs,) = head.all_processes.pop("gcs_server")
    gcs.process.kill()
    gcs.process.wait()
    head._gcs_address = head._gcs_client = None

    def start() -> None:
        time.sleep(5.0)
        head.start_gcs_server()
        threading.Event().wait()  # Ray has it end with the thread that started it

    threading.Thread(target=start, daemon=True).start()


SPARE = "SIGKILL of a raylet, with a spare node"
SPARE_BUNDLES = "SIGKILL of a raylet, with spare bundles on the other node"
RETURNS = "SIGKILL of a raylet, and its node comes back (trainer.elastic)"
FAULT_TOLERANT = "SIGKILL of a fault-tolerant GCS, which is started again after 5 s"
OF_NODES: dict[str, Inject] = {
    SPARE: lose_node,
    SPARE_BUNDLES: lose_node,
    RETURNS: lose_node,
    FAULT_TOLERANT: restart_gcs,
}
NODES_OVERRIDES = {
    SPARE_BUNDLES: ["pool.spare_bundles=2"],
    RETURNS: ["actor_rollout_ref.parallel.pp=1", "trainer.elastic=true"],
}
SMALL = {"object_store_memory": 100_000_000}


def of_nodes(folder: Path, names: list[str], repeats: int, seed: int) -> None:
    """Record the trials of faults in a cluster of two nodes with two ranks each, and a spare one for one fault.

    A run has several trials if it is afterwards as it was before: with new nodes, in its layout.
    """
    expected: dict[bool, list[list[str]]] = {False: [], True: []}  # by whether the run is elastic
    for fault in names:
        undisturbed, changes = expected[fault == RETURNS], NODES_OVERRIDES.get(fault, [])
        storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
        plans = [[fault] * repeats] if fault == SPARE else [[fault]] * repeats
        for number, plan in enumerate(plans if undisturbed else [[], *plans]):
            steps = total_steps(1000 if plan else 12 if fault == RETURNS else 80)
            faults = Faults(undisturbed, list(plan), seed + number)
            run_folder = folder / f"{fault[-12:]}{number}"
            with patch.dict(os.environ, storage if fault == FAULT_TOLERANT else {}), cluster_of(fault, faults):
                train(run_folder, faults, "pool.process_on_nodes=[2, 2]", steps, *changes)
            shutil.rmtree(folder / "gcs", ignore_errors=True)


@contextlib.contextmanager
def cluster_of(fault: str, faults: Faults) -> Iterator[None]:
    """Start a cluster for a fault of nodes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    faults.cluster, here = cluster, ADDRESSES[: 3 if fault == SPARE else 2]
    cpus = 4 if fault == SPARE_BUNDLES else 2
    faults.nodes = {address: cluster.add_node(num_cpus=cpus, node_ip_address=address, **SMALL) for address in here}
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def row_of(trials: Sequence[Trial]) -> str:
    """Return the row of the table for the trials of one fault."""
    failed = [trial for trial in trials if trial.known is not None]

    def span(values: list[float]) -> str:
        middle, most = f"{statistics.median(values):.1f}", f"{max(values):.1f}"
        return middle if middle == most else f"{middle} ({most})"

    named = sorted({re.split(r" rank|, \[|, mcontroller|: | after", trial.named)[0].rstrip(",") for trial in trials})
    going_on = [trial.again for trial in failed if trial.again]
    cells = [
        trials[0].fault,
        span([trial.known for trial in failed if trial.known is not None]) if failed else "-",
        "; ".join(named),
        span(going_on) if going_on else "-",
        max((trial.lost for trial in failed), default=0),
        f"{sum(trial.exact for trial in trials)} of {len(trials)}" if going_on or not failed else "-",
    ]
    if left := sum(trial.left for trial in trials):
        cells[-1] = f"{cells[-1]}, {left} processes left"
    return f"| {' | '.join(map(str, cells))} |"


def write_table(results: Path, page: Path, order: Sequence[str]) -> None:
    """Replace the rows of a page's table whose faults are in the results; the other rows stay."""
    trials = [Trial(**json.loads(line)) for line in results.read_text().splitlines()]
    before, head, rest = page.read_text().partition(HEAD)
    rows, _, after = rest.partition("\n\n")
    kept = {row.split(" | ")[0].removeprefix("| "): row for row in rows.splitlines()}
    measured = {name: row_of([trial for trial in trials if trial.fault == name]) for name in {t.fault for t in trials}}
    ordered = [(kept | measured)[name] for name in order if name in kept | measured]
    page.write_text("\n".join([before + head.rstrip("\n"), *ordered]) + "\n\n" + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "faults.jsonl", help="trials are added to it")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md", help="has the table of results")
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    arguments = parser.parse_args()
    kinds = [
        (OF_RANKS, of_ranks),
        (OF_ROLLOUT, functools.partial(of_ranks, overrides=OF_ROLLOUT_OVERRIDES)),
        (OF_NODES, of_nodes),
        (THAT_END_RUNS, that_end_runs),
        (OF_PROGRAMS, of_programs),
    ]
    known = [name for faults, _ in kinds for name in faults]
    if arguments.list:
        print("\n".join(known))
        return
    names = arguments.fault or known
    if unknown := set(names) - {*known}:
        parser.error(f"there is no fault {unknown.pop()!r}; --list prints them")
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    Trial.results = arguments.results
    try:
        for number, (faults, run) in enumerate(kinds):
            if chosen := [name for name in names if name in faults]:
                run(folder / str(number), chosen, arguments.repeats, arguments.seed)
        write_table(arguments.results, arguments.page, known)
    except MControllerError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
