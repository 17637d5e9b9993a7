"""Generate responses for a DataProto of prompts: check them, assign seeds, and build the columns of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError, before_changes
from mcontroller.ppo.data import ROUTED_EXPERTS
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from workers.config import RolloutConfig
from workers.generate.rollout_protocol import Generated, LogProbBasis, Prompts, Rollout
from workers.generate.sampling import Sampling, prompt_hashes, sample_seeds
from workers.train.batch_checks import check_prompts
from workers.train.batches import tensor_columns

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
    """Generate ``n`` responses for every prompt; see ``ActorRolloutRefWorker.generate_sequences``.

    Args:
        rollout: the engine that generates.
        prompts: this rank's prompts; ``meta_info`` may override the fields of ``config``.
        config: the default settings of sampling.
        vocab_size: token ids must be less than this.
        call: number of batches that were sampled before, on which every seed depends.
        dp_group: the ranks over which the batch is divided.

    Returns:
        The batch with the responses; None if the rollout returns None on this rank.

    Raises:
        DataError: on every rank of ``dp_group``, if the prompts of one of them are invalid (see ``check_prompts``);
            if ``meta_info`` lacks a token id or has one outside the vocabulary.
        ConfigError: if a setting in ``meta_info`` is invalid.
    """
    columns, rows = tensor_columns(prompts), len(prompts)
    with before_changes():
        sampling = Sampling.of(config, prompts.meta_info)
        if not 0 <= sampling.pad_token_id < vocab_size:
            raise DataError(
                f"generate_sequences: pad_token_id is {sampling.pad_token_id}, expected a token id of the vocabulary, "
                f"0 to {vocab_size - 1}",
                method="generate_sequences",
                token=sampling.pad_token_id,
            )
        if max(all_gather_values(rows, dp_group)) > 0 and rows == 0:
            columns = _placeholder_prompt(columns)
        spare = config.response_length - sampling.response_length  # a later turn continues a response
        limits = {"vocab_size": vocab_size, "prompt_length": config.prompt_length + spare}
        raise_on_every_rank(lambda: check_prompts(columns, method="generate_sequences", **limits), dp_group)
    ids, attention = columns["input_ids"], columns["attention_mask"]
    seeds = _seeds(ids, attention, rows, sampling, call, dp_group)
    requested = Prompts(ids, attention, seeds.view(len(ids), sampling.n))
    generated = rollout.generate(requested, sampling)
    if generated is None:
        return None
    tensors, meta_info = _sequences(requested, generated, rows * sampling.n), dict(prompts.meta_info)
    if generated.basis not in (None, LogProbBasis(sampling.temperature, False)):
        assert generated.basis is not None
        tensors["engine_log_probs"] = tensors.pop("rollout_log_probs")
        meta_info["engine_log_probs"] = generated.basis._asdict()
    others = {name: column.repeat(sampling.n, 0) for name, column in prompts.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, others, meta_info)


def _sequences(requested: Prompts, generated: Generated, samples: int) -> dict[str, Tensor]:
    """The columns of the first ``samples`` sequences, on the CPU; those of a placeholder follow them."""
    responses, mask, log_probs, *experts = (column[:samples].cpu() for column in generated.columns())
    ids, attention = (column[:samples] for column in requested.samples()[:2])
    whole = torch.cat((attention, mask), 1)
    return {
        "prompts": ids,
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        "input_ids": torch.cat((ids, responses), 1),
        "attention_mask": whole,
        "position_ids": (whole.cumsum(1) - 1).clamp(min=0),
    } | ({ROUTED_EXPERTS: experts[0]} if experts else {})


def _placeholder_prompt(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One prompt of one token for a rank without prompts, which must take part in collectives; its result is dropped.

    It must not be a copy of another prompt: it would count as a sample of that prompt.
    """
    placeholder = {name: column.new_zeros((1, *column.shape[1:])) for name, column in columns.items()}
    if "attention_mask" in placeholder:
        placeholder["attention_mask"][:, -1] = 1
    return placeholder


def _seeds(
    ids: Tensor, attention: Tensor, rows: int, sampling: Sampling, call: int, dp_group: dist.ProcessGroup
) -> Tensor:
    """A seed for every sample of this rank, 0 for those of a placeholder (a collective over dp).

    See ``sampling.sample_seeds``.
    """
    if not sampling.do_sample:
        return torch.zeros(len(ids) * sampling.n, dtype=torch.long)
    mine = prompt_hashes(ids, attention)[:rows].tolist()
    earlier = Counter(value for shard in all_gather_values(mine, dp_group)[: dp_group.rank()] for value in shard)
    seeds = sample_seeds(mine, earlier, n=sampling.n, seed=sampling.seed, call=call)
    return torch.cat((seeds, seeds.new_zeros((len(ids) - rows) * sampling.n)))
