"""The number of rows that fit into memory in one pass of generation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_model_config
from torch import nn

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowBytes:
    """The bytes that one row of a pass needs on one rank.

    Attributes:
        cache: keys and values of all layers of the rank, for the whole prompt and the whole response.
        workspace: an estimate of what exists at once during the pass over the prompts: the hidden states and the
            feed-forward part of one layer, and float32 logits of one token with the copies that sampling makes.
    """

    cache: int
    workspace: int

    @property
    def total(self) -> int:
        """Cache and workspace."""
        return self.cache + self.workspace


def row_bytes(chunks: Sequence[nn.Module], prompt_width: int, response_length: int, vocab_size: int) -> RowBytes:
    """Return the bytes of one row.

    Args:
        chunks: this rank's model chunks.
        prompt_width: tokens of the longest prompt.
        response_length: tokens of the longest response.
        vocab_size: entries of the vocabulary; logits are gathered over tp.
    """
    config = get_model_config(chunks[0])
    size = config.params_dtype.itemsize
    attentions: list[Any] = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Attention)]
    widths = (
        each.num_query_groups_per_partition * (each.key_hidden_size + each.val_hidden_size) for each in attentions
    )
    cache = (prompt_width + response_length) * sum(widths) * size
    feed_forward = 3 * config.ffn_hidden_size // config.tensor_model_parallel_size
    if config.num_moe_experts is not None:
        experts = config.moe_router_topk * (config.hidden_size + 3 * config.moe_ffn_hidden_size)
        feed_forward = max(feed_forward, experts)
    layer = (6 * config.hidden_size + feed_forward) * size
    return RowBytes(cache, prompt_width * layer + 6 * vocab_size * torch.float32.itemsize)


class RowLimit:
    """The most rows of a pass, from the free memory; the same on all ranks of a replica of the model.

    Args:
        pg: the groups of the layout, with cp=1.
        device: of this rank.
        fraction: of the free memory that a pass may take.
        processes_on_node: processes that share the memory of the host; a GPU reports what others left of its memory.
    """

    def __init__(
        self, pg: ProcessGroupCollection, device: torch.device, *, fraction: float, processes_on_node: int
    ) -> None:
        self.pg = pg
        self.device = device
        self.fraction = fraction
        self.processes_on_node = processes_on_node
        self._logged: set[tuple[int, bool]] = set()

    def of(self, one: RowBytes, rows: int) -> int:
        """Return the most rows, at least 1 (a collective over tp and pp), and log what it follows from.

        Args:
            one: the bytes of one row on this rank.
            rows: the rows to generate; if they do not fit, this is a warning.
        """
        free = self.free_bytes()
        fitting = int(self.fraction * free) // one.total
        limit = torch.tensor(max(fitting, 1), device=self.device)
        for group in (self.pg.tp, self.pg.pp):
            if group.size() > 1:
                dist.all_reduce(limit, op=dist.ReduceOp.MIN, group=group)
        most = int(limit)
        if self.pg.tp.rank() == self.pg.pp.rank() == 0:
            self._log(most, rows, one, free)
        return most

    def free_bytes(self) -> int:
        """Return the memory that this process can still allocate.

        On a GPU that is the free memory, and what torch has reserved and does not use; on a CPU, an equal share of the
        memory that the host has available.
        """
        if self.device.type == "cuda":
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return torch.cuda.mem_get_info(self.device)[0] + unused
        return _available_bytes() // self.processes_on_node

    def _log(self, most: int, rows: int, one: RowBytes, free: int) -> None:
        """Log each limit once. A batch that is generated in parts is a warning, which is visible by default."""
        cut = rows > most
        if (most, cut) in self._logged:
            return
        self._logged.add((most, cut))
        _logger.log(
            logging.WARNING if cut else logging.INFO,
            "generation: at most %d rows at once, of %d: one row takes %.1f MB (%.1f MB of them cached keys and "
            "values), this rank may use %.2f of its %.1f MB of free memory, and the smallest limit of the replica's "
            "ranks counts. To set another limit, set rollout.max_rows or rollout.memory_fraction",
            most,
            rows,
            one.total / 1e6,
            one.cache / 1e6,
            self.fraction,
            free / 1e6,
        )


def _available_bytes() -> int:
    """Return the memory of the host that programs can still get without swapping, as the kernel estimates it."""
    with open("/proc/meminfo") as lines:
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) * 1024
