"""The distinct tokens of padded rows: a model computes each once, and the results are copied back to the rows.

In the comparison with TRL (8 samples of 8 + 16 tokens) an update takes 0.73 of the CPU time, 0.51 s in place of 0.70,
and a step 0.81; without it the rounding of training, and so the accuracies of ``make demo``, are others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from parallel_state.releases import language_models

_WORTH = 0.9
"""The share of the padded rows' tokens below which distinct tokens are cheaper: the copies for attention cost too."""
_POSITIONS = ("none", "rope", "learned_absolute")


@dataclass(frozen=True)
class Spread:
    """For every place, the source that it takes its values from; a source may be in many places, or in none.

    ``index_select`` copies as well, but on a GPU adds the gradients in any order, so that two runs differ.

    Attributes:
        index: ``[places]`` int64, the source of each place.
        place: ``[sources]`` int64, the first place of each source that counts; 0 if there is none.
        absent: int64, the sources without such a place.
        several: ``[n]`` int64, the sources with several of them.
        others: ``[n, most - 1]`` int64, their other places; padded with the first one.
        weights: float32 ``[n, most - 1]``, 0 for the repeated entries. None: there are none.
    """

    index: Tensor
    place: Tensor
    absent: Tensor
    several: Tensor
    others: Tensor
    weights: Tensor | None

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``[places, ...]`` of ``values`` ``[sources, ...]``."""
        copied: Tensor = _Spreading.apply(values, self)
        return copied

    def one_of_each(self, values: Tensor) -> Tensor:
        """Return ``[sources, ...]`` of ``values`` ``[places, ...]``, which are equal in all places of a source.

        Sources without a place get the values of place 0.
        """
        return values.index_select(0, self.place)

    def sum_of_each(self, values: Tensor) -> Tensor:
        """Return ``[sources, ...]``, the sums of ``values`` ``[places, ...]`` over the places of each source."""
        sums = values.index_select(0, self.place)
        if len(self.absent):
            sums.index_fill_(0, self.absent, 0)
        if len(self.several):
            extra = values.index_select(0, self.others.flatten()).unflatten(0, self.others.shape)
            if self.weights is not None:
                extra = extra * self.weights.to(extra.dtype).view(*self.weights.shape, *[1] * (values.dim() - 1))
            sums.index_add_(0, self.several, extra.sum(1))  # no source comes twice
        return sums


def spread_of(index: Tensor, sources: int, counted: Tensor | None = None) -> Spread:
    """Return the spread that ``index`` describes; call it while the tensors are on the CPU.

    Args:
        index: ``[places]`` int64.
        sources: number of sources.
        counted: bool ``[places]``, False for places whose values nothing reads: their gradient is 0. None: all count.
    """
    places = torch.arange(len(index)) if counted is None else counted.nonzero().flatten()
    by_source, order = index[places].sort(stable=True)
    places = places[order]
    read, times = by_source.unique_consecutive(return_counts=True)
    starts = times.cumsum(0) - times
    place = torch.zeros(sources, dtype=torch.long)
    place[read] = places[starts]
    absent = torch.ones(sources, dtype=torch.bool)
    absent[read] = False
    several = times > 1
    extra = torch.arange(1, int(times.max()) if len(times) else 1)
    inside = extra < times[several, None]
    others = places[starts[several, None] + extra * inside]
    weights = None if bool(inside.all()) else inside.float()
    return Spread(index, place, absent.nonzero().flatten(), read[several], others, weights)


class _Spreading(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, spread: Spread) -> Tensor:
        context.spread = spread
        return values.index_select(0, spread.index)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spread: Spread = context.spread
        return spread.sum_of_each(gradients[0]), None


@dataclass(frozen=True)
class DistinctTokens:
    """The tokens of ``[rows, seq]`` that go through the model, as one sequence ``[1, total]``.

    A prompt is computed once for consecutive rows that begin with it. Tokens after the last one that predicts a target
    which counts are not computed, and neither is padding.

    Attributes:
        source: ``[total]`` int64, the position of each token in the flattened rows; 0 for the filling at the end.
        position: ``[total]`` int64, its column.
        of_row: ``[rows, seq]`` int64, for every token of the rows its position in the sequence; 0 if it is left out.
        to_rows: copies the sequence to ``[seq, rows]``, flattened.
    """

    source: Tensor
    position: Tensor
    of_row: Tensor
    to_rows: Spread

    @property
    def total(self) -> int:
        """Tokens of the sequence."""
        return len(self.source)

    def params(self) -> RowsOfTokens:
        """Return the parameters that take the sequence to rows in attention."""
        rows, width = self.of_row.shape
        return RowsOfTokens(qkv_format="sbhd", max_seqlen_q=width, max_seqlen_kv=width, rows=rows, to_rows=self.to_rows)


def distinct_tokens(tokens: Tensor, predictors: Tensor, mask: Tensor, multiple: int = 1) -> DistinctTokens | None:
    """Return the tokens to compute, or None if they are not clearly fewer than the tokens of the padded rows.

    All tensors are on the CPU.

    Args:
        tokens: ``[rows, seq]`` int64, each row from column 0.
        predictors: ``[rows, targets]`` int64, the column that predicts each target, in increasing order.
        mask: ``[rows, targets]``, 0 if a target does not count.
        multiple: the length of the sequence is rounded up to a multiple of this.
    """
    width = tokens.size(1)
    columns = torch.arange(width)
    needed = ((predictors + 1) * (mask != 0)).amax(1)
    counted = (needed > 0).nonzero().flatten()
    if len(counted) == 0:
        return None
    prompts = torch.minimum(predictors[:, 0] + 1, needed)[counted]
    repeats = repeats_prompt(tokens[counted], prompts)
    responses = needed[counted] - prompts
    of_prompt, of_response = prompts[~repeats], responses
    used = int(of_prompt.sum() + of_response.sum())
    total = -(-used // multiple) * multiple
    if total > _WORTH * tokens.numel():
        return None
    prompt_start = (of_prompt.cumsum(0) - of_prompt)[(~repeats).cumsum(0) - 1]
    response_start = of_prompt.sum() + of_response.cumsum(0) - of_response
    before = columns < prompts[:, None]
    of_counted = torch.where(
        before, prompt_start[:, None] + columns, response_start[:, None] + columns - prompts[:, None]
    )
    inside = columns < needed[counted, None]
    of_row, counts = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    of_row[counted], counts[counted] = of_counted * inside, inside
    source = torch.zeros(total, dtype=torch.long)
    source[of_row[counts]] = counts.flatten().nonzero().flatten()  # of equal entries, any one
    return DistinctTokens(source, source % width, of_row, spread_of(of_row.T.flatten(), total, counts.T.flatten()))


def repeats_prompt(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return whether each row begins with the prompt of the row before: bool ``[rows]``, false for the first.

    Args:
        tokens: int64 ``[rows, seq]``, each row from column 0; what follows the prompt is not compared.
        lengths: int64 ``[rows]``, tokens of each prompt.
    """
    behind = torch.arange(tokens.size(1), device=tokens.device) >= lengths[1:, None]
    repeats = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    repeats[1:] = ((tokens[1:] == tokens[:-1]) | behind).all(1) & (lengths[1:] == lengths[:-1])
    return repeats


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
    if not set(getattr(chunk, "hybrid_layer_pattern", "")) <= set("*-|"):
        return False  # other layers of a HybridModel have a state
    if not isinstance(chunk, language_models()) or chunk.position_embedding_type not in _POSITIONS:
        return False
    config: Any = chunk.config
    if config.cuda_graph_impl != "none" or config.enable_cuda_graph or config.external_cuda_graph:
        return False  # shapes differ from batch to batch
    if getattr(config, "experimental_attention_variant", None):
        return False  # layers whose state depends on the tokens before
    if config.num_moe_experts is not None or config.mtp_num_layers or config.multi_latent_attention:
        return False
    of_adapters = getattr(getattr(chunk, "lora", None), "dropout", 0.0)
    if of_adapters or config.hidden_dropout or config.attention_dropout or config.context_parallel_size > 1:
        return False
    return all(isinstance(attention, AttentionOverRows) for attention in _core_attentions(chunk))
