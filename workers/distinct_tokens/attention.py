"""Core attention over rows, in a model whose other layers compute one sequence of distinct tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from workers.distinct_tokens.spread import Spread

__all__ = ["AttentionOverRows", "RowsOfTokens", "attend_over_rows", "computes_distinct_tokens"]

_POSITIONS = ("none", "rope", "learned_absolute")


@dataclass
class RowsOfTokens(PackedSeqParams):
    """The way from a sequence ``[total, 1, ...]`` to rows ``[seq, rows, ...]`` and back.

    Megatron hands its type to core attention, also when a layer is computed again. To all other code, with
    ``qkv_format="sbhd"``, there is one sequence that is not packed.

    Attributes:
        rows: number of rows.
        to_rows: from tokens to ``[seq, rows]``, flattened.
    """

    rows: int = 0
    to_rows: Spread | None = None

    def spread(self, values: Tensor) -> Tensor:
        """Return ``[seq, rows, ...]`` of ``values`` ``[total, 1, ...]``."""
        assert self.to_rows is not None
        return self.to_rows(values[:, 0]).unflatten(0, (-1, self.rows))

    def collect(self, values: Tensor) -> Tensor:
        """Return ``[total, 1, ...]`` of ``values`` ``[seq, rows, ...]``, of which equal tokens have equal ones."""
        assert self.to_rows is not None
        return self.to_rows.one_of_each(values.flatten(0, 1))[:, None]


class AttentionOverRows(nn.Module):
    """A core attention that gets rows if its layer computes distinct tokens: see ``attend_over_rows``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the core attention's output; the arguments are Megatron's."""
        attend: Any = super().forward
        if not isinstance(packed_seq_params, RowsOfTokens):
            output: Tensor = attend(
                query, key, value, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
            )
            return output
        over = packed_seq_params
        query, key, value = over.spread(query), over.spread(key), over.spread(value)
        return over.collect(attend(query, key, value, attention_mask, *args, **kwargs))


def attend_over_rows(chunk: nn.Module) -> None:
    """Change the classes of a chunk's core attentions, of any kind, to classes that take distinct tokens to rows."""
    for module in _core_attentions(chunk):
        if not isinstance(module, AttentionOverRows):
            kind: Any = type(module)
            module.__class__ = _over_rows(kind)


@functools.cache
def _over_rows(attention: Any) -> type[nn.Module]:
    return type(attention.__name__, (AttentionOverRows, attention), {"__module__": attention.__module__})


def _core_attentions(chunk: nn.Module) -> list[nn.Module]:
    return [module for name, module in chunk.named_modules() if name.endswith(".core_attention")]


def computes_distinct_tokens(model: Sequence[nn.Module]) -> bool:
    """Return whether a model computes the same for distinct tokens as for rows.

    It does if its layers but attention treat tokens one by one. Experts do not: their losses, and which tokens they
    drop, depend on all tokens; neither does dropout, whose numbers are of tokens.

    Args:
        model: this rank's chunks, wrapped or not; all ranks get the same answer.
    """
    return all(_computes(unwrap_model(chunk)) for chunk in model)


def _computes(chunk: nn.Module) -> bool:
    if not isinstance(chunk, GPTModel) or chunk.position_embedding_type not in _POSITIONS:
        return False
    config: Any = chunk.config
    if config.cuda_graph_impl != "none" or config.enable_cuda_graph or config.external_cuda_graph:
        return False  # shapes differ from batch to batch
    if config.num_moe_experts is not None or config.mtp_num_layers or config.multi_latent_attention:
        return False
    if config.hidden_dropout or config.attention_dropout or config.context_parallel_size > 1:
        return False
    return all(isinstance(each, AttentionOverRows) for each in _core_attentions(chunk))
