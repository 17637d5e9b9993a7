from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from mcontroller.errors import ResourceError
from mcontroller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    process_handles,
    reservation,
)
from mcontroller.ray.process_handles import GroupState
from mcontroller.ray.reservation import NodeShape, by_address, fits
from tests.mcontroller.ray.roles import Plain

Start = Callable[..., RayWorkerGroup]


def held() -> int:
    return sum(entry["state"] == "CREATED" for entry in placement_group_table().values())


@pytest.mark.parametrize(
    ("sizes", "slots"), [([], 1), ([1.5], 1), ([True], 1), ([2, 0], 1), (4, 1), ([2], 1.5), ([2], "2"), ([2], None)]
)
def test_counts_that_are_not_positive_integers_are_rejected(sizes: Any, slots: Any) -> None:
    with pytest.raises(ResourceError):
        RayResourcePool(sizes, use_gpu=False, max_colocate_count=slots)


@pytest.mark.parametrize("slots", range(1, 17))
def test_the_processes_of_all_slots_fit_one_gpu_in_the_units_of_ray(slots: int) -> None:
    units = round(10_000 * RayResourcePool([1], max_colocate_count=slots).gpu_share)
    assert slots * units <= 10_000 < slots * (units + 1)


def test_a_process_that_sigkill_does_not_end_keeps_its_slot(
    pool: RayResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = "pid 7 on here, in state D"
    group, other = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix="stuck"), pool.lease("other")
    with monkeypatch.context() as patched:
        patched.setattr(process_handles, "end_processes", lambda *_: [stuck])
        group.shutdown()
        del group
        gc.collect()
        with pytest.raises(ResourceError) as lease:
            pool.lease("third")
        with pytest.raises(ResourceError) as end:
            pool.shutdown()
    assert lease.value.running == end.value.running == stuck
    other.release()
    assert pool.holders == ["stuck"]
    [processes] = pool._reservation.processes.values()
    processes.end()  # it has ended meanwhile, as the next shutdown finds out
    assert pool.holders == [] and not pool._reservation.processes


def test_threads_that_start_groups_share_one_reservation_and_get_different_slots(pool: RayResourcePool) -> None:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(pool.lease, ("first", "second"))
    assert {first.slots, second.slots} == {(0, 0), (1, 1)} and first.bundles == second.bundles
    assert held() == 1
    first.release()
    second.release()
    assert held() == 0


def test_several_groups_share_one_pool_and_the_table_shows_their_slots(pool: RayResourcePool, start: Start) -> None:
    assert pool.describe() == "pool two: 2 CPU bundle(s) x 2 slot(s), not reserved yet"
    pids = [pid for name in ("actor", "critic") for pid in start(name).pid()]
    assert len(set(pids)) == 4
    rows = [line.split() for line in pool.describe().splitlines()[2:]]
    assert [(row[0], *row[3:]) for row in rows] == [("0", "actor", "critic"), ("1", "actor", "critic")]


def test_one_group_too_many_raises_at_once_with_the_holders_of_the_slots(start: Start) -> None:
    start("actor"), start("critic")
    began = time.monotonic()
    with pytest.raises(ResourceError) as error:
        start("reward")
    assert time.monotonic() - began < 10
    assert error.value.holders == ["actor", "critic"]
    assert error.value.max_colocate_count == 2


def test_the_end_of_the_last_group_releases_the_bundles(pool: RayResourcePool, start: Start) -> None:
    before = held()
    first, second = start("actor"), start("critic")
    assert held() == before + 1
    first.shutdown()
    assert held() == before + 1
    second.shutdown()
    assert held() == before
    assert "not reserved" in pool.describe()


def test_a_reserved_pool_is_kept_when_its_groups_end(pool: RayResourcePool, start: Start) -> None:
    before = held()
    pool.reserve()
    start("actor").shutdown()
    assert held() == before + 1
    pool.shutdown()
    assert held() == before


def test_a_pool_larger_than_the_cluster_fails_at_once_with_the_numbers(ray_cluster: None) -> None:
    pool = RayResourcePool([40], use_gpu=False, max_colocate_count=2, name_prefix="huge")
    began = time.monotonic()
    with pytest.raises(ResourceError) as error:
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain))
    assert time.monotonic() - began < 10
    assert error.value.requested == [{"CPU": 80}]
    assert error.value.exists == [{"CPU": 16}]


def test_a_pool_whose_resources_are_taken_names_the_holders(ray_cluster: None) -> None:
    with RayResourcePool([14], use_gpu=False, name_prefix="holder").reserve():
        pool = RayResourcePool([8], use_gpu=False, name_prefix="second")
        with pytest.raises(ResourceError) as error:
            pool.reserve(timeout=0.5)
    assert error.value.in_use["CPU"] >= 14
    assert all(
        "second" not in entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"
    )


def test_more_gpus_than_the_cluster_has_are_rejected_with_the_numbers(ray_cluster: None) -> None:
    with pytest.raises(ResourceError) as error:
        RayResourcePool([3]).reserve()
    assert error.value.requested == [{"CPU": 3, "GPU": 3}]


def test_a_gpu_pool_on_a_cluster_without_gpus_names_use_gpu(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "cluster_nodes", lambda: [{"CPU": 16.0}])
    with pytest.raises(ResourceError) as error:
        RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Plain))
    assert "use_gpu=False" in str(error.value)


def test_a_pool_of_one_kind_of_gpu_takes_only_nodes_that_have_it(ray_cluster: None) -> None:
    with RayResourcePool([2], accelerator_type="H200").reserve() as pool:
        bundles = pool.bundles()[0].group.bundle_specs
    assert [bundle["accelerator_type:H200"] for bundle in bundles] == [0.001, 0.001]
    with pytest.raises(ResourceError):
        RayResourcePool([2], accelerator_type="B300").reserve()


def test_processes_share_a_gpu_by_slots_and_count_devices_as_torchrun_does(ray_cluster: None) -> None:
    with RayResourcePool([2], max_colocate_count=2, name_prefix="gpus") as pool:
        groups = [RayWorkerGroup(pool, RayClassWithInitArgs(Plain), name_prefix=name) for name in ("actor", "critic")]
        for group in groups:
            assert [variables["CUDA_VISIBLE_DEVICES"] for variables in group.environment()] == ["0,1", "0,1"]
            assert [variables["LOCAL_RANK"] for variables in group.environment()] == ["0", "1"]
        assert ray.available_resources().get("GPU", 0) == 0
        assert [bundle.gpu for bundle in pool.bundles()] == ["0", "1"]
        for group in groups:
            group.shutdown()


def test_a_pool_with_one_gpu_for_two_bundles_returns_them(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    same = reservation.gpus_of_bundles
    monkeypatch.setattr(reservation, "gpus_of_bundles", lambda gpus: same([gpus[0]] * len(gpus)))
    with pytest.raises(ResourceError):
        RayResourcePool([2], name_prefix="doubled").reserve()
    left = [group for group in placement_group_table().values() if group["name"].startswith("doubled/")]
    assert [group["state"] for group in left] == ["REMOVED"]


def test_addresses_are_ordered_as_numbers() -> None:
    addresses = ["10.0.0.10", "node-b", "10.0.0.9", "fe80::1", "10.0.0.100"]
    assert sorted(addresses, key=by_address) == ["10.0.0.9", "10.0.0.10", "10.0.0.100", "fe80::1", "node-b"]


def test_two_declared_nodes_may_share_one_that_has_room_but_none_is_torn_apart() -> None:
    def shapes(*counts: int) -> list[NodeShape]:
        return [NodeShape(count, (("GPU", 1.0),)) for count in counts]

    assert fits(shapes(2, 6), [{"GPU": 8}])
    assert fits(shapes(6, 6), [{"GPU": 8}, {"GPU": 8}])
    assert not fits(shapes(6, 6), [{"GPU": 16 - 8}, {"GPU": 4}])
    assert not fits(shapes(8), [{"GPU": 4}, {"GPU": 4}])


def test_nodes_with_different_numbers_of_processes_agree_on_the_world(ray_cluster: None) -> None:
    with (
        RayResourcePool([3, 1], use_gpu=False) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Plain)) as group,
    ):
        environments = group.environment()
    assert [variables["WORLD_SIZE"] for variables in environments] == ["4"] * 4
    assert [variables["RANK"] for variables in environments] == ["0", "1", "2", "3"]
    assert [variables["LOCAL_RANK"] for variables in environments] == ["0", "1", "2", "0"]
    assert [variables["LOCAL_WORLD_SIZE"] for variables in environments] == ["3", "3", "3", "1"]
    assert [variables["RAY_LOCAL_RANK"] for variables in environments] == ["0", "1", "2", "0"]
    assert [variables["RAY_LOCAL_WORLD_SIZE"] for variables in environments] == ["3", "3", "3", "1"]


def test_parts_of_a_pool_share_its_slots(pool: RayResourcePool, start: Start) -> None:
    start("actor")
    left, right = pool.split(1)
    with RayWorkerGroup(left, RayClassWithInitArgs(Plain, "left"), name_prefix="left") as group:
        assert group.get() == ["left"]
        assert group.environment()[0]["WORLD_SIZE"] == "1"
        assert left.holders == ["actor", "left"]
        assert right.holders == ["actor"]
        with pytest.raises(ResourceError):
            start("everywhere")


def test_a_pool_is_split_into_sizes_that_add_up(pool: RayResourcePool) -> None:
    assert [part.world_size for part in pool.split([1, 1])] == [1, 1]
    with pytest.raises(ResourceError):
        pool.split([1, 2])
    with pytest.raises(ResourceError):
        pool.sub_pool(1, 3)


def test_a_pool_comes_back_after_its_cluster_was_left_by_its_groups(pool: RayResourcePool, start: Start) -> None:
    first = start("first")
    assert first.environment()[0]["RANK"] == "0"
    pool.shutdown()
    assert first.executor.processes.handles.state is GroupState.ENDED  # not broken by processes that died
    assert ray.available_resources()["CPU"] >= 4
    assert start("second").environment()[1]["RANK"] == "1"
