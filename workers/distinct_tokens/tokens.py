"""Which tokens of padded rows a model has to compute, each once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.distinct_tokens.attention import RowsOfTokens
from workers.distinct_tokens.prompts import repeats_prompt
from workers.distinct_tokens.spread import Spread, spread_of

__all__ = ["DistinctTokens", "distinct_tokens"]

_WORTH = 0.9
"""The share of the padded rows' tokens below which distinct tokens are cheaper: the copies for attention cost too."""


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

    def to(self, device: torch.device) -> DistinctTokens:
        """Return the indices on ``device``."""
        source, position, of_row = (each.to(device) for each in (self.source, self.position, self.of_row))
        return DistinctTokens(source, position, of_row, self.to_rows.to(device))

    def params(self) -> RowsOfTokens:
        """Return the parameters that take the sequence to rows in attention."""
        rows, width = self.of_row.shape
        return RowsOfTokens(qkv_format="sbhd", max_seqlen_q=width, max_seqlen_kv=width, rows=rows, to_rows=self.to_rows)


def distinct_tokens(tokens: Tensor, predictors: Tensor, mask: Tensor, multiple: int = 1) -> DistinctTokens | None:
    """Return the tokens to compute, or None if they are not clearly fewer than those of the padded rows.

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
    own = needed[counted] - prompts
    of_prompt, of_own = prompts[~repeats], own
    used = int(of_prompt.sum() + of_own.sum())
    total = -(-used // multiple) * multiple
    if total > _WORTH * tokens.numel():
        return None
    prompt_start = (of_prompt.cumsum(0) - of_prompt)[(~repeats).cumsum(0) - 1]
    own_start = of_prompt.sum() + of_own.cumsum(0) - of_own
    before = columns < prompts[:, None]
    of_counted = torch.where(before, prompt_start[:, None] + columns, own_start[:, None] + columns - prompts[:, None])
    inside = columns < needed[counted, None]
    of_row, taken = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
    of_row[counted], taken[counted] = of_counted * inside, inside
    source = torch.zeros(total, dtype=torch.long)
    source[of_row[taken]] = taken.flatten().nonzero().flatten()  # of equal entries, any one
    return DistinctTokens(source, source % width, of_row, spread_of(of_row.T.flatten(), total, taken.T.flatten()))
