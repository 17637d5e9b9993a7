"""The team's loop under a controller: one method to set up, one for a step.

python -m examples.bring_your_own_megatron.loop
"""

from __future__ import annotations

import argparse

import ray
import torch

from examples.bring_your_own_megatron import team
from mcontroller import DataProto, Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from workers import MegatronWorker, ParallelConfig


class TeamWorker(MegatronWorker):
    """Runs the team's ``train_step`` on the rows that the controller sends to its data-parallel rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(ParallelConfig.from_megatron_args(args))
        self.args = args
        self.state = team.setup_model_and_optimizer(args)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def train_step(self, batch: DataProto) -> DataProto:
        """Train on ``tokens``, int64 ``[rows, seq + 1]``, and return the metrics of the step."""
        metrics = team.train_step(self.args, batch.batch["tokens"], *self.state)
        return DataProto(meta_info={"metrics": metrics})


def make_data(args: argparse.Namespace) -> torch.Tensor:
    """Return sequences that count up, int64 ``[40, seq + 1]``."""
    starts = torch.randint(0, args.vocab_size, (40, 1), generator=torch.Generator().manual_seed(1))
    return (starts + torch.arange(args.seq_length + 1)) % args.vocab_size


def steps(group: MegatronRayWorkerGroup, args: argparse.Namespace, data: torch.Tensor) -> list[dict[str, float]]:
    """Return the metrics of every step; the last stage of each data-parallel rank has returned them."""
    found = []
    for tokens in data.split(args.global_batch_size):
        metrics = group.train_step(DataProto.from_dict({"tokens": tokens})).meta_info["metrics"]
        found.append({name: values[0] for name, values in metrics.items()})
    return found


def main() -> None:
    args = team.parse_args(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    ray.init("local", num_cpus=4, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    pool = RayResourcePool([4], use_gpu=torch.cuda.device_count() >= 4)
    with MegatronRayWorkerGroup(pool, RayClassWithInitArgs(TeamWorker, args), name_prefix="team") as group:
        for step, metrics in enumerate(steps(group, args, make_data(args))):
            print(step, "  ".join(f"{name} {value:.6f}" for name, value in sorted(metrics.items())))
    ray.shutdown()


if __name__ == "__main__":
    main()
