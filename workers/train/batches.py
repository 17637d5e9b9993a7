"""Token batches: rows of a batch shifted to the left edge, with the tokens to score or to train on.

Rows arrive padded on the left (prompts) and on the right (responses). They are shifted to column 0 before they reach
a model. A causal mask alone then hides the padding in every attention implementation and in every context-parallel
split, and nothing is computed for columns that are padding in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcontroller.data.meta import ROWS_TOGETHER, check_near_names, rows_together
from mcontroller.errors import DataError, before_changes
from parallel_state.agreement import raise_on_every_rank
from workers.columns import TOKEN_TEMPERATURES
from workers.distinct_tokens import DistinctTokens, distinct_tokens
from workers.train.batch_checks import (
    TOP_COLUMNS,
    check_finite,
    check_mask,
    check_responses,
    check_shapes,
    check_temperatures,
    check_token_ids,
    check_top_columns,
    locate_tokens,
    require_columns,
)
from workers.train.packing import LocalTargets, Packing, locate_local_targets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mcontroller.data.batch import DataProto
    from workers.router_replay.rows import RowExperts


@dataclass
class TokenBatch:
    """Left-aligned rows of tokens, and the targets among them that are scored or trained on.

    Attributes:
        tokens: ``[rows, seq]`` int64, each row from column 0.
        targets: ``[rows, targets]`` int64, the tokens to predict.
        predictors: ``[rows, targets]`` int64, the column of ``tokens`` whose output predicts each target.
        mask: ``[rows, targets]`` float32, 0 if a target is padding or does not count.
        lengths: ``[rows]`` int64, the tokens of each row without padding.
        columns: other inputs of the loss, each ``[rows, targets]``, or ``[rows, targets, k]`` of a teacher.
        temperature: divides the logits when the rows are scored, unless ``token_temperatures`` is in ``columns``.
        packing: the position of each row in one sequence, if the rows go through the model as one; otherwise None.
        distinct: the tokens that go through the model, if they are not all tokens of the rows; otherwise None.
        whole_mask: the mask before it was limited to the targets of this context-parallel rank, while a loss is
            computed; otherwise None.
        local: the targets that count and that this context-parallel rank predicts, after ``for_rank``; otherwise None.
        ahead: the same for each layer of multi-token prediction; the k-th predicts from k columns before.
        experts: what routers record or are to choose (see ``workers.router_replay``); otherwise None.
        together: every so many consecutive rows are in one micro-batch, filling included: ``rows_together`` of the
            batch.
    """

    tokens: Tensor
    targets: Tensor
    predictors: Tensor
    mask: Tensor
    lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    temperature: float = 1.0
    packing: Packing | None = None
    distinct: DistinctTokens | None = None
    local: LocalTargets | None = None
    ahead: tuple[LocalTargets, ...] = ()
    whole_mask: Tensor | None = None
    experts: RowExperts | None = None
    together: int = 1

    def __len__(self) -> int:
        return self.tokens.size(0)

    @property
    def counted(self) -> Tensor:
        """Whether each row has a target that counts, or one together with it: bool ``[rows]``, False for filling."""
        counted = (self.mask != 0).any(1)
        if self.together == 1:
            return counted
        return counted.view(-1, self.together).any(1).repeat_interleave(self.together)

    @property
    def input_shape(self) -> tuple[int, int]:
        """Number and length of the sequences that the model takes, over all ranks of the cp axis."""
        one = self.packing or self.distinct
        return (len(self), self.tokens.size(1)) if one is None else (1, one.total)

    def take(self, index: Tensor, valid: int) -> TokenBatch:
        """Return the rows at ``index``, with the mask set to 0 from the ``valid``-th on, which only fill the batch.

        Args:
            index: ``[n]`` int64, row numbers; a row may come more than once.
            valid: number of leading rows of the result that count.
        """
        mask = self.mask[index]
        mask[valid:] = 0.0
        return TokenBatch(
            self.tokens[index],
            self.targets[index],
            self.predictors[index],
            mask,
            self.lengths[index],
            {name: column[index] for name, column in self.columns.items()},
            self.temperature,
            experts=None if self.experts is None else self.experts.take(index, valid),
            together=self.together,
        )

    def narrow(self, width: int) -> TokenBatch:
        """Return the rows cut to ``width`` tokens; no row may be longer."""
        predictors = self.predictors.clamp(max=width - 1)
        experts = None if self.experts is None else self.experts.narrow(width)
        tokens = self.tokens[:, :width].contiguous()
        return replace(self, tokens=tokens, predictors=predictors, local=None, ahead=(), experts=experts)

    def with_distinct_tokens(self, multiple: int) -> TokenBatch:
        """Return the batch with ``distinct`` if that is worth it; call it before ``for_rank``.

        Args:
            multiple: the number of tokens is a multiple of this.
        """
        return replace(self, distinct=distinct_tokens(self.tokens, self.predictors, self.mask, multiple))

    def for_rank(self, cp: int, rank: int, ahead: int = 0) -> TokenBatch:
        """Return the batch with ``local`` and ``ahead`` of one context-parallel rank; call it before ``to``.

        Args:
            cp: size of the cp axis.
            rank: coordinate on the cp axis.
            ahead: the layers of multi-token prediction.
        """
        located = []
        for back in range(ahead + 1):
            mask, predictors = self.mask * (self.predictors >= back), (self.predictors - back).clamp(min=0)
            located.append(
                locate_local_targets(
                    mask, predictors, self.tokens.size(1), self.packing, cp=cp, rank=rank, distinct=self.distinct
                )
            )
        return replace(self, local=located[0], ahead=tuple(located[1:]))

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on ``device``."""
        experts = None if self.experts is None else self.experts.to(device)
        return replace(_moved(self, device), experts=experts)


def _moved(value: Any, device: torch.device) -> Any:
    """Return a tensor on ``device``, or a dataclass, dict or tuple with its tensors there."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _moved(getattr(value, one.name), device) for one in fields(value)})
    if isinstance(value, dict):
        return {name: _moved(column, device) for name, column in value.items()}
    return tuple(_moved(one, device) for one in value) if isinstance(value, tuple) else value


def tensor_columns(data: DataProto) -> dict[str, Tensor]:
    """Return the batch's tensors on the CPU, where they are checked and divided into micro-batches."""
    return {
        name: column.cpu() if isinstance(column, Tensor) else column.cpu().to_dict()
        for name, column in data.tensors().items()
    }


def response_batch(
    batch: Mapping[str, Tensor],
    columns: Sequence[str] = (),
    *,
    method: str,
    vocab_size: int,
    max_length: int,
    multiple: int = 1,
    temperature: float = 1.0,
) -> TokenBatch:
    """Build a token batch whose targets are the response tokens.

    Args:
        batch: ``input_ids`` and ``attention_mask`` ``[rows, prompt + response]``, ``responses`` ``[rows, response]``,
            ``response_mask`` if there is one (otherwise the attention mask of the response), and ``columns``, each
            ``[rows, response]``, or with a third dim if they are ``TOP_COLUMNS``.
        columns: names of other columns that the loss needs.
        method: the worker method that reads the batch, for error messages.
        vocab_size: token ids must be less than this.
        max_length: the most tokens of a row.
        multiple: the sequence length is rounded up to a multiple of this.
        temperature: divides the logits when the rows are scored.

    Raises:
        DataError: if a column is missing or has another shape than the responses; if a row is only padding, has a gap
            in its mask or is longer than ``max_length``; if a token is outside the vocabulary; if ``responses`` differs
            from the end of ``input_ids``; if ``response_mask`` is 1 on padding; if a mask has values other than 0 and
            1; if ``token_temperatures`` is not above 0 for a token that counts, or ``advantages``, ``returns`` or
            ``importance_weights`` are not finite for one.
    """
    require_columns(batch, ("input_ids", "attention_mask", "responses", *columns), method)
    width = batch["responses"].size(1)
    check_token_ids("responses", batch["responses"], method)
    prompt_width = batch["input_ids"].size(1) - width
    if prompt_width < 1 or width < 1:
        raise DataError(
            f"{method}: input_ids is {batch['input_ids'].size(1)} tokens wide, responses {width}: input_ids must "
            "contain the prompt and the response, each of at least one token, and therefore be wider than responses",
            method=method,
            columns=["input_ids", "responses"],
        )
    if "response_mask" in batch:
        columns = (*columns, "response_mask")
    if TOP_COLUMNS[0] in columns:
        check_top_columns(batch, vocab_size, method)
    of_tokens = {name: batch[name][..., 0] if name in TOP_COLUMNS else batch[name] for name in columns}
    check_shapes(of_tokens, (len(batch["responses"]), width), method)
    if "response_mask" in batch:
        check_mask("response_mask", batch["response_mask"], method)
    tokens, start, lengths = _left_aligned(batch, method, vocab_size, max_length, multiple)
    check_responses(batch, prompt_width, method)
    predictors = prompt_width - 1 + torch.arange(width)[None] - start[:, None]
    mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"][:, prompt_width:]
    if TOKEN_TEMPERATURES in columns:
        check_temperatures(batch[TOKEN_TEMPERATURES], mask, method)
    check_finite({name: batch[name] for name in columns}, mask, method)
    return TokenBatch(
        tokens,
        batch["responses"],
        predictors.clamp(0, tokens.size(1) - 1),
        mask.float(),
        lengths,
        {name: _counted(batch[name], mask.bool()) for name in columns if name != "response_mask"},
        temperature,
    )


def _counted(column: Tensor, mask: Tensor) -> Tensor:
    """Return the column with 0 for NaN and Inf in tokens that do not count, which would reach gradients as 0 * NaN."""
    if not column.is_floating_point():
        return column
    counts = mask.view(*mask.shape, *[1] * (column.dim() - mask.dim()))
    return torch.where(counts | column.isfinite(), column, 0.0)


def supervised_batch(
    batch: Mapping[str, Tensor], *, method: str, vocab_size: int, max_length: int, multiple: int = 1
) -> TokenBatch:
    """Build a token batch whose targets are the tokens with a ``loss_mask`` of 1, each predicted by the one before it.

    Args:
        batch: ``input_ids``, ``attention_mask`` and ``loss_mask``, each ``[rows, seq]``.
        method: the worker method that reads the batch, for error messages.
        vocab_size: token ids must be less than this.
        max_length: the most tokens of a row.
        multiple: the sequence length is rounded up to a multiple of this.

    Raises:
        DataError: as ``response_batch``; also if ``loss_mask`` is 1 on padding or on the first token of a row.
    """
    require_columns(batch, ("input_ids", "attention_mask", "loss_mask"), method)
    check_shapes({"loss_mask": batch["loss_mask"]}, tuple(batch["input_ids"].shape), method)
    check_mask("loss_mask", batch["loss_mask"], method)
    tokens, start, lengths = _left_aligned(batch, method, vocab_size, max_length, multiple)
    first = torch.arange(batch["input_ids"].size(1))[None] == start[:, None]
    wrong = (batch["loss_mask"] != 0) & ((batch["attention_mask"] == 0) | first)
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        raise DataError(
            f"{method}: loss_mask of row {row} is 1 on padding or on the first token, which no token predicts",
            method=method,
            column="loss_mask",
            row=row,
        )
    mask = _shift(batch["loss_mask"].float(), start, tokens.size(1))
    predictors = torch.arange(tokens.size(1) - 1)[None].expand(len(tokens), -1)
    return TokenBatch(tokens, tokens[:, 1:], predictors, mask[:, 1:].contiguous(), lengths)


class RowReader:
    """Reads batches as token batches for one model; an error on a data-parallel rank is raised on all (collectives).

    Args:
        vocab_size: token ids must be less than this.
        max_length: the most tokens of a row.
        multiple: the sequence length is rounded up to a multiple of this.
        group: the data-parallel ranks.
    """

    def __init__(self, vocab_size: int, max_length: int, multiple: int, group: ProcessGroup) -> None:
        self._limits = {"vocab_size": vocab_size, "max_length": max_length, "multiple": multiple}
        self._group = group

    def responses(
        self,
        data: DataProto,
        method: str,
        columns: Sequence[str] = (),
        *,
        temperature: float = 1.0,
        experts: Callable[[Mapping[str, Tensor], TokenBatch], RowExperts] | None = None,
    ) -> TokenBatch:
        """Return the rows whose targets are the response tokens, with the arguments and errors of ``response_batch``.

        Args:
            data: the rows of this rank.
            method: the worker method that reads them, for error messages.
            columns: names of other columns that the loss needs.
            temperature: divides the logits when the rows are scored.
            experts: returns the ``experts`` of the rows from the columns of the batch; None if there are none.
        """

        def build(batch: Mapping[str, Tensor]) -> TokenBatch:
            rows = response_batch(batch, columns, method=method, **self._limits, temperature=temperature)
            if experts is not None:
                rows.experts = experts(batch, rows)
            return rows

        return self._read(data, build)

    def supervised(self, data: DataProto, method: str) -> TokenBatch:
        """Return the rows whose targets have a ``loss_mask`` of 1: see ``supervised_batch``."""
        return self._read(data, lambda batch: supervised_batch(batch, method=method, **self._limits))

    def _read(self, data: DataProto, build: Callable[[Mapping[str, Tensor]], TokenBatch]) -> TokenBatch:
        batch = tensor_columns(data)

        def read() -> TokenBatch:
            rows = build(batch)
            check_near_names(data.meta_info, ("temperature", ROWS_TOGETHER), "scoring and training")
            rows.together = rows_together(data.meta_info, len(rows))
            return rows

        with before_changes():
            return raise_on_every_rank(read, self._group)


def _left_aligned(
    batch: Mapping[str, Tensor], method: str, vocab_size: int, max_length: int, multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens from column 0 on ``[rows, seq]``; the first column and the length of each row, both ``[rows]``."""
    start, lengths = locate_tokens(batch, method, vocab_size, max_length)
    width = -(-int(lengths.max()) // multiple) * multiple
    tokens = _shift(torch.where(batch["attention_mask"] != 0, batch["input_ids"], 0), start, width)
    return tokens, start, lengths


def _shift(column: Tensor, start: Tensor, width: int) -> Tensor:
    """``[rows, width]``: each row from its start on, with 0 after its end."""
    index = start[:, None] + torch.arange(width)[None]
    inside = index < column.size(1)
    return column.gather(1, index.clamp(max=column.size(1) - 1)) * inside
