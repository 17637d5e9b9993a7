"""References inside messages: Ray's private names, and nothing left in the store after many calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import ray
import torch
from ray._private import internal_api

from mcontroller.channel.options import ChannelOptions
from mcontroller.data.batch import DataProto
from mcontroller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from mcontroller.ray.values.references import WrittenReference, read_reference, write_reference
from parallel_state import ParallelLayout, Topology
from tests.mcontroller.ray.batch_roles import Batches


def store_bytes() -> int:
    state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(internal_api.get_memory_info_reply(state).store_stats.object_store_bytes_used)


def becomes(condition: Callable[[], bool]) -> bool:
    waited = threading.Event()
    return any(condition() or waited.wait(0.1) for _ in range(300))


@ray.remote(num_cpus=0)
class Reader:
    def total(self, written: WrittenReference) -> float:
        return float(ray.get(read_reference(written)).sum())

    def holds(self) -> WrittenReference:
        self.kept = ray.put(np.ones(300_000))
        return write_reference(self.kept)

    def drop(self) -> None:
        del self.kept


def test_a_written_reference_is_read_elsewhere_and_keeps_nothing_alive(ray_cluster: None) -> None:
    """Fails if a release of Ray changes the private functions, or what they count."""
    gc.collect()
    before = store_bytes()
    reader = Reader.remote()  # type: ignore[attr-defined]
    reference = ray.put(np.ones(300_000))
    written = write_reference(reference)
    assert [type(part) for part in written] == [bytes, bytes, bytes]
    assert ray.get(reader.total.remote(written)) == 300_000
    assert ray.get(read_reference(ray.get(reader.holds.remote()))).sum() == 300_000
    del reference
    ray.get(reader.drop.remote())
    assert becomes(lambda: store_bytes() <= before)
    ray.kill(reader)


def test_nothing_is_left_after_many_calls(ray_cluster: None) -> None:
    gc.collect()
    before = store_bytes()
    batch = DataProto.from_dict({"ids": torch.arange(4096).view(8, -1)})
    with RayResourcePool([2], use_gpu=False, channel=ChannelOptions(inline_bytes=1000)) as pool:
        init, topology = RayClassWithInitArgs(Batches), Topology.from_layout(ParallelLayout(2))
        with RayWorkerGroup(pool, init, name_prefix="many", topology=topology) as group:
            for _ in range(40):
                assert group.same(batch) == batch
                assert group.same(group.same_later(batch)) == batch
                group.same_later(batch)
                assert group.total(batch.batch["ids"]) == [4096 * 4095 / 2] * 2
            group.same(batch)
            assert becomes(lambda: store_bytes() <= before)
            assert group.execute_all_sync("kept_results") == [0, 0]
