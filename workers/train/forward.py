"""Run rows through a model chunk, and compute log-probabilities or values on the last stage."""

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
    """Return the chunk's hidden states ``[seq / cp (/ tp under sequence parallelism), rows, hidden]``.

    On the last stage they are the input of its output layer, after the final norm.

    Args:
        model: the chunk, wrapped or not.
        rows: the micro-batch, on the device. Packed rows are one row.
        pg: the groups of the layout.
    """
    with _without_output_layer(unwrap_model(model)):
        args, kwargs = _inputs(model, rows, pg)
        return model(*args, **kwargs)


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
    """Return the log-probability of every target, and the entropy of its distribution: float32 ``[2, rows, targets]``.

    Under context parallelism both are 0 for the targets that another rank predicts.

    Args:
        model: the last chunk of the model, wrapped or not.
        hidden: its hidden states, from ``forward_hidden``.
        rows: the micro-batch, on the device.
        pg: the groups of the layout.
        vocab_size: entries of the vocabulary, without padding.
        temperature: see ``vocab_parallel.log_probs_and_entropy``.
        chunk_tokens: see there.
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
    """Return the output of a model with a value head: float32 ``[rows, targets]``, or off the last stage hidden states.

    A target's value is the head's output at the column that predicts it, as for log-probabilities.

    Args:
        model: the chunk, wrapped or not.
        rows: the micro-batch, on the device.
        pg: the groups of the layout.
    """
    args, kwargs = _inputs(model, rows, pg)
    output = model(*args, **kwargs)
    if not unwrap_model(model).post_process:
        return output
    sequences, columns, owned = _locate(rows, pg)
    return output[sequences, columns, 0].float() * owned


def owned_targets(rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """Return ``[rows, targets]``: 1 if this context-parallel rank has the column that predicts the target, else 0."""
    return _locate(rows, pg)[2]


def sum_over_context(column: Tensor, pg: ProcessGroupCollection) -> Tensor:
    """Sum ``column`` ``[..., rows, targets]`` over context-parallel ranks in place, and return it."""
    if pg.cp.size() > 1:
        dist.all_reduce(column, group=pg.cp)
    return column


def _inputs(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the chunk's ``forward`` for this context-parallel rank's tokens."""
    columns = torch.arange(rows.tokens.size(1), device=rows.tokens.device).expand_as(rows.tokens)
    further: dict[str, Any] = {}
    if rows.packing is not None:
        further["packed_seq_params"] = rows.packing.params()
    if torch.is_grad_enabled() and padding_matters(model):
        padding = _local_columns((columns >= rows.lengths[:, None]) | ~rows.counted[:, None], rows, pg)
        chunk = unwrap_model(model)
        if chunk.config.sequence_parallel and not chunk.pre_process:  # a first stage divides it over tp itself
            padding = padding.chunk(pg.tp.size(), dim=1)[pg.tp.rank()]
        further["padding_mask"] = padding
    return (_local_columns(rows.tokens, rows, pg), _local_columns(columns, rows, pg), None), further


def _local_columns(column: Tensor, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """This context-parallel rank's part of ``column`` ``[rows, seq]``, in the shape that the model expects."""
    if rows.packing is None:
        return zigzag_slice(column, pg.cp.size(), pg.cp.rank())
    return column[rows.packing.tokens_of_rank(pg.cp.size(), pg.cp.rank())][None]


def _at_predictors(
    hidden: Tensor, rows: TokenBatch, pg: ProcessGroupCollection, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    """``hidden`` at the columns that predict the targets ``[rows, targets, hidden]``, and 1 if this rank has it."""
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=pg.tp)
    sequences, columns, owned = _locate(rows, pg)
    return hidden[columns, sequences], owned


def _locate(rows: TokenBatch, pg: ProcessGroupCollection) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence and column of the predictors in this rank's input, and 1 if it has them; each ``[rows, targets]``."""
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
    """End the forward pass of a last stage before its output layer."""
    kept = model.post_process
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = kept
