"""What processes can do, and simulated ranks must do as well: groups, the store, writers, modules of their own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.rendezvous import rendezvous

from parallel_state.errors import ParallelStateError
from parallel_state.hangs.lines import calling_line
from parallel_state.layout import ParallelLayout
from parallel_state.simulated import CollectiveMismatch, SharedStateWarning, SimulationError, run_ranks

pytestmark = pytest.mark.simulated


def test_each_rank_creates_a_group_of_itself_in_one_call() -> None:
    def compute() -> tuple[float, float]:
        alone = dist.new_group([dist.get_rank()])
        together = dist.new_group([0, 2])
        dist.all_reduce(tensor := torch.tensor(float(dist.get_rank())), group=alone)
        if dist.get_rank() != 1:
            dist.all_reduce(tensor.clone(), group=together)
        return float(tensor), dist.get_world_size(alone)

    assert run_ranks(3, compute) == [(0.0, 1), (1.0, 1), (2.0, 1)]


def test_no_thread_of_the_ranks_is_left_that_a_fork_would_interrupt() -> None:
    def compute() -> float:
        left = torch.ones(100, 100)
        return float((left @ left).sum())

    before = set(os.listdir("/proc/self/task"))
    for _ in range(20):
        assert run_ranks(8, compute) == [1e6] * 8
        assert set(os.listdir("/proc/self/task")) <= before


def test_disjoint_groups_may_be_created_in_one_call() -> None:
    def compute() -> float:
        rank = dist.get_rank()
        group = dist.new_group([0, 1] if rank < 2 else [2, 3, 4])
        dist.all_reduce(total := torch.tensor(10.0**rank), group=group)
        return float(total)

    with pytest.warns(RuntimeWarning):
        assert run_ranks(5, compute) == [11.0, 11.0, 11100.0, 11100.0, 11100.0]


@pytest.mark.parametrize(
    "lists",
    [([0, 1], [0, 1], [1, 2]), ([0], [0], [2]), ([0], [1], [0])],
    ids=["not disjoint", "not its own", "not its caller"],
)
def test_other_lists_in_one_call_of_new_group_are_reported(lists: tuple[list[int], ...]) -> None:
    with pytest.raises(CollectiveMismatch):
        run_ranks(3, lambda: dist.new_group(lists[dist.get_rank()]))


def test_the_default_store_works_after_initialization() -> None:
    def compute() -> tuple[Any, ...]:
        store = c10d._get_default_store()
        store.add("count", 2)
        dist.barrier()
        prefixed = dist.PrefixStore(f"of {dist.get_rank()}", store)
        prefixed.set("key", "value")
        prefixed.append("key", "s")
        prefixed.multi_set(["a", "b"], ["1", "2"])
        values = [prefixed.get("key"), *prefixed.multi_get(["a", "b"])]
        exchanged = [prefixed.compare_set("key", expected, "new") for expected in ("other", "values")]
        exchanged += [prefixed.compare_set(key, key, "first") for key in ("", "unset")]
        deleted = prefixed.delete_key("key"), prefixed.delete_key("key"), prefixed.check(["key"])
        dist.barrier()
        return (
            int(store.get("count")),
            values,
            exchanged,
            deleted,
            prefixed.num_keys() == store.num_keys() > 0,
            prefixed.clone().check(["key"]),
        )

    exchanged = [b"values", b"new", b"first", b"unset"]
    expected = (4, [b"values", b"1", b"2"], exchanged, (True, False, False), True, False)
    assert run_ranks(2, compute) == [expected] * 2


def test_a_wait_for_a_key_that_no_rank_sets_ends_as_at_its_timeout() -> None:
    def compute() -> list[bytes]:
        store, rank = dist.PrefixStore("of all", c10d._get_default_store()), dist.get_rank()
        if rank == 0:  # the others wait too, longer
            store.set_timeout(timedelta(seconds=2))
            for wait in (partial(store.wait, ["unset"], timedelta(seconds=1)), partial(store.get, "unset")):
                with pytest.raises(dist.DistStoreError):
                    wait()
            store.set("late", "value")
        if rank == 1:
            while not store.check(["late"]):
                pass
        store.wait(["late"], timedelta(seconds=400))
        dist.barrier()
        return store.get("late")

    assert run_ranks(3, compute) == [b"value"] * 3


def test_the_timeouts_of_megatrons_groups_can_be_changed() -> None:
    def compute() -> str:
        from megatron.core import parallel_state as mpu

        mpu.update_pg_timeout(timedelta(seconds=5), mpu.get_data_parallel_group())
        return dist.new_group([0, 1]).group_desc

    assert run_ranks(ParallelLayout(2), compute) == ["undefined"] * 2


def test_what_is_no_tensor_is_rejected_by_torch() -> None:
    with pytest.raises(TypeError):
        run_ranks(1, lambda: dist.all_reduce([torch.ones(1)]))  # type: ignore[arg-type]


def test_the_state_dict_of_one_rank_is_broadcast() -> None:
    def load() -> list[list[float]]:
        model = torch.nn.Linear(2, 1, bias=False)
        state = {} if dist.get_rank() else {"weight": torch.tensor([[1.0, 2.0]])}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        return model.weight.tolist()  # type: ignore[no-any-return]

    assert run_ranks(2, load) == [[[1.0, 2.0]]] * 2


def test_ranks_may_poll_for_what_others_do(tmp_path: Path) -> None:
    def compute() -> int:
        store, rank = c10d._get_default_store(), dist.get_rank()
        while rank == 0 and not store.check(["key"]):
            pass
        store.set("key", "value")
        store.add("arrived", 1)
        while store.add("arrived", 0) < 3:
            pass
        while rank == 0 and not (tmp_path / "file").exists():
            time.sleep(1e-4)
        if rank == 2:
            (tmp_path / "file").touch()
        while store.compare_set("lock", "", str(rank)) != str(rank).encode():
            pass
        return int(store.delete_key("lock"))

    assert run_ranks(3, compute) == [1, 1, 1]


def test_rendezvous_of_a_url_returns_the_simulated_store() -> None:
    def compute() -> tuple[int, int, bytes]:
        rank = dist.get_rank()
        store, *size = next(rendezvous("tcp://127.0.0.1:1", rank=rank, world_size=2))
        store.set(str(rank), f"from {rank}")
        return *size, store.get(str(1 - rank))

    assert run_ranks(2, compute) == [(0, 2, b"from 1"), (1, 2, b"from 0")]


def test_stores_at_an_address_and_in_a_file_are_simulated(tmp_path: Path) -> None:
    def compute() -> list[bytes]:
        rank = dist.get_rank()
        stores = dist.TCPStore("localhost", 1, 2, rank == 0, timedelta(seconds=1)), dist.FileStore(str(tmp_path / "a"))
        for store in stores:
            store.set(str(rank), f"from {rank}")
        with pytest.raises(dist.DistStoreError):
            stores[rank].get("unset")
        return [store.get(str(1 - rank)) for store in stores]

    assert run_ranks(2, compute) == [[b"from 1"] * 2, [b"from 0"] * 2]


def test_rendezvous_as_another_rank_is_reported() -> None:
    with pytest.raises(SimulationError) as caught:
        run_ranks(2, lambda: next(dist.rendezvous("tcp://127.0.0.1:1", rank=5, world_size=2)))
    assert caught.value.ranks == (0,)


def test_a_persistent_writer_of_checkpoints_writes_in_the_process(tmp_path: Path) -> None:
    def save() -> list[int]:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

        queue, finalized = AsyncCallsQueue(persistent=True), []
        path = tmp_path / str(dist.get_rank())
        request = AsyncRequest(lambda target: target.write_text("saved"), (path,), [lambda: finalized.append(1)])
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        return finalized

    assert run_ranks(2, save) == [[1], [1]]
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["saved", "saved"]


@pytest.mark.parametrize("package", ["core", "training", "legacy", "post_training", "rl"])
def test_lines_of_all_packages_of_megatron_are_megatrons(package: str) -> None:
    program = "def call(calling_line):\n    return calling_line()\n"
    code = compile(program, f"/somewhere/megatron/{package}/module.py", "exec")
    exec(code, names := {})
    line = names["call"](calling_line)
    assert line.through == f"megatron/{package}/module.py:2 in call"
    assert "test_as_processes.py" in line.line


TEAM = """
import os
from team_of_ranks.settings import scale
rank = int(os.environ["LOCAL_RANK"])
class Counter:
    count = 0
def add(value):
    Counter.count += value * scale
    return Counter.count
"""


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that computes with its rank when it is imported."""
    package = tmp_path / "team_of_ranks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "settings.py").write_text("scale = 10\n")
    (package / "counting.py").write_text(TEAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "7")
    yield package
    for name in [name for name in sys.modules if name.startswith("team_of_ranks")]:
        del sys.modules[name]


@pytest.mark.parametrize("imported_before", [False, True])
def test_each_rank_imports_the_modules_that_are_named(team: Path, imported_before: bool) -> None:
    if imported_before:
        import team_of_ranks.counting as before  # type: ignore[import-not-found]

        counter = before.Counter

    def compute() -> tuple[int, int, int]:
        import team_of_ranks.counting as counting

        if dist.get_rank() == 1:
            counting.scale = 100  # as mock.patch does
        counting.add(1)
        dist.barrier()
        return counting.rank, counting.add(1), before.rank if imported_before else counting.rank

    assert run_ranks(2, compute, modules=["team_of_ranks"]) == [(0, 20, 0), (1, 200, 1)]
    if imported_before:
        assert (before.rank, before.scale, before.Counter, counter.count) == (7, 10, counter, 0)
        assert sys.modules["team_of_ranks.counting"] is before
    else:
        assert "team_of_ranks" not in sys.modules


def test_each_rank_imports_from_a_package_without_an_init_file(team: Path) -> None:
    (team / "part").mkdir()
    (team / "part" / "numbers.py").write_text("import torch.distributed as dist\n\nrank = dist.get_rank()\n")

    def compute() -> int:
        from team_of_ranks.part import numbers  # type: ignore[import-not-found]

        dist.barrier()
        return int(numbers.rank)

    assert run_ranks(2, compute, modules=["team_of_ranks"]) == [0, 1]


def test_a_function_of_an_own_module_runs_as_the_ranks_own(team: Path) -> None:
    from team_of_ranks.counting import add

    assert run_ranks(2, add, 1, modules=["team_of_ranks"]) == [10, 10]


def test_what_one_rank_writes_and_all_share_is_reported(team: Path) -> None:
    import team_of_ranks.counting as counting

    def patch() -> int:
        if dist.get_rank() == 1:
            counting.scale = 100
            counting.Counter.count = 5
        dist.barrier()
        return counting.scale

    with pytest.warns(SharedStateWarning) as warned:
        assert run_ranks(2, patch) == [100, 100]
    (message,) = [str(warning.message) for warning in warned if warning.category is SharedStateWarning]
    assert "team_of_ranks.counting.scale, team_of_ranks.counting.Counter.count;" in message


def test_a_replaced_function_of_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dist.all_reduce

    def patch() -> None:
        dist.all_reduce = None if dist.get_rank() else dist.all_reduce
        dist.barrier()

    try:
        with pytest.warns(SharedStateWarning) as warned:
            run_ranks(2, patch)
        assert any("torch.distributed.all_reduce" in str(warning.message) for warning in warned)
    finally:
        dist.all_reduce = kept


def test_a_module_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(ParallelStateError):
        run_ranks(2, dist.barrier, modules=["no_such_module"])
