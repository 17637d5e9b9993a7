"""A state in memory that is damaged is not loaded; all groups then get the state of the step before."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import ray
import torch
from ray.exceptions import RayError

from mcontroller.errors import ConfigError
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray import RayClassWithInitArgs
from tests.trainer.toy import ToyCritic
from trainer.saving.memory import MemoryCheckpoints, StateHolder
from trainer.saving.run_record import RunState
from trainer.stages import SharedDevices
from workers.role_worker import RoleWorker


def critics(names: tuple[str, ...]) -> dict[str, LocalWorkerGroup[ToyCritic]]:
    groups = {name: LocalWorkerGroup(RayClassWithInitArgs(ToyCritic, 0.1), 2, name_prefix=name) for name in names}
    for group in groups.values():
        group.init_model()
    return groups


@pytest.fixture
def memory() -> Iterator[MemoryCheckpoints]:
    memory = MemoryCheckpoints(SharedDevices("never"))
    yield memory
    memory.close()


def set_tables(groups: dict[str, LocalWorkerGroup[ToyCritic]], value: float) -> None:
    for group in groups.values():
        for rank, worker in enumerate(group.workers):
            worker.table = torch.full((3,), value + rank)


def damage(memory: MemoryCheckpoints, name: str) -> None:
    with open(memory._holders[""]._paths([name])[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_a_damaged_state_is_not_loaded_and_no_steps_are_mixed(memory: MemoryCheckpoints) -> None:
    groups = critics(("actor", "critic"))
    held = memory._holders
    for step in (1, 2, 3):
        set_tables(groups, 10.0 * step)
        memory.save(groups, RunState(step, 0.1, step))
        assert len(held[""]._files) == 4 * min(step, 2)  # the last two steps
    set_tables(groups, 0.0)
    loaded = memory.load(groups)
    assert loaded is not None and loaded.global_steps == memory.step == 3
    assert [float(worker.table[0]) for group in groups.values() for worker in group.workers] == [30.0, 31.0] * 2
    damage(memory, "critic.1.3")
    loaded = memory.load(groups)
    assert loaded is not None and loaded.global_steps == 2
    assert [float(worker.table[0]) for group in groups.values() for worker in group.workers] == [20.0, 21.0] * 2
    memory.save(groups, RunState(3, 0.1, 3))  # keeps step 2, from which the run went on, and not the damaged one
    damage(memory, "actor.1.3")
    loaded = memory.load(groups)
    assert loaded is not None and loaded.global_steps == 2
    damage(memory, "actor.0.2")
    assert memory.load(groups) is None


def test_the_memory_is_freed(memory: MemoryCheckpoints) -> None:
    before = len(os.listdir("/proc/self/fd"))
    groups = critics(("actor",))
    memory.save(groups, RunState(1, 0.1, 1))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_class_without_the_methods_is_rejected(memory: MemoryCheckpoints) -> None:
    group = LocalWorkerGroup(RayClassWithInitArgs(RoleWorker), 1, name_prefix="actor")
    with pytest.raises(ConfigError) as caught:
        memory.check({"actor": group})
    assert caught.value.key == "trainer.memory_save_freq"


def test_another_process_has_a_copy_that_is_verified_and_outlives_the_first(ray_cluster: None) -> None:
    first, second = (ray.remote(StateHolder).options(num_cpus=0, max_concurrency=4).remote() for _ in range(2))
    content = bytes(range(256)) * 4096 * 70  # more than travels at a time
    [path] = ray.get(first.create.remote(["actor.0.1"]))
    with open(path, "wb") as file:
        file.write(content)
    ray.get(second.pull.remote(["actor.0.1"], first))
    ray.kill(first)
    [copied, missing] = ray.get(second.whole.remote(["actor.0.1", "actor.1.1"]))
    assert missing is None
    with open(copied, "r+b") as file:
        assert file.read() == content
        file.seek(0)
        file.write(b"\1")
    assert ray.get(second.whole.remote(["actor.0.1"])) == [None]
    ray.kill(second)


@pytest.mark.timeout(60)
def test_a_copy_from_a_lost_node_is_not_waited_for(ray_cluster: None) -> None:
    lost = set[str]()
    memory = MemoryCheckpoints(SharedDevices("never"), lambda: lost)
    holder = ray.remote(StateHolder).options(num_cpus=0, max_concurrency=4)
    memory._holders = {node: holder.remote() for node in ("a", "b")}
    [path] = memory._value(memory._begin("a", "create", ["actor.0.1"]))
    pid = int(path.split("/")[2])
    os.kill(pid, signal.SIGSTOP)  # as a machine that is gone, which Ray notices later
    memory._copying = [memory._begin("b", "pull", ["actor.0.1"], source="a")]
    lost.add("a")
    memory._finish_copies()
    assert memory._whole("b", ["actor.0.1"]) == [None]
    with pytest.raises(RayError):
        memory._begin("b", "pull", ["actor.0.1"], source="a")
    os.kill(pid, signal.SIGCONT)
    memory.close()
