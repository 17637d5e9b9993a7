"""Supervised training on Megatron's indexed datasets, which the workers read themselves.

The controller sends the numbers of the sequences, 8 bytes for each. Every data-parallel rank reads its own from the
files, which all nodes share.

python -m examples.bring_your_own_megatron.indexed_data
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from torch.nn.utils.rnn import pad_sequence

from mcontroller import DataProto, Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from workers import ActorConfig, ActorRolloutRefWorker, ModelConfig, OptimConfig, ParallelConfig, RolloutConfig

VOCAB, LENGTH = 64, 16


class IndexedDataActor(ActorRolloutRefWorker):
    """A policy that is trained on the sequences of an indexed dataset."""

    def __init__(self, config: ActorConfig, role: str, prefix: str) -> None:
        super().__init__(config, role)
        self.dataset = IndexedDataset(prefix)  # memory-mapped: only what is read is loaded

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def update_sft(self, batch: DataProto) -> DataProto:
        """Make one optimizer step on the sequences whose numbers are ``sequence``, int64 ``[rows]``."""
        sequences = [torch.from_numpy(self.dataset[int(number)].astype("int64")) for number in batch.batch["sequence"]]
        ids = pad_sequence(sequences, batch_first=True)
        attention = pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
        loss = attention.clone()
        loss[:, 0] = 0  # nothing predicts the first token
        return super().update_sft(
            DataProto.from_dict({"input_ids": ids, "attention_mask": attention, "loss_mask": loss})
        )


def write_dataset(prefix: str, sequences: int = 40) -> None:
    """Write sequences of several lengths that count up, as Megatron-LM's ``tools/preprocess_data.py`` writes tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    generator = torch.Generator().manual_seed(1)
    for _ in range(sequences):
        start, length = (
            torch.randint(0, VOCAB, (), generator=generator),
            torch.randint(8, LENGTH, (), generator=generator),
        )
        builder.add_document((start + torch.arange(int(length))) % VOCAB, [int(length)])
    builder.finalize(f"{prefix}.idx")


def make_config(parallel: ParallelConfig) -> ActorConfig:
    model = ModelConfig(VOCAB, max_sequence_length=32, num_layers=2, hidden_size=32, num_attention_heads=4)
    return ActorConfig(
        model=model,
        parallel=parallel,
        optim=OptimConfig(lr=1e-2),
        ppo_micro_batch_size=2,
        rollout=RolloutConfig(prompt_length=16, response_length=16),
    )


def losses(group: Any, sequences: int = 40, batch_size: int = 8) -> list[float]:
    """Train on all sequences once, and return the loss of every step."""
    group.init_model()
    numbers = torch.randperm(sequences, generator=torch.Generator().manual_seed(2)).split(batch_size)
    batches = [DataProto.from_dict({"sequence": each}) for each in numbers]
    return [group.update_sft(batch).meta_info["metrics"]["sft/loss"][0] for batch in batches]


def main() -> None:
    ray.init("local", num_cpus=4, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "data")
        write_dataset(prefix)
        worker = RayClassWithInitArgs(IndexedDataActor, make_config(ParallelConfig(tp=2)), "actor", prefix)
        pool = RayResourcePool([4], use_gpu=torch.cuda.device_count() >= 4)
        with MegatronRayWorkerGroup(pool, worker, name_prefix="actor") as group:
            for step, loss in enumerate(losses(group)):
                print(f"{step}  loss {loss:.6f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
