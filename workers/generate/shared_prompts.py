"""One pass of a prompt through the model for all of its responses, each of which gets a copy of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from workers.distinct_tokens import repeats_prompt


class DistinctPrompts(NamedTuple):
    """The prompts of consecutive rows, each once.

    Attributes:
        ids: int64 ``[prompts, width]``, from column 0 on.
        lengths: int64 ``[prompts]``.
        of_row: int64 ``[rows]``, the prompt of each row. None: every row has a different prompt.
    """

    ids: Tensor
    lengths: Tensor
    of_row: Tensor | None


def distinct_prompts(chunks: Sequence[Any], ids: Tensor, lengths: Tensor) -> DistinctPrompts:
    """Return the prompts of rows without repetitions of the row before.

    Models with experts get every row: which tokens they drop may depend on how many there are.

    Args:
        chunks: the model.
        ids: int64 ``[rows, width]``, from column 0 on.
        lengths: int64 ``[rows]``.
    """
    if chunks[0].config.num_moe_experts is not None:
        return DistinctPrompts(ids, lengths, None)
    first = ~repeats_prompt(ids, lengths)
    if first.all():
        return DistinctPrompts(ids, lengths, None)
    return DistinctPrompts(ids[first], lengths[first], first.cumsum(0) - 1)


def repeat_cache(cache: StaticInferenceContext, of_row: Tensor) -> None:
    """Replace the rows of a cache: row ``i`` becomes a copy of the keys and values of row ``of_row[i]`` so far.

    Args:
        cache: its tensors are ``[positions, rows, ...]``, and keep their order in memory.
        of_row: int64 ``[rows]``, on the device of the cache.
    """
    filled = cache.sequence_len_offset
    for layer, tensors in cache.key_value_memory_dict.items():
        repeated = []
        for tensor in tensors:
            order = torch.tensor(tensor.stride()).argsort(descending=True, stable=True).tolist()
            sizes = (tensor.size(0), len(of_row), *tensor.shape[2:])
            copy = torch.empty_permuted(sizes, order, dtype=tensor.dtype, device=tensor.device)
            copy[:filled] = tensor[:filled].index_select(1, of_row)
            repeated.append(copy)
        cache.key_value_memory_dict[layer] = tuple(repeated)
    cache.max_batch_size = len(of_row)
