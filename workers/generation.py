"""From a batch of prompts to a batch of sequences: whose random numbers, and which columns."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.protocol import DataProto
from workers.agreement import everyones, on_every_rank
from workers.batches import check_prompts, tensor_columns
from workers.config import RolloutConfig
from workers.rollout import Prompts, Rollout
from workers.sampling import Sampling, prompt_hashes, sample_seeds

__all__ = ["generate_batch"]


def generate_batch(
    rollout: Rollout,
    prompts: DataProto,
    config: RolloutConfig,
    *,
    vocab_size: int,
    call: int,
    dp_group: dist.ProcessGroup,
) -> DataProto | None:
    """What ``ActorRolloutRefWorker.generate_sequences`` gives; None where the rollout gives nothing.

    Args:
        call: how many batches were sampled before.
        dp_group: over whose ranks the batch is divided.
    """
    columns = tensor_columns(prompts)
    sampling = Sampling.of(config, prompts.meta_info)
    limits = {"vocab_size": vocab_size, "prompt_length": config.prompt_length}
    on_every_rank(lambda: check_prompts(columns, method="generate_sequences", **limits), dp_group)
    ids, attention = columns["input_ids"], columns["attention_mask"]
    seeds = _seeds(ids, attention, sampling, call, dp_group)
    wanted = Prompts(ids, attention, seeds.view(len(ids), sampling.n))
    generated = rollout.generate(wanted, sampling)
    if generated is None:
        return None
    responses, mask, log_probs = (column.cpu() for column in generated)
    ids, attention, _ = wanted.samples()
    whole = torch.cat((attention, mask), 1)
    tensors = {
        "prompts": ids,
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        "input_ids": torch.cat((ids, responses), 1),
        "attention_mask": whole,
        "position_ids": (whole.cumsum(1) - 1).clamp(min=0),
    }
    others = {name: column.repeat(sampling.n, 0) for name, column in prompts.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, others, prompts.meta_info)


def _seeds(ids: Tensor, attention: Tensor, sampling: Sampling, call: int, dp_group: dist.ProcessGroup) -> Tensor:
    """A seed for every sample of this rank; see ``sampling.sample_seeds`` (a collective over dp)."""
    if not sampling.do_sample:
        return torch.zeros(len(ids) * sampling.n, dtype=torch.long)
    mine = prompt_hashes(ids, attention).tolist()
    earlier = Counter(value for shard in everyones(mine, dp_group)[: dp_group.rank()] for value in shard)
    return sample_seeds(mine, earlier, n=sampling.n, seed=sampling.seed, call=call)
