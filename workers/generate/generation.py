"""From a batch of prompts to a batch of sequences: whose random numbers, and which columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from workers.config import RolloutConfig
from workers.generate.rollout import Prompts, Rollout
from workers.generate.sampling import Sampling, prompt_hashes, sample_seeds
from workers.train.batches import check_prompts, tensor_columns

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
    columns, rows = tensor_columns(prompts), len(prompts)
    sampling = Sampling.of(config, prompts.meta_info)
    if not 0 <= sampling.pad_token_id < vocab_size:
        raise DataError(
            f"generate_sequences: pad_token_id is {sampling.pad_token_id}, the vocabulary has {vocab_size}",
            method="generate_sequences",
            token=sampling.pad_token_id,
        )
    if max(all_gather_values(rows, dp_group)) > 0 and rows == 0:
        columns = _stand_in(columns)
    limits = {"vocab_size": vocab_size, "prompt_length": config.prompt_length}
    raise_on_every_rank(lambda: check_prompts(columns, method="generate_sequences", **limits), dp_group)
    ids, attention = columns["input_ids"], columns["attention_mask"]
    seeds = _seeds(ids, attention, rows, sampling, call, dp_group)
    wanted = Prompts(ids, attention, seeds.view(len(ids), sampling.n))
    generated = rollout.generate(wanted, sampling)
    if generated is None:
        return None
    responses, mask, log_probs = (column[: rows * sampling.n].cpu() for column in generated)
    ids, attention = (column[: rows * sampling.n] for column in wanted.samples()[:2])
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


def _stand_in(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One prompt of one token, for a rank without any: every rank takes part, and what it makes is dropped.

    A copy of some other prompt would not do: it would count as a sample of that prompt.
    """
    alone = {name: column.new_zeros((1, *column.shape[1:])) for name, column in columns.items()}
    if "attention_mask" in alone:
        alone["attention_mask"][:, -1] = 1
    return alone


def _seeds(
    ids: Tensor, attention: Tensor, rows: int, sampling: Sampling, call: int, dp_group: dist.ProcessGroup
) -> Tensor:
    """A seed for every sample of this rank, 0 for those of a stand-in; see ``sampling.sample_seeds``.

    A collective over dp.
    """
    if not sampling.do_sample:
        return torch.zeros(len(ids) * sampling.n, dtype=torch.long)
    mine = prompt_hashes(ids, attention)[:rows].tolist()
    earlier = Counter(value for shard in all_gather_values(mine, dp_group)[: dp_group.rank()] for value in shard)
    seeds = sample_seeds(mine, earlier, n=sampling.n, seed=sampling.seed, call=call)
    return torch.cat((seeds, seeds.new_zeros((len(ids) - rows) * sampling.n)))
