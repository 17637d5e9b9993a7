"""From a batch of prompts to a batch of sequences: whose random numbers, how many rows at once, which columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mcontroller.protocol import DataProto
from workers.batches import check_prompts, tensor_columns
from workers.config import RolloutConfig
from workers.pipeline import scoring
from workers.rollout import Generated, generate
from workers.sampling import Sampling, prompt_hashes, sample_seeds

__all__ = ["generate_batch"]


def generate_batch(
    model: Sequence[nn.Module],
    pg: ProcessGroupCollection,
    prompts: DataProto,
    config: RolloutConfig,
    vocab_size: int,
    call: int,
    device: torch.device,
) -> DataProto | None:
    """What ``ActorRolloutRefWorker.generate_sequences`` gives; None off the last stage.

    Args:
        call: how many batches were sampled before.
    """
    columns = tensor_columns(prompts)
    sampling = Sampling.of(config, prompts.meta_info)
    check_prompts(columns, method="generate_sequences", vocab_size=vocab_size, prompt_length=config.prompt_length)
    ids, attention = columns["input_ids"], columns["attention_mask"]
    seeds = _seeds(ids, attention, sampling, call, pg)
    ids, attention = (column.repeat_interleave(sampling.n, 0) for column in (ids, attention))
    at_once = config.max_rows or len(ids)
    parts = []
    with scoring(model):
        chunks = [unwrap_model(chunk) for chunk in model]
        for some in zip(ids.split(at_once), attention.split(at_once), seeds.split(at_once), strict=True):
            some_ids, mask, its_seeds = (column.to(device) for column in some)
            parts.append(generate(chunks, pg, some_ids, mask, its_seeds, sampling, vocab_size))
    if pg.pp.rank() != pg.pp.size() - 1:
        return None
    joined = Generated(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))
    whole = torch.cat((attention, joined.mask), 1)
    tensors = {
        "prompts": ids,
        "responses": joined.responses,
        "response_mask": joined.mask,
        "rollout_log_probs": joined.log_probs,
        "input_ids": torch.cat((ids, joined.responses), 1),
        "attention_mask": whole,
        "position_ids": (whole.cumsum(1) - 1).clamp(min=0),
    }
    others = {name: column.repeat(sampling.n, 0) for name, column in prompts.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, others, prompts.meta_info)


def _seeds(ids: Tensor, attention: Tensor, sampling: Sampling, call: int, pg: ProcessGroupCollection) -> Tensor:
    """A seed for every sample of this rank; see ``sampling.sample_seeds`` (a collective over dp)."""
    if not sampling.do_sample:
        return torch.zeros(len(ids) * sampling.n, dtype=torch.long)
    mine = prompt_hashes(ids, attention).tolist()
    everyone: list[list[int]] = [mine for _ in range(pg.dp.size())]
    if pg.dp.size() > 1:
        dist.all_gather_object(everyone, mine, group=pg.dp)
    earlier = Counter(value for shard in everyone[: pg.dp.rank()] for value in shard)
    return sample_seeds(mine, earlier, n=sampling.n, seed=sampling.seed, call=call)
