"""After the loss of a node, a run goes on in smaller pools with the same batches, and grows back when one returns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import WorkerDied
from mcontroller.local import LocalExecutor, LocalWorkerGroup
from mcontroller.ray import RayClassWithInitArgs, ResourcePoolManager
from parallel_state import ParallelLayout
from tests.trainer.test_recovery import Recorder
from tests.trainer.toy import ToyActor, ToyCritic, toy_config, toy_trainer
from trainer import Callback, Role
from trainer.elastic import ElasticPools, divides, largest
from trainer.saving.memory import MemoryCheckpoints
from trainer.saving.recovery import FAILURES, RESIZED
from trainer.saving.run_record import RunState
from trainer.stages import SharedDevices
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, ModelConfig, ParallelConfig

ROLES = {Role.ActorRolloutRef: ToyActor, Role.Critic: ToyCritic}
SIZE = {"vocab_size": 16, "max_sequence_length": 8, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("declared", "replica", "room", "chosen"),
    [
        ([4, 4], 4, 8, [4, 4]),
        ([4, 4], 4, 7, [4]),
        ([4, 4], 8, 7, None),  # no replica is whole
        ([2, 2, 2, 2], 4, 6, [2, 2]),  # a third node would be of no use
        ([8, 4, 4], 4, 12, [8, 4]),
        ([8, 4, 4], 4, 3, None),
    ],
)
def test_the_largest_pool_of_whole_replicas_is_chosen(
    declared: list[int], replica: int, room: int, chosen: list[int] | None
) -> None:
    actual = largest({"pool": declared}, lambda _, ranks: ranks % replica == 0, lambda it: sum(it["pool"]) <= room)
    assert (actual or {}).get("pool") == chosen


def test_a_layout_of_generation_counts_too() -> None:
    actor = ActorConfig(model=ModelConfig(**SIZE), parallel=ParallelConfig(tp=2))
    assert [ranks for ranks in range(1, 9) if divides(ActorRolloutRefWorker.layouts(actor), ranks)] == [2, 4, 6, 8]
    assert divides((), 3)  # of workers without layouts


def pools_of(
    sizes: dict[str, list[int]], nodes: dict[str, dict[str, float]], free: Sequence[dict[str, float]] = ()
) -> Any:
    pools = ResourcePoolManager(sizes, {Role.ActorRolloutRef: "main", Role.RewardModel: "judge"}, use_gpu=True)
    elastic = ElasticPools(pools, [])

    def cluster(gone: Collection[str], *, free: bool = False) -> Sequence[dict[str, float]]:
        return unused if free else [node for name, node in nodes.items() if name not in gone]

    unused, elastic.nodes = free, cluster
    return pools, elastic


def test_pools_shrink_to_the_nodes_left_and_grow_into_free_room() -> None:
    node = {"CPU": 8.0, "GPU": 4.0}
    pools, elastic = pools_of({"main": [4, 4], "judge": [4]}, {"a": node, "b": node, "c": node}, [node, {"CPU": 8.0}])
    assert elastic.after_loss(()) == elastic.declared and not elastic.is_reduced
    assert elastic.after_loss({"b", "c"}) is None  # each role needs a replica
    pools.resource_pool_spec = elastic.after_loss({"b"})
    assert pools.resource_pool_spec == {"main": [4], "judge": [4]} and elastic.is_reduced and elastic.processes == 8
    assert elastic.after_growth() == elastic.declared
    elastic.nodes = lambda gone, free: [{"CPU": 8.0, "GPU": 3.0}]  # others use one
    assert elastic.after_growth() == elastic.sizes


class Cluster(Callback):
    """Two nodes, of which one is lost at a call and comes back before a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost_at: int, back_at: int) -> None:
        self.nodes, self.count, self.back_at, submit = 2, 0, back_at, LocalExecutor.submit
        self.events: list[tuple[str, int]] = []

        def counted(executor: LocalExecutor, method: str, *args: Any, **options: Any) -> Any:
            executor.check_alive(method)
            self.count += 1
            if self.count == lost_at:
                self.nodes = 1
                fields = {"role": executor.role, "rank": 0, "method": method, "exit_cause": "", "log_tail": ""}
                return executor.fail(WorkerDied("its node is gone", **fields))
            return submit(executor, method, *args, **options)

        monkeypatch.setattr(LocalExecutor, "submit", counted)

    def of(self, trainer: Any) -> None:
        trainer.elastic.nodes = lambda gone, free=False: [{"CPU": 4.0}] * (self.nodes - (1 if free else 0))

    def step_ended(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_steps == self.back_at:
            self.nodes = 2

    def restarted(self, trainer: Any, failure: Any) -> None:
        self.events.append((failure.kind, trainer.elastic.processes))


@pytest.mark.parametrize(
    ("saving", "lost_at"),
    [
        *(({"save_freq": 1}, lost_at) for lost_at in (12, 29, 30, 41)),
        ({"save_freq": -1, "memory_save_freq": 1}, 30),
        ({"save_freq": -1}, 29),
    ],
)
def test_a_run_shrinks_and_grows_and_ends_as_an_undisturbed_one(
    saving: dict[str, int], lost_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for name, at in (("undisturbed", 0), ("disturbed", lost_at)):
        cluster, metrics = Cluster(monkeypatch, at, back_at=5), Recorder()
        config = toy_config(7, default_local_dir=str(tmp_path / name), elastic=True, test_freq=-1, **saving)
        pools = ResourcePoolManager({"pool": [2, 2]}, dict.fromkeys(ROLES, "pool"), use_gpu=False)
        with toy_trainer(config, ROLES, resource_pool_manager=pools, trackers=[metrics], callbacks=[cluster]) as run:
            cluster.of(run)
            run.init_workers()
            run.fit()
            results.append([group.workers[0].table for group in run.groups.values()])  # type: ignore[attr-defined]
            assert run.elastic.processes == 4
        monkeypatch.undo()
    assert all(map(torch.equal, *results))
    assert cluster.events == [("WorkerDied", 2), (RESIZED, 4)]
    records = [json.loads(line) for line in (tmp_path / "disturbed" / FAILURES).read_text().splitlines()]
    assert [event["kind"] for event in records] == ["WorkerDied", RESIZED, RESIZED]
    assert records[1]["details"] == {"before": {"pool": [2, 2]}, "after": {"pool": [2]}}
    assert [line["train/processes"] for _, line in metrics.lines if "train/processes" in line][-3:] == [2.0, 4.0, 4.0]


def test_ranks_of_fewer_replicas_load_the_files_of_their_place() -> None:
    def critics(dp: int) -> dict[str, LocalWorkerGroup[ToyCritic]]:
        group = LocalWorkerGroup(
            RayClassWithInitArgs(ToyCritic, 0.1), ParallelLayout(2 * dp, tp=2), name_prefix="critic"
        )
        group.init_model()
        return {"critic": group}

    memory, saved, smaller = MemoryCheckpoints(SharedDevices("never")), critics(3), critics(2)
    for worker, coordinates in zip(
        saved["critic"].workers, map(saved["critic"].topology.coordinates, range(6)), strict=True
    ):
        worker.table = torch.tensor([float(coordinates["tp"])])
    memory.save(saved, RunState(1, 0.1, 1))
    memory._holders[""]._digests.pop("critic.0.1")  # damaged: another replica has the same
    assert memory.load(smaller) is not None
    assert [float(worker.table) for worker in smaller["critic"].workers] == [0.0, 1.0, 0.0, 1.0]
    memory.close()


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_on_two_nodes_goes_on_with_one_and_then_with_both(tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(prefix="nodes")  # a short name: Ray puts its sockets there
    # Five checks in vain are the loss of a node: 2.5 s in place of Ray's 15.
    quick = {"RAY_health_check_period_ms": "500"}
    environment = {**os.environ, **quick, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.trainer.elastic_run", str(tmp_path)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    shutil.rmtree(folder, ignore_errors=True)
    [record] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"steps"')]
    first, second = "127.0.0.21", "127.0.0.22"
    both, resized = [first, second], "the pools have pool {} processes, before pool {} (configured: pool 1 + 1)"
    steps = [(step, nodes) for step, nodes, _ in record["steps"]]
    assert steps[:2] == [(1, both), (2, both)] and steps[-1] == (5, both)
    assert any(nodes == [first] for _, nodes in steps)  # when the loss is noticed depends on Ray
    assert {prompts for *_, prompts in record["steps"]} == {48.0}  # the same global batch
    assert [kind for kind, _ in record["events"]] == ["WorkerDied", RESIZED, RESIZED]
    assert [text for _, text in record["events"][1:]] == [resized.format("1", "1 + 1"), resized.format("1 + 1", "1")]
