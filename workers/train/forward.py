"""Run rows through a model chunk, and compute log-probabilities or values on the last stage."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from workers.columns import TOKEN_TEMPERATURES
from workers.model.token_prediction import is_trained
from workers.model.vocab_parallel import log_probs_and_entropy, top_log_probs
from workers.train.batches import TokenBatch
from workers.train.packing import LocalTargets, without_values
from workers.train.router_losses import padding_matters
from workers.zigzag import zigzag_slice

_Step = TypeVar("_Step", bound=Callable[..., Any])


def takes_distinct_tokens(forward_step: _Step) -> _Step:
    """Decorate a ``forward_step`` that runs ``rows.distinct`` as this module does. Others get whole rows."""
    forward_step.takes_distinct_tokens = True  # type: ignore[attr-defined]
    return forward_step


def forward_hidden(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """Return the chunk's hidden states ``[seq / cp (/ tp under sequence parallelism), rows, hidden]``.

    Packed rows, and distinct tokens, are one row. With gradients, the loss of layers of multi-token prediction that are
    trained is attached to the last stage's.

    On the last stage they are the input of its output layer, after the final norm; logits ``[rows, seq / cp, vocab]``
    (or this rank's part of the vocabulary) if the model has no output layer of Megatron's: see ``token_scores``.

    Args:
        model: the chunk, wrapped or not.
        rows: the micro-batch, on the device.
        pg: the groups of the layout.
    """
    args, kwargs = _inputs(model, rows, pg)
    chunk = unwrap_model(model)
    without = _without_output_layer(chunk) if _has_output_layer(chunk) else contextlib.nullcontext()
    with without, _rotary_positions(chunk, rows):
        if not (torch.is_grad_enabled() and is_trained(chunk)):
            return model(*args, **kwargs)
        of_decoder: dict[str, Any] = {}
        with chunk.decoder.register_forward_pre_hook(
            lambda module, args, kwargs: of_decoder.update(kwargs), with_kwargs=True
        ):
            hidden = model(*args, **kwargs)
    return _predicting_more(chunk, hidden, args, of_decoder, rows, pg)


def _predicting_more(
    chunk: Any,
    hidden: Tensor,
    inputs: tuple[Any, ...],
    of_decoder: dict[str, Any],
    rows: TokenBatch,
    pg: ProcessGroupCollection,
) -> Tensor:
    """Return ``hidden`` with the loss of the layers of multi-token prediction attached.

    The k-th layer predicts a target from the token k + 1 before it and the k tokens between. The loss is the sum of the
    cross entropies of the targets that count, divided by the number of layers.
    """
    ids, positions, _ = inputs
    outputs = chunk.mtp(
        input_ids=ids,
        position_ids=positions,
        hidden_states=hidden,
        attention_mask=None,
        rotary_pos_emb=of_decoder.get("rotary_pos_emb"),
        packed_seq_params=of_decoder.get("packed_seq_params"),
        embedding=chunk.embedding,
    )
    main, *predicting = outputs.chunk(1 + len(chunk.mtp.layers))
    located = rows.ahead or rows.for_rank(pg.cp.size(), pg.cp.rank(), len(predicting)).ahead
    total, vocab_size = torch.zeros((), device=hidden.device), chunk.unpadded_vocab_size
    for states, local in zip(predicting, located, strict=True):
        chosen, project, group = _predicted(chunk, states, local, pg, vocab_size)
        targets = rows.targets.flatten()[local.index]
        log_probs, _ = log_probs_and_entropy(chosen, project, targets, group, vocab_size=vocab_size)
        total = total - (without_values(log_probs) if local.empty else log_probs).sum()
    attached: Tensor = chunk.mtp.loss.attached(main, total / len(predicting))
    return attached


def token_scores(
    model: nn.Module,
    hidden: Tensor,
    rows: TokenBatch,
    pg: ProcessGroupCollection,
    *,
    vocab_size: int,
    chunk_tokens: int,
) -> Tensor:
    """Return the log-probability of every target, and the entropy of its distribution: float32 ``[2, rows, targets]``.

    If ``rows`` has the column ``top_ids`` ``[rows, targets, k]``, the log-probabilities of these tokens follow. All are
    0 for targets with a mask of 0 and, under context parallelism, for targets that another rank predicts. The output
    layer runs over the other targets only. A model whose last chunk is not a ``LanguageModule`` with Megatron's
    ``ColumnParallelLinear`` as ``output_layer`` may compute its logits in any way: all columns are computed, and the
    targets are selected afterwards.

    Args:
        model: the last chunk of the model, wrapped or not.
        hidden: its hidden states, from ``forward_hidden``.
        rows: the micro-batch, on the device.
        pg: the groups of the layout.
        vocab_size: entries of the vocabulary, without padding.
        chunk_tokens: see ``vocab_parallel.log_probs_and_entropy``.
    """
    local = _local_targets(rows, pg)
    chosen, project, group = _predicted(model, hidden, local, pg, vocab_size)
    targets = rows.targets.flatten()[local.index]
    if "top_ids" in rows.columns:
        targets = torch.cat((targets[:, None], rows.columns["top_ids"].flatten(0, 1)[local.index]), 1)
    log_probs, entropy = log_probs_and_entropy(
        chosen,
        project,
        targets,
        group,
        vocab_size=vocab_size,
        temperature=_temperature(rows, local),
        chunk_tokens=chunk_tokens,
    )
    first, *others = log_probs.unbind(1) if log_probs.dim() > 1 else (log_probs,)
    return local.scatter(torch.stack((first, entropy, *others)), rows.targets.shape)


@takes_distinct_tokens
def forward_top(
    k: int, vocab_size: int, chunk_tokens: int, pg: ProcessGroupCollection, model: nn.Module, rows: TokenBatch
) -> Tensor:
    """Run a chunk, and return on the last stage the ``k`` most likely tokens for each target, as ``token_scores`` does.

    Returns:
        Hidden states, or float32 ``[2 * k, rows, targets]``: ids, which are exact below 2^24, and log-probabilities.
    """
    hidden = forward_hidden(model, rows, pg)
    if not is_last_chunk(model):
        return hidden
    local = _local_targets(rows, pg)
    chosen, project, group = _predicted(model, hidden, local, pg, vocab_size)
    ids, log_probs = top_log_probs(
        chosen,
        project,
        k,
        group,
        vocab_size=vocab_size,
        temperature=_temperature(rows, local),
        chunk_tokens=chunk_tokens,
    )
    return local.scatter(torch.cat((ids.float(), log_probs), 1).T, rows.targets.shape)


def _temperature(rows: TokenBatch, local: LocalTargets) -> float | Tensor:
    """The temperature of all targets, or that of each one that this rank predicts, ``[n]``."""
    column = rows.columns.get(TOKEN_TEMPERATURES)
    return rows.temperature if column is None else column.flatten()[local.index].float()


def _predicted(
    model: nn.Module, hidden: Tensor, local: LocalTargets, pg: ProcessGroupCollection, vocab_size: int
) -> tuple[Tensor, Callable[[Tensor], Tensor], dist.ProcessGroup | None]:
    """The hidden states that predict the targets, the way to logits, and the ranks that divide the vocabulary."""
    chunk = unwrap_model(model)
    if not _has_output_layer(chunk):
        return _at_predictors(hidden, local), lambda logits: logits, None if hidden.size(-1) >= vocab_size else pg.tp
    if chunk.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=pg.tp)
    return local.select(hidden.flatten(0, 1)), functools.partial(_logits, chunk), pg.tp


def forward_values(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """Return the output of a model with a value head: float32 ``[rows, targets]``, or off the last stage hidden states.

    A target's value is the head's output at the column that predicts it, as for log-probabilities, and 0 for the same
    targets. The head runs over all columns: it costs one product per token and layer width, and under sequence
    parallelism the few numbers that it returns are cheaper to gather than the hidden states.

    Args:
        model: the chunk, wrapped or not.
        rows: the micro-batch, on the device.
        pg: the groups of the layout.
    """
    args, kwargs = _inputs(model, rows, pg)
    with _rotary_positions(unwrap_model(model), rows):
        output = model(*args, **kwargs)
    if not is_last_chunk(model):
        return output
    local = _local_targets(rows, pg)
    return local.scatter(_at_predictors(output, local)[:, 0].float(), rows.targets.shape)


def is_last_chunk(model: nn.Module) -> bool:
    """Return whether the chunk, wrapped or not, is the last of its model; one without ``post_process`` is the only."""
    return getattr(unwrap_model(model), "post_process", True)


def owned_targets(rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """Return float32 ``[rows, targets]``: 1 if the target counts and this context-parallel rank predicts it, else 0."""
    local = _local_targets(rows, pg)
    ones = torch.ones_like(local.index, dtype=torch.float32)
    return local.scatter(ones, rows.targets.shape)


def token_positions(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """Return which tokens of the rows go through the layers of a chunk on this rank, in their order there.

    Args:
        model: the chunk, wrapped or not.
        rows: the micro-batch, on the device.
        pg: the groups of the layout.

    Returns:
        int64 ``[tokens]``, the place of each in the flattened ``rows.tokens``.
    """
    places = torch.arange(rows.tokens.numel(), device=rows.tokens.device).view_as(rows.tokens)
    local = _local_columns(places, rows, pg).T
    if get_model_config(model).sequence_parallel:
        local = local.chunk(pg.tp.size())[pg.tp.rank()]
    return local.flatten()


def sum_over_context(column: Tensor, pg: ProcessGroupCollection) -> Tensor:
    """Sum ``column`` ``[..., rows, targets]`` over context-parallel ranks in place, and return it."""
    if pg.cp.size() > 1:
        dist.all_reduce(column, group=pg.cp)
    return column


def _inputs(model: nn.Module, rows: TokenBatch, pg: ProcessGroupCollection) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the chunk's ``forward`` for this context-parallel rank's tokens."""
    columns = torch.arange(rows.tokens.size(1), device=rows.tokens.device).expand_as(rows.tokens)
    extra: dict[str, Any] = {}
    if rows.packing is not None:
        extra["packed_seq_params"] = rows.packing.params()
    elif rows.distinct is not None:
        extra["packed_seq_params"] = rows.distinct.params()
    if torch.is_grad_enabled() and padding_matters(model):
        padding = _local_columns((columns >= rows.lengths[:, None]) | ~rows.counted[:, None], rows, pg)
        chunk = unwrap_model(model)
        divides = chunk.pre_process and isinstance(chunk, GPTModel)  # over tp; a HybridModel never does
        if chunk.config.sequence_parallel and not divides:
            padding = padding.chunk(pg.tp.size(), dim=1)[pg.tp.rank()]
        extra["padding_mask"] = padding
    return (_local_columns(rows.tokens, rows, pg), _local_columns(columns, rows, pg), None), extra


def _local_columns(column: Tensor, rows: TokenBatch, pg: ProcessGroupCollection) -> Tensor:
    """This context-parallel rank's part of ``column`` ``[rows, seq]``, in the shape that the model expects."""
    if rows.distinct is not None:
        return column.flatten()[rows.distinct.source][None]
    if rows.packing is None:
        return zigzag_slice(column, pg.cp.size(), pg.cp.rank())
    return column[rows.packing.tokens_of_rank(pg.cp.size(), pg.cp.rank())][None]


def _at_predictors(output: Tensor, local: LocalTargets) -> Tensor:
    """The rows of ``output`` ``[sequences, seq, width]`` at the columns that predict the targets: ``[n, width]``."""
    sequences = output.size(0)
    return output[local.predictors % sequences, local.predictors // sequences]


def _has_output_layer(chunk: nn.Module) -> bool:
    """Whether Megatron's output layer, which can run over some tokens only, computes the logits of a last chunk."""
    return isinstance(chunk, LanguageModule) and (
        not chunk.post_process or isinstance(chunk.output_layer, ColumnParallelLinear)
    )


def _local_targets(rows: TokenBatch, pg: ProcessGroupCollection) -> LocalTargets:
    """The targets that count and that this rank predicts, which ``for_rank`` locates before ``rows`` is on a GPU."""
    local = rows.local or rows.for_rank(pg.cp.size(), pg.cp.rank()).local
    assert local is not None
    return local


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """This rank's logits ``[tokens, vocab / tp]`` of ``[tokens, hidden]``, by the model's own output layer."""
    layer = model.output_layer
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    kept = layer.sequence_parallel, layer.allreduce_dgrad
    layer.sequence_parallel, layer.allreduce_dgrad = False, layer.tp_group.size() > 1  # the sequence is whole
    try:
        hidden = hidden.to((layer.weight if weight is None else weight).dtype)
        return layer(hidden[:, None], weight=weight, runtime_gather_output=False)[0][:, 0]
    finally:
        layer.sequence_parallel, layer.allreduce_dgrad = kept


@contextlib.contextmanager
def _rotary_positions(chunk: nn.Module, rows: TokenBatch) -> Iterator[None]:
    """Rotate distinct tokens by their columns: Megatron rotates the tokens of a sequence by their place in it."""
    embedding = getattr(chunk, "rotary_pos_emb", None)
    if rows.distinct is None or embedding is None:
        yield
        return
    position, of_columns = rows.distinct.position, embedding.forward

    def of_tokens(*args: Any, **kwargs: Any) -> Tensor:
        return of_columns(*args, **kwargs).index_select(0, position)

    embedding.forward = of_tokens
    try:
        yield
    finally:
        del embedding.forward


@contextlib.contextmanager
def _without_output_layer(model: Any) -> Iterator[None]:
    """End the forward pass of a last stage before its output layer."""
    kept = model.post_process
    model.post_process = False
    try:
        yield
    finally:
        model.post_process = kept
