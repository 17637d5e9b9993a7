"""Measure the round trips of ``roundtrip.py`` with verl 0.4 or 0.9. ``roundtrip.py`` runs it in verl's environment.

    PEER_PYTHON benchmarks/roundtrip_verl.py [--megabytes 0.2 15 120] [--repeats 20]

Prints one line of JSON: verl's version, and median seconds by batch size and method. The workers declare the layout
(TP2 x PP2 x DP2): in 0.4 with their rank infos, in 0.9 by registering a mesh. Megatron does not run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
import verl
from verl import DataProto
from verl.single_controller.base import decorator
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

SEQUENCE = 1024
OPTIONS: dict[str, Any] = {}

if hasattr(decorator, "make_nd_compute_dataproto_dispatch_fn"):  # 0.9
    SPLIT = decorator.make_nd_compute_dataproto_dispatch_fn("layout")
    Group = RayWorkerGroup
    OPTIONS["device_name"] = "cpu"

    class Placed(Worker):
        def __init__(self) -> None:
            super().__init__()
            rank = int(os.environ["RANK"])
            self._register_dispatch_collect_info("layout", dp_rank=rank // 2 % 2, is_collect=rank % 2 == 0 and rank > 3)

else:
    from verl.single_controller.base.megatron.worker import MegatronWorker
    from verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo
    from verl.single_controller.ray.megatron import NVMegatronRayWorkerGroup as Group

    SPLIT = Dispatch.MEGATRON_COMPUTE_PROTO

    class Placed(MegatronWorker):
        def get_megatron_rank_info(self) -> DistRankInfo:
            rank = int(os.environ["RANK"])
            return DistRankInfo(tp_rank=rank % 2, dp_rank=rank // 2 % 2, pp_rank=rank // 4, cp_rank=0)

        def get_megatron_global_info(self) -> DistGlobalInfo:
            return DistGlobalInfo(tp_size=2, dp_size=2, pp_size=2, cp_size=1)


@ray.remote
class Peer(Placed):
    @register(dispatch_mode=SPLIT)
    def column(self, batch: DataProto) -> DataProto:
        return batch.select(batch_keys=["score"])

    @register(dispatch_mode=SPLIT)
    def metrics(self, batch: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rows": len(batch)}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        return None


def make_batch(megabytes: float) -> DataProto:
    rows = max(2, round(megabytes * 1e6 / (SEQUENCE * 28)) // 2 * 2)
    ids = {name: torch.randint(0, 100, (rows, SEQUENCE)) for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict({**ids, "score": torch.rand(rows, SEQUENCE)})


def median(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.2, 15, 120])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    ray.init("local", num_cpus=16, object_store_memory=2_000_000_000, include_dashboard=False, log_to_driver=False)
    pool = RayResourcePool([8], use_gpu=False, max_colocate_count=1)
    group: Any = Group(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(Peer), **OPTIONS)
    seconds: dict[str, float] = {"empty": median(group.empty, options.repeats * 5)}
    for megabytes in options.megabytes:
        batch = make_batch(megabytes)
        assert torch.equal(group.column(batch).batch["score"], batch.batch["score"])
        for method in ("column", "metrics"):
            call = getattr(group, method)
            seconds[f"{megabytes:g} {method}"] = median(lambda call=call, batch=batch: call(batch), options.repeats)
    ray.shutdown()
    print(json.dumps({"version": verl.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
