"""Partitions of rows by their number of tokens, under the names that ported code uses; see ``mcontroller.balance``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mcontroller.balance import balance
from mcontroller.errors import DataError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "rearrange_micro_batches",
    "roundup_divisible",
]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Distribute rows over partitions so that the largest number of tokens is nearly as small as possible.

    Args:
        seqlen_list: [tokens] The length of every row.
        k_partitions: Number of partitions, at least 1 and at most the number of rows.
        equal_size: Whether all partitions have the same number of rows.

    Returns:
        The row numbers of each partition, ascending; no partition is empty.

    Raises:
        DataError: If there are fewer rows than partitions, or ``equal_size`` and the rows do not divide.
    """
    rows = len(seqlen_list)
    if not 1 <= k_partitions <= rows or (equal_size and rows % k_partitions):
        raise DataError(
            f"{rows} rows in {k_partitions} partitions: expected 1 to {rows} partitions"
            + (", and a divisor of the rows with equal_size=True" if equal_size else ""),
            rows=rows,
            k_partitions=k_partitions,
        )
    partitions = [sorted(partition) for partition in balance(seqlen_list, k_partitions, equal_size)]
    for partition in partitions:
        if not partition:  # rows of length 0 balance an empty partition as well as any other
            partition.append(max(partitions, key=len).pop())
    return partitions


karmarkar_karp = greedy_partition = get_seqlen_balanced_partitions


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Return the number of tokens of the smallest and the largest partition, before and after balancing.

    Args:
        seqlen_list: [tokens] The length of every row.
        partitions: The row numbers of each partition. Before balancing, consecutive rows form the partitions.
        prefix: The name before the slash of every key.

    Returns:
        ``min``, ``max``, ``minmax_diff`` before balancing; ``balanced_min``, ``balanced_max`` after it; and ``mean``.
    """
    size = max(1, len(seqlen_list) // len(partitions))
    before = [sum(seqlen_list[start : start + size]) for start in range(0, len(seqlen_list), size)]
    after = [sum(seqlen_list[row] for row in partition) for partition in partitions]
    values = {
        "min": min(before),
        "max": max(before),
        "minmax_diff": max(before) - min(before),
        "balanced_min": min(after),
        "balanced_max": max(after),
        "mean": sum(before) / len(partitions),
    }
    return {f"{prefix}/{name}": value for name, value in values.items()}


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Split a batch into micro-batches of at most about ``max_token_len`` tokens.

    Args:
        batch: Tensors with ``attention_mask`` ``[rows, sequence]``.
        max_token_len: [tokens] Length of a micro-batch, at least the sequence dim.
        dp_group: Group of ranks that compute together; None for all ranks.
        num_batches_divided_by: Number that must divide the number of micro-batches, such as the virtual stages.
        same_micro_num_in_dp: Whether all ranks of ``dp_group`` make as many micro-batches as the one that needs most.
        min_num_micro_batch: Smallest number of micro-batches.

    Returns:
        The micro-batches, and the row numbers of each.

    Raises:
        DataError: If a row may be longer than ``max_token_len``, or there are fewer rows than micro-batches.
    """
    import torch

    mask = batch["attention_mask"]
    if max_token_len < mask.shape[-1]:
        raise DataError(
            f"max_token_len is {max_token_len} for sequences of {mask.shape[-1]} tokens: expected at least as many",
            max_token_len=max_token_len,
        )
    lengths = mask.sum(dim=1).tolist()
    count = max(min(len(lengths), ceildiv(sum(lengths), max_token_len)), min_num_micro_batch or 0)
    if torch.distributed.is_initialized() and same_micro_num_in_dp:
        device = "cuda" if torch.distributed.get_backend(dp_group) == "nccl" else "cpu"
        largest = torch.tensor([count], device=device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        count = int(largest.item())
    if num_batches_divided_by is not None:
        count = roundup_divisible(count, num_batches_divided_by)
    partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
    return [batch[torch.tensor(partition)] for partition in partitions], partitions


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation: entry ``idx_map[i]`` of the result is ``i``."""
    inverse = [0] * len(idx_map)
    for position, index in enumerate(idx_map):
        inverse[index] = position
    return inverse


def ceildiv(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """Return the smallest multiple of ``b`` that is at least ``a``."""
    return ceildiv(a, b) * b
