"""One pass of rows through a model chunk, and what the last stage makes of it: log-probabilities or values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from workers.model.vocab_parallel import log_probs_and_entropy
from workers.model.zigzag import zigzag_slice
from workers.train.batches import TokenBatch
from workers.train.router_losses import padding_matters

__all__ = ["forward_hidden", "forward_values", "owned_targets", "sum_over_context", "token_scores"]


def forward_hidden(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """The chunk's hidden states ``[seq / cp (/ tp under sequence parallelism), rows, hidden]``; one row if packed.

    On the last stage they are those that its output layer takes, after the final norm.
    """
    with _without_output_layer(unwrap_model(model)):
        return _through(model, rows, pg)


def token_scores(
    model: nn.Module,
    hidden: Tensor,
    rows: TokenBatch,
    pg: ProcessGroupCollection,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """float32 ``[2, rows, targets]``: of every target its log-probability, and the entropy of its distribution.

    Under context parallelism both are 0 for the targets that another rank predicts.

    Args:
        hidden: what ``forward_hidden`` gave on the last stage.
        temperature, chunk_tokens: see ``vocab_parallel.log_probs_and_entropy``.
    """
    chosen, owned = _at_predictors(hidden, rows, pg, unwrap_model(model).config.sequence_parallel)
    log_probs, entropy = log_probs_and_entropy(
        chosen.flatten(0, 1),
        lambda some: _logits(unwrap_model(model), some),
        rows.targets.flatten(),
        pg.tp,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    return torch.stack((log_probs, entropy)).view(2, *rows.targets.shape) * owned


def forward_values(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """The output of a chunk with a value head: on the last stage, float32 ``[rows, targets]``.

    A target's value is the head's output at the column that predicts it, as for log-probabilities.
    """
    output = _through(model, rows, pg)
    if not unwrap_model(model).post_process:
        return output
    sequences, columns, owned = _locate(rows, pg)
    return output[sequences, columns, 0].float() * owned


def owned_targets(rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """``[rows, targets]``: 1 where this context-parallel rank holds the column that predicts the target."""
    return _locate(rows, pg)[2]


def sum_over_context(column: Tensor, pg: ProcessGroupCollection) -> Tensor:
    """``column`` with every context-parallel rank's part of the targets."""
    if pg.cp.size() > 1:
        dist.all_reduce(column, group=pg.cp)
    return column


def _through(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """The chunk's output for this context-parallel rank's tokens."""
    columns = torch.arange(rows.tokens.size(1), device=rows.tokens.device).expand_as(rows.tokens)
    further: dict[str, Any] = {}
    if rows.packing is not None:
        further["packed_seq_params"] = rows.packing.params()
    if torch.is_grad_enabled() and padding_matters(model):
        padding = _held((columns >= rows.lengths[:, None]) | ~rows.counted[:, None], rows, pg)
        chunk = unwrap_model(model)
        if chunk.config.sequence_parallel and not chunk.pre_process:  # a first stage divides it over tp by itself
            padding = padding.chunk(pg.tp.size(), dim=1)[pg.tp.rank()]
        further["padding_mask"] = padding
    return model(_held(rows.tokens, rows, pg), _held(columns, rows, pg), None, **further)


def _held(column: Tensor, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """What this context-parallel rank holds of ``column`` ``[rows, seq]``, in the shape that the model takes."""
    if rows.packing is None:
        return zigzag_slice(column, pg.cp.size(), pg.cp.rank())
    return column[rows.packing.tokens_of_rank(pg.cp.size(), pg.cp.rank())][None]


def _at_predictors(
    hidden: Tensor, rows: TokenBatch, pg: ProcessGroupCollection, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    """``hidden`` at the columns that predict the targets ``[rows, targets, hidden]``, and 1 where this rank has it."""
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=pg.tp)
    sequences, columns, owned = _locate(rows, pg)
    return hidden[columns, sequences], owned


def _locate(rows: TokenBatch, pg: ProcessGroupCollection) -> tuple[Tensor, Tensor, Tensor]:
    """Where this rank's input holds the predictors: sequence and column, and 1 where it does; ``[rows, targets]``."""
    size, rank = pg.cp.size(), pg.cp.rank()
    each = torch.arange(len(rows), device=rows.tokens.device)[:, None]
    sequences, start = each, torch.zeros_like(each)
    width: int | Tensor = rows.tokens.size(1)
    if rows.packing is not None:
        sequences, start = start, rows.packing.bounds[:-1, None].long() // size
        width = rows.packing.lengths[:, None]
    predictors = rows.predictors.clamp(max=width - 1)
    if size == 1:
        return sequences, predictors + start, torch.ones_like(predictors, dtype=torch.float32)
    piece = width // (2 * size)
    number, offset = predictors // piece, predictors % piece
    second = number == 2 * size - 1 - rank
    owned = (number == rank) | second
    return sequences, torch.where(owned, offset + piece * second, 0) + start, owned.float()


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """This rank's logits ``[tokens, vocab / tp]`` of ``[tokens, hidden]``, by the model's own output layer."""
    layer = model.output_layer
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    kept = layer.sequence_parallel, layer.allreduce_dgrad
    layer.sequence_parallel, layer.allreduce_dgrad = False, layer.tp_group.size() > 1  # the sequence is whole here
    try:
        hidden = hidden.to((layer.weight if weight is None else weight).dtype)
        return layer(hidden[:, None], weight=weight, runtime_gather_output=False)[0][:, 0]
    finally:
        layer.sequence_parallel, layer.allreduce_dgrad = kept


@contextlib.contextmanager
def _without_output_layer(model: Any) -> Iterator[None]:
    """A last stage's forward pass ends before its output layer."""
    kept = model.post_process
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = kept
