"""From the columns of a batch to rows that a model takes, and the mini-batches they belong to.

Rows arrive padded on the left (prompts) and on the right (responses). They are moved to the left edge before they
reach a model, so that a causal mask alone keeps padding out of every attention implementation and of every context
parallel split, and so that nothing is computed for columns that are padding in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcontroller.errors import DataError
from workers.train.packing import Packing

if TYPE_CHECKING:
    from mcontroller.data.protocol import DataProto

__all__ = [
    "TokenBatch",
    "check_prompts",
    "mini_batch_rows",
    "require_columns",
    "response_rows",
    "supervised_rows",
    "tensor_columns",
]


@dataclass
class TokenBatch:
    """Rows at the left edge, and the tokens in them that something is asked about.

    Attributes:
        tokens: ``[rows, seq]`` int64, each row from column 0.
        targets: ``[rows, targets]`` int64, the tokens asked about.
        predictors: ``[rows, targets]`` int64, the column of ``tokens`` whose output predicts each target.
        mask: ``[rows, targets]`` float32, 0 where a target is padding or does not count.
        lengths: ``[rows]`` int64, the tokens of each row without padding.
        columns: what else the loss needs, each ``[rows, targets]``.
        temperature: divides the logits that the rows are scored with.
        packing: where the rows stand in one sequence, if they go through the model as one.
    """

    tokens: Tensor
    targets: Tensor
    predictors: Tensor
    mask: Tensor
    lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    temperature: float = 1.0
    packing: Packing | None = None

    def __len__(self) -> int:
        return self.tokens.size(0)

    @property
    def counted(self) -> Tensor:
        """``[rows]`` bool: whether a row has a target that counts; filling has none."""
        return (self.mask != 0).any(1)

    @property
    def input_shape(self) -> tuple[int, int]:
        """Sequences and their length as the model takes them, over all ranks of the cp axis."""
        return (len(self), self.tokens.size(1)) if self.packing is None else (1, self.packing.total)

    def take(self, index: Tensor, valid: int) -> TokenBatch:
        """The rows at ``index``; from the ``valid``-th on they are filling, with a mask of 0."""
        mask = self.mask[index]
        mask[valid:] = 0.0
        taken = self._each(lambda column: column[index])
        taken.mask = mask
        return taken

    def narrow(self, width: int) -> TokenBatch:
        """The rows cut to ``width`` tokens, which no row may be longer than."""
        predictors = self.predictors.clamp(max=width - 1)
        return replace(self, tokens=self.tokens[:, :width].contiguous(), predictors=predictors)

    def to(self, device: torch.device) -> TokenBatch:
        """The rows on ``device``."""
        moved = self._each(lambda column: column.to(device))
        return moved if self.packing is None else replace(moved, packing=self.packing.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        return TokenBatch(
            change(self.tokens),
            change(self.targets),
            change(self.predictors),
            change(self.mask),
            change(self.lengths),
            {name: change(column) for name, column in self.columns.items()},
            self.temperature,
        )


def tensor_columns(data: DataProto) -> dict[str, Tensor]:
    """The batch's tensors on the CPU, where they are checked and cut into micro-batches."""
    return {
        name: column.cpu() if isinstance(column, Tensor) else column.cpu().to_dict()
        for name, column in data.tensors().items()
    }


def require_columns(columns: Mapping[str, Tensor], names: Sequence[str], method: str) -> None:
    """Raises DataError, with its name, unless every one of ``names`` is a column of two dims and the batch has rows."""
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError(
            f"{method} needs the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}; "
            f"the batch has {sorted(columns)}",
            method=method,
            missing=missing,
            present=sorted(columns),
        )
    for name in names:
        column = columns[name]
        if not isinstance(column, Tensor) or column.dim() != 2:
            shape = list(column.shape) if isinstance(column, Tensor) else type(column).__name__
            text = f"{method}: column {name!r} is {shape}, expected [rows, tokens]"
            raise DataError(text, method=method, column=name)
    if columns[names[0]].size(0) == 0:
        raise DataError(
            f"{method} was given a batch of 0 rows on this rank: it needs at least one, or dispatch with padding",
            method=method,
            rows=0,
        )


def response_rows(
    batch: Mapping[str, Tensor],
    columns: Sequence[str] = (),
    *,
    method: str,
    vocab_size: int,
    max_length: int,
    multiple: int = 1,
    temperature: float = 1.0,
) -> TokenBatch:
    """Rows whose targets are the response tokens.

    Args:
        batch: ``input_ids`` and ``attention_mask`` ``[rows, prompt + response]``, ``responses`` ``[rows, response]``,
            ``response_mask`` where it exists (otherwise the mask of the response), and ``columns``, each
            ``[rows, response]``.
        multiple: the sequence length is rounded up to a multiple of this.

    Raises:
        DataError: a missing column, a row of padding only or with a hole in its mask, a token outside the
            vocabulary, a row longer than ``max_length``, a column of another width than the responses, responses
            that are not the end of ``input_ids``, a ``response_mask`` on padding, a mask of other numbers than 0 and 1.
    """
    require_columns(batch, ("input_ids", "attention_mask", "responses", *columns), method)
    width = batch["responses"].size(1)
    _check_integers("responses", batch["responses"], method)
    prompt_width = batch["input_ids"].size(1) - width
    if prompt_width < 1:
        raise DataError(
            f"{method}: responses are {width} tokens wide and input_ids {batch['input_ids'].size(1)}: "
            "input_ids holds prompt and response, and is the wider one",
            method=method,
            columns=["input_ids", "responses"],
        )
    if "response_mask" in batch:
        columns = (*columns, "response_mask")
    _check_widths({name: batch[name] for name in columns}, (len(batch["responses"]), width), method)
    if "response_mask" in batch:
        _check_mask("response_mask", batch["response_mask"], method)
    tokens, start, lengths = _left_aligned(batch, method, vocab_size, max_length, multiple)
    _check_responses(batch, prompt_width, method)
    predictors = prompt_width - 1 + torch.arange(width)[None] - start[:, None]
    mask = batch["response_mask"] if "response_mask" in batch else batch["attention_mask"][:, prompt_width:]
    return TokenBatch(
        tokens,
        batch["responses"],
        predictors.clamp(0, tokens.size(1) - 1),
        mask.float(),
        lengths,
        {name: batch[name] for name in columns if name != "response_mask"},
        temperature,
    )


def supervised_rows(
    batch: Mapping[str, Tensor], *, method: str, vocab_size: int, max_length: int, multiple: int = 1
) -> TokenBatch:
    """Rows whose targets are the tokens with a ``loss_mask`` of 1, each predicted from the token before it.

    Args:
        batch: ``input_ids``, ``attention_mask`` and ``loss_mask``, each ``[rows, seq]``.

    Raises:
        DataError: as ``response_rows``; a ``loss_mask`` on padding, or on the first token of a row.
    """
    require_columns(batch, ("input_ids", "attention_mask", "loss_mask"), method)
    _check_widths({"loss_mask": batch["loss_mask"]}, tuple(batch["input_ids"].shape), method)
    _check_mask("loss_mask", batch["loss_mask"], method)
    tokens, start, lengths = _left_aligned(batch, method, vocab_size, max_length, multiple)
    first = torch.arange(batch["input_ids"].size(1))[None] == start[:, None]
    wrong = (batch["loss_mask"] != 0) & ((batch["attention_mask"] == 0) | first)
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        raise DataError(
            f"{method}: loss_mask of row {row} asks for a token that is padding or has none before it to predict it",
            method=method,
            column="loss_mask",
            row=row,
        )
    mask = _shift(batch["loss_mask"].float(), start, tokens.size(1))
    predictors = torch.arange(tokens.size(1) - 1)[None].expand(len(tokens), -1)
    return TokenBatch(tokens, tokens[:, 1:], predictors, mask[:, 1:].contiguous(), lengths)


def check_prompts(batch: Mapping[str, Tensor], *, method: str, vocab_size: int, prompt_length: int) -> None:
    """Raises DataError unless ``input_ids``, ``attention_mask`` ``[rows, prompt]`` are prompts padded on the left."""
    require_columns(batch, ("input_ids", "attention_mask"), method)
    start, lengths = _runs(batch, method, vocab_size, prompt_length)
    unfinished = start + lengths < batch["input_ids"].size(1)
    if bool(unfinished.any()):
        row = int(unfinished.nonzero()[0])
        raise DataError(
            f"{method}: row {row} is padded on the right; prompts are padded on the left, so that every response "
            "begins in the same column",
            method=method,
            row=row,
        )


def mini_batch_rows(
    shard_sizes: Sequence[int], shard: int, mini_batch_size: int, generator: torch.Generator | None
) -> list[tuple[Tensor, int]]:
    """Which rows of one data-parallel shard belong to each mini-batch, and the most rows any shard has in it.

    The rule speaks of the whole batch and not of shards, so that every data-parallel size makes the same mini-batches
    of the same batch: with ``k = ceil(rows / mini_batch_size)`` mini-batches, every ``k`` consecutive rows of the
    batch go one to each mini-batch, in order or, with a generator, in a random order drawn anew for every ``k``
    rows. Consecutive shards of equal size thus hold equally many rows of every mini-batch.

    Args:
        shard_sizes: rows of each data-parallel rank, in the order in which they make the batch.
        shard: the rank asked about.
        mini_batch_size: rows of a mini-batch over all ranks.
        generator: in the same state on every rank.
    """
    total = sum(shard_sizes)
    count = -(-total // mini_batch_size)
    blocks = -(-total // count)
    owner = torch.arange(count).repeat(blocks)
    if generator is not None:
        owner = torch.rand(blocks, count, generator=generator).argsort(1).flatten()
    owner = owner[:total]
    per_shard = [torch.bincount(part, minlength=count) for part in owner.split(list(shard_sizes))]
    most = torch.stack(per_shard).amax(0).tolist()
    mine = owner.split(list(shard_sizes))[shard]
    return [((mine == index).nonzero().flatten(), most[index]) for index in range(count)]


def _check_responses(batch: Mapping[str, Tensor], prompt_width: int, method: str) -> None:
    attended = batch["attention_mask"][:, prompt_width:] != 0
    others = (batch["responses"] != batch["input_ids"][:, prompt_width:]) & attended
    counted = batch["response_mask"] != 0 if "response_mask" in batch else attended
    for column, wrong, what in (
        ("responses", others, "holds other tokens than the end of input_ids"),
        ("response_mask", counted & ~attended, "counts a token that attention_mask says is padding"),
    ):
        if bool(wrong.any()):
            row = int(wrong.any(1).nonzero()[0])
            raise DataError(f"{method}: {column} of row {row} {what}", method=method, column=column, row=row)


def _left_aligned(
    batch: Mapping[str, Tensor], method: str, vocab_size: int, max_length: int, multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens from column 0 on ``[rows, seq]``; the column where each row began and its length, both ``[rows]``."""
    start, lengths = _runs(batch, method, vocab_size, max_length)
    width = -(-int(lengths.max()) // multiple) * multiple
    tokens = _shift(torch.where(batch["attention_mask"] != 0, batch["input_ids"], 0), start, width)
    return tokens, start, lengths


def _runs(batch: Mapping[str, Tensor], method: str, vocab_size: int, max_length: int) -> tuple[Tensor, Tensor]:
    """Where each row's tokens begin and how many there are, both ``[rows]``, once they are known to be sound."""
    ids, attention = batch["input_ids"], batch["attention_mask"] != 0
    _check_integers("input_ids", ids, method)
    _check_widths({"attention_mask": attention}, tuple(ids.shape), method)
    _check_mask("attention_mask", batch["attention_mask"], method)
    if ids.size(1) == 0:
        raise DataError(f"{method}: input_ids is {list(ids.shape)}: rows without a token", method=method, row=0)
    lengths = attention.sum(1)
    start = attention.int().argmax(1)
    columns = torch.arange(ids.size(1))[None]
    solid = (columns >= start[:, None]) & (columns < (start + lengths)[:, None])
    _check_rows(lengths, (solid != attention).any(1), method, max_length)
    outside = attention & ((ids < 0) | (ids >= vocab_size))
    if bool(outside.any()):
        row = int(outside.any(1).nonzero()[0])
        token = int(ids[row][outside[row]][0])
        raise DataError(
            f"{method}: row {row} holds token {token}, the vocabulary has {vocab_size}",
            method=method,
            row=row,
            token=token,
        )
    return start, lengths


def _shift(column: Tensor, start: Tensor, width: int) -> Tensor:
    """``[rows, width]``: each row from its start on, with 0 after its end."""
    index = start[:, None] + torch.arange(width)[None]
    inside = index < column.size(1)
    return column.gather(1, index.clamp(max=column.size(1) - 1)) * inside


def _check_rows(lengths: Tensor, holes: Tensor, method: str, max_length: int) -> None:
    for wrong, what in (
        (lengths == 0, "is padding only: its attention_mask has no 1"),
        (holes, "has a hole: its attention_mask must be one run of 1s, with padding on the left and the right"),
        (lengths > max_length, f"is longer than {max_length}, the most that fits"),
    ):
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise DataError(
                f"{method}: row {row}, of {int(lengths[row])} tokens, {what}",
                method=method,
                row=row,
                length=int(lengths[row]),
                rows=wrong.nonzero().flatten().tolist(),
            )


def _check_integers(name: str, column: Tensor, method: str) -> None:
    if column.dtype.is_floating_point or column.dtype == torch.bool:
        text = f"{method}: {name} is {column.dtype}; token ids are integers"
        raise DataError(text, method=method, column=name, dtype=str(column.dtype))


def _check_mask(name: str, mask: Tensor, method: str) -> None:
    """A mask counts tokens: with fractions of one the loss would be divided by another number than it sums."""
    wrong = (mask != 0) & (mask != 1)
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        value = float(mask[row][wrong[row]][0])
        raise DataError(
            f"{method}: {name} of row {row} holds {value:g}; it is 1 where a token counts and 0 elsewhere "
            "(weigh tokens by another column)",
            method=method,
            column=name,
            row=row,
            value=value,
        )


def _check_widths(columns: Mapping[str, Tensor], shape: tuple[int, ...], method: str) -> None:
    for name, column in columns.items():
        if tuple(column.shape) != shape:
            raise DataError(
                f"{method}: column {name!r} is {list(column.shape)}, expected {list(shape)}",
                method=method,
                column=name,
                shape=tuple(column.shape),
                expected=shape,
            )
