"""Core attention in plain PyTorch instead of Transformer Engine's: padded or packed, cached, over the cp axis.

Under context parallelism each rank keeps its queries and gathers the keys and values of all ranks: the simplest exact
scheme, for CPUs and tests.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from mcontroller.errors import ConfigError, DataError
from parallel_state.dry_run import transformer_engine
from workers.model.attend_once import attend_once, attend_short, is_short
from workers.model.packed_rows import bounds_on_host
from workers.zigzag import zigzag_positions

# Fields of TransformerConfig that change attention in ways this module does not compute, and their neutral values.
_NOT_COMPUTED = {"window_attn_skip_freq": None, "softmax_type": "vanilla"}


def attention_window(config: TransformerConfig) -> int | None:
    """Return how many tokens before itself a token attends to in every layer; None if there is no such limit."""
    window = getattr(config, "window_size", None)
    in_all = not getattr(config, "window_attn_skip_freq", None)
    return int(window[0]) if window is not None and window[0] >= 0 and in_all else None


class TEDotProductAttention(MegatronModule):
    """Compute softmax(QK^T / sqrt(d)) V with ``scaled_dot_product_attention``; without parameters.

    It takes the arguments of Megatron's class of the same name.

    Raises:
        ConfigError: the config has sliding windows in some layers, or learned softmax offsets, which need Transformer
            Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **engine_only: Any,
    ) -> None:
        super().__init__(config=config)
        for name, neutral in _NOT_COMPUTED.items():
            if getattr(config, name, neutral) != neutral and name not in transformer_engine.counted_fields():
                raise ConfigError(
                    f"model.transformer.{name}={getattr(config, name)!r} needs Transformer Engine; the local attention "
                    f"computes {name}={neutral!r} only",
                    key=f"model.transformer.{name}",
                    value=getattr(config, name),
                )
        self.tp_group = pg_collection.tp  # read by sharded_state_dict
        self.cp_group = pg_collection.cp
        self.cp = pg_collection.cp.size()
        self.cp_rank = pg_collection.cp.rank()
        self.causal = attn_mask_type != AttnMaskType.no_mask
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = attention_window(config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return ``[seq, batch, heads * width]``; packed: ``[tokens, heads * width]``.

        Args:
            query: ``[seq, batch, heads, width]``, packed without the batch dim, at this rank's positions: the last
                ones of the keys' if keys come from a cache, its zigzag part under context parallelism.
            key: as ``query``, of this rank, or of the cache.
            value: as ``key``; its heads may have another width.
            attention_mask: bool, True where attention is not allowed (Megatron's meaning); ``[batch, 1, 1, keys]``
                masks keys in addition to causality and windows; for one new token after cached ones, it is all that
                masks keys, since the cache may have gaps. ``[batch or 1, 1, queries, keys]`` replaces it. Under context
                parallelism both dims are of the whole sequence, in its own order. None: causality only.
            attn_mask_type: ignored; the type of the layer counts.
            attention_bias: must be None.
            packed_seq_params: the bounds of packed sequences (THD), each of them divided over cp separately; ignored
                if it says that rows are not packed (SBHD).

        Raises:
            DataError: an ``attention_bias``, or a sequence that context parallelism does not divide.
        """
        if attention_bias is not None:
            raise DataError("the local attention does not support attention_bias: pass None, or use Transformer Engine")
        if transformer_engine.is_counted(query) and (query.size(0) > 1 or packed_seq_params is not None):
            bounds = (0, query.size(0) * self.cp) if packed_seq_params is None else bounds_on_host(packed_seq_params)
            rows = query.size(1) if packed_seq_params is None else 1
            pairs = sum((end - start) * (end - start) // self.cp for start, end in itertools.pairwise(bounds)) * rows
            return transformer_engine.attend(query, key, value, pairs=pairs, group=self.cp_group)
        if self.cp > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        if packed_seq_params is not None and packed_seq_params.qkv_format != "sbhd":
            return self._packed(query, key, value, packed_seq_params)
        plain = self.cp == 1 and attention_mask is None and not self._limits(key.size(0))
        if plain and query.size(0) == key.size(0):
            return self._attend(query, key, value, None, is_causal=self.causal)
        return self._attend(query, key, value, self._allowed(query.size(0), key.size(0), attention_mask, query.device))

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        """Compute the attention of each packed sequence to itself."""
        # From [rank's tokens, one rank after another] to [rank, its tokens]: a sequence is a slice of every row.
        key, value = (tensor.unflatten(0, (self.cp, -1)) for tensor in (key, value))
        outputs = []
        for start, end in itertools.pairwise(bounds_on_host(packed)):
            local = slice(start // self.cp, end // self.cp)
            sequence = [query[local], key[:, local].flatten(0, 1), value[:, local].flatten(0, 1)]
            query_of, key_of, value_of = (tensor.unsqueeze(1) for tensor in sequence)
            masked = self.cp > 1 or self._limits(key_of.size(0))
            allowed = self._allowed(query_of.size(0), key_of.size(0), None, query.device) if masked else None
            outputs.append(self._attend(query_of, key_of, value_of, allowed, is_causal=allowed is None and self.causal))
        return torch.cat(outputs).squeeze(1)

    def _allowed(
        self, queries: int, keys: int, masked: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """The keys that each query attends to: bool ``[.., queries, keys]``, in this rank's order."""
        if self.cp == 1 and queries == 1 and (masked is None or masked.size(-2) == 1):  # the last token
            if masked is not None or not self._limits(keys):
                return None if masked is None else ~masked
            return torch.arange(-keys, 0, device=device) >= -1 - (self.window or 0)
        if self.cp > 1:
            query_positions, key_positions = self._zigzag(queries, keys, device)
        else:
            query_positions, key_positions = torch.arange(keys - queries, keys, device=device), None
        if masked is not None and masked.size(-2) > 1:
            if key_positions is None:
                return ~masked
            return ~masked.index_select(-2, query_positions).index_select(-1, key_positions)
        allowed = None
        if self.causal and queries > 1:
            columns = torch.arange(keys, device=device) if key_positions is None else key_positions
            distance = query_positions[:, None] - columns[None, :]
            allowed = distance >= 0
            if self.window is not None:
                allowed &= distance <= self.window
        if masked is not None:
            unmasked = ~(masked if key_positions is None else masked.index_select(-1, key_positions))
            allowed = unmasked if allowed is None else unmasked & allowed
        return allowed

    def _limits(self, keys: int) -> bool:
        """Whether the window hides keys of a sequence."""
        return self.window is not None and keys > self.window + 1

    def _zigzag(self, queries: int, keys: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if queries % 2 or keys != queries * self.cp:
            raise DataError(
                f"context parallelism over {self.cp} ranks divides each sequence into {2 * self.cp} equal pieces; "
                f"this rank has {queries} of {keys} tokens: pad sequences to a multiple of {2 * self.cp}",
                length=keys,
                multiple=2 * self.cp,
            )
        positions = [zigzag_positions(keys, self.cp, rank, device) for rank in range(self.cp)]
        return positions[self.cp_rank], torch.cat(positions)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        allowed: torch.Tensor | None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        if query.size(0) == 1 and not is_causal and not dropout:
            return attend_once(query, key, value, allowed, self.scale)
        if is_causal and not dropout and is_short(query, key):
            return attend_short(query, key, value, self.scale)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [batch, heads, seq, width]
        with self._dropout_random_state() if dropout else contextlib.nullcontext():
            output = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _dropout_random_state(self) -> contextlib.AbstractContextManager[Any]:
        """Heads are divided over tp: each rank draws its own numbers, as in Megatron's DotProductAttention."""
        return contextlib.nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork()
