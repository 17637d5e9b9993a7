"""A worker, a pool, a group, a call: the whole programming model, on the CPU cores of this machine.

python -m examples.quickstart
"""

from __future__ import annotations

import ray
import torch

from mcontroller import DataProto, Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register


class Scorer(Worker):
    """Score rows of token ids; each rank gets only its own rows."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch: DataProto) -> DataProto:
        """Return ``scores``, float32 ``[rows]``, and the rank that computed each."""
        scores = batch.batch["input_ids"].float().mean(1) * self.weight
        return DataProto.from_dict({"scores": scores, "rank": torch.full_like(scores, self.rank, dtype=torch.long)})


def main() -> None:
    ray.init("local", num_cpus=8, object_store_memory=200_000_000)
    pool = RayResourcePool(process_on_nodes=[4], use_gpu=False, max_colocate_count=2)
    batch = DataProto.from_dict({"input_ids": torch.arange(24).view(6, 4)})

    with RayWorkerGroup(pool, RayClassWithInitArgs(Scorer, weight=0.5), name_prefix="scorer") as scorer:
        print(pool.describe(), end="\n\n")
        print(scorer.score.explain(batch))  # runs nothing: the rows and bytes of each rank, and which ranks return
        scored = scorer.score(batch)  # reads like a local call
        print(scored.batch["scores"].tolist())
        print(scored.batch["rank"].tolist())
    ray.shutdown()


if __name__ == "__main__":
    main()
