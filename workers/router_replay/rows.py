"""The experts of the tokens of rows, from a batch to its micro-batches and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from workers.router_replay.routers import NOT_RECORDED, ModelRouters


class ReplayedExperts:
    """Experts that the routers are to choose for the tokens of rows.

    Args:
        routers: the routers of this rank.
        values: ``[rows, seq, routers, topk]``.
    """

    def __init__(self, routers: ModelRouters, values: Tensor) -> None:
        self.routers, self.values = routers, values

    def take(self, index: Tensor, valid: int) -> ReplayedExperts:
        """Return the experts of the rows at ``index``, a micro-batch; rows from the ``valid``-th on only fill it."""
        return ReplayedExperts(self.routers, self.values[index])

    def narrow(self, width: int) -> ReplayedExperts:
        """Return the experts of the first ``width`` tokens of every row."""
        return ReplayedExperts(self.routers, self.values[:, :width])

    def to(self, device: torch.device) -> ReplayedExperts:
        """Return the experts on ``device``."""
        return ReplayedExperts(self.routers, self.values.to(device))

    @contextlib.contextmanager
    def in_pass(self, chunk: nn.Module, positions: Tensor) -> Iterator[None]:
        """Context manager of a pass in which the routers of a chunk choose these experts.

        Args:
            chunk: the unwrapped chunk.
            positions: int64 ``[tokens]``, the place of each token of this rank in the flattened rows ``[rows, seq]``.
        """
        given = self.values[:, :, self.routers.places(chunk)].flatten(0, 1)[positions]
        with self.routers.in_pass(chunk, given, again=torch.is_grad_enabled()):
            yield


class RecordedExperts:
    """The experts that the routers choose for the tokens of rows, or of the micro-batches that are taken from them.

    Args:
        routers: the routers of this rank.
        rows: number of rows.
        width: tokens of a row.
        index: int64 ``[n]``, the positions of the first ``n`` rows in the batch that they are from; rows after them
            only fill a micro-batch. None: the rows are the batch.
    """

    def __init__(self, routers: ModelRouters, rows: int, width: int, index: Tensor | None = None) -> None:
        self.routers, self.width = routers, width
        self._rows = rows
        self._index = torch.arange(rows) if index is None else index
        self._device = torch.device("cpu")
        self._passes: list[tuple[slice, Tensor, Tensor]] = []
        self._parts: list[RecordedExperts] = []

    def take(self, index: Tensor, valid: int) -> RecordedExperts:
        """Return the experts of a micro-batch, which ``gather`` puts in their rows."""
        experts = RecordedExperts(self.routers, len(index), self.width, self._index[index[:valid]])
        self._parts.append(experts)
        return experts

    def narrow(self, width: int) -> RecordedExperts:
        """Return the same object, for rows of ``width`` tokens."""
        self.width = width
        return self

    def to(self, device: torch.device) -> RecordedExperts:
        """Return the same object, for passes on ``device``."""
        self._device = device
        return self

    @contextlib.contextmanager
    def in_pass(self, chunk: nn.Module, positions: Tensor) -> Iterator[None]:
        """Context manager of a pass whose choices are recorded; arguments as of ``ReplayedExperts.in_pass``."""
        with self.routers.in_pass(chunk) as choices:
            yield
        if choices:
            self._passes.append((self.routers.places(chunk), positions, torch.stack(choices, 1).to(self.routers.dtype)))

    def gather(self, pg: ProcessGroupCollection) -> Tensor:
        """Return the experts of all rows in all layers, ``[rows, seq, layers, topk]`` on the CPU.

        It is a collective over tp, cp and pp, and every rank gets the result.

        Args:
            pg: the process groups of the layout.
        """
        shape = (self._rows, self.width, self.routers.layers, self.routers.topk)
        everything = torch.full(shape, NOT_RECORDED, dtype=self.routers.dtype)
        for part in self._parts or [self]:
            local = self.routers.largest(part.local(), pg.tp, pg.cp)
            experts = self.routers.of_all_stages(local).cpu()
            everything[part._index, : part.width] = experts[: len(part._index)]
        return everything

    def local(self) -> Tensor:
        """Return the experts of this rank's routers and tokens, ``[rows, seq, routers, topk]``."""
        sizes = (self._rows * self.width, len(self.routers.local), self.routers.topk)
        values = torch.full(sizes, NOT_RECORDED, dtype=self.routers.dtype, device=self._device)
        for places, positions, chosen in self._passes:
            values[positions, places] = chosen
        return values.unflatten(0, (self._rows, self.width))


RowExperts = ReplayedExperts | RecordedExperts
"""The experts of the rows of a token batch, or of a micro-batch of it."""


def from_first_token(column: Tensor, start: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return ``[rows, width, ...]``, each row from its first token on, and ``NOT_RECORDED`` after its last.

    Args:
        column: ``[rows, columns, ...]``.
        start: int64 ``[rows]``, the column of the first token.
        lengths: int64 ``[rows]``, the number of tokens.
        width: of the result.
    """
    places = torch.arange(width)[None]
    return _moved(column, places + start[:, None], places < lengths[:, None])


def at_columns(values: Tensor, start: Tensor, lengths: Tensor, columns: int) -> Tensor:
    """Return ``[rows, columns, ...]``, the inverse of ``from_first_token``.

    Args:
        values: ``[rows, width, ...]``.
        start: int64 ``[rows]``, the column of the first token.
        lengths: int64 ``[rows]``, the number of tokens.
        columns: of the result.
    """
    places = torch.arange(columns, device=start.device)[None] - start[:, None]
    return _moved(values, places, (places >= 0) & (places < lengths[:, None]))


def _moved(values: Tensor, source: Tensor, inside: Tensor) -> Tensor:
    rows = torch.arange(len(values), device=values.device)[:, None]
    moved = values[rows, source.clamp(0, values.size(1) - 1)]
    return moved.masked_fill_(~inside.view(*inside.shape, *[1] * (values.dim() - 2)), NOT_RECORDED)


def experts_of_responses(recorded: RecordedExperts, lengths: Tensor, mask: Tensor, prompt_columns: int) -> Tensor:
    """Return the experts of prompts and responses, ``[rows, prompt + response, layers, topk]`` (a collective over pp).

    The last token of a response has none: it does not go through the model.

    Args:
        recorded: the experts of the rows, each from the first token of its prompt on, after the passes of generation.
        lengths: int64 ``[rows]``, the tokens of each prompt.
        mask: int64 ``[rows, response]``, 1 for the tokens of the response.
        prompt_columns: columns of the prompts, which are at their right edge.
    """
    values = recorded.routers.of_all_stages(recorded.local())
    computed = lengths + mask.sum(1) - 1
    return at_columns(values, prompt_columns - lengths, computed, prompt_columns + mask.size(1))
