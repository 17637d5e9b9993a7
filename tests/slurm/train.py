"""The driver of the tests: train a tiny model on ranks of two nodes.

    train.py steps=3      train three steps, on four ranks of two nodes and on one rank, and compare the losses
    train.py steps=0      train until the job ends

The last argument counts. It prints a line for every step. Tensor parallelism crosses the nodes, for its warning.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import ray
import torch

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from workers import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config

VOCABULARY, ROWS, LENGTH = 61, 8, 12
CONFIG = {
    "model": {
        "vocab_size": VOCABULARY,
        "max_sequence_length": LENGTH,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "init_method_std": 0.1,
    },
    "optim": {"lr": 1e-2, "eps": 1e-4},
    "rollout": {"prompt_length": LENGTH // 2, "response_length": LENGTH // 2},
}


def main(steps: int) -> None:
    ray.init(log_to_driver=False)
    signal.signal(signal.SIGTERM, interrupt)  # after ray.init, which sets a handler that raises SystemExit
    batch = sequences()
    with RayResourcePool([2, 2], use_gpu=False, name_prefix="two-nodes") as pool:
        group = start(pool, tp=2)
        print(f"ranks run on nodes {', '.join(group.topology.nodes or ())}", flush=True)
        losses = []
        while not steps or len(losses) < steps:
            losses.append(train(group, batch))
            print(f"step {len(losses)} loss {losses[-1]:.6f}", flush=True)
    with RayResourcePool([1], use_gpu=False, name_prefix="one-rank") as pool:
        group = start(pool, tp=1)
        alone = [train(group, batch) for _ in range(steps)]
    difference = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
    print(f"largest difference from one rank {difference:.1e}; the loss fell by {losses[0] - losses[-1]:.3f}")
    ray.shutdown()


def start(pool: RayResourcePool, tp: int) -> MegatronRayWorkerGroup:
    config = load_config(ActorConfig, CONFIG | {"parallel": {"tp": tp, "order": "dp-tp-cp-ep-pp"}})
    group = MegatronRayWorkerGroup(
        pool, RayClassWithInitArgs(ActorRolloutRefWorker, config, "actor"), name_prefix="actor"
    )
    group.init_model()
    return group


def train(group: MegatronRayWorkerGroup, batch: DataProto) -> float:
    return float(group.update_sft(batch).meta_info["metrics"]["sft/loss"][0])


def sequences() -> DataProto:
    ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    loss_mask = mask.clone()
    loss_mask[:, 0] = 0  # no token predicts the first one
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask})


def interrupt(signal_number: int, frame: FrameType | None) -> None:
    print(f"the driver got {signal.Signals(signal_number).name}", flush=True)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(int(sys.argv[-1].removeprefix("steps=")))
