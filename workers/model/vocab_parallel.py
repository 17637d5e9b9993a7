"""Compute log-probabilities and entropy from logits that are split over the vocabulary, without gathering them.

A tensor-parallel rank has ``[tokens, vocab / tp]``. It needs three numbers for each token from its peers, by two
all-reduces. ``log_probs_and_entropy`` starts from hidden states and computes logits for a chunk of tokens at a time, so
that ``[batch, seq, vocab]`` never exists.

On a GPU with Triton, compiled kernels read the logits in their own dtype, twice forward and once backward, and keep no
float32 copy of them. Step by step, as on a CPU, a vocabulary of 152,000 moves 24 times as many bytes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel_state.dry_run import kernels, transformer_engine

_PADDING_LOGIT = -1e30  # finite, so that 0 * logit stays 0 in the entropy


def log_probs_and_entropy(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    targets: Tensor,
    group: dist.ProcessGroup | None,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every target, and the entropies ``[tokens]``, both float32.

    Args:
        hidden: ``[tokens, hidden]``, the input of the output layer; equal on all ranks of ``group``.
        project: the output layer, from ``[tokens, hidden]`` to this rank's logits ``[tokens, vocab / tp]``.
        targets: ``[tokens]``, or ``[tokens, k]`` for several of each, int64, ids in the whole vocabulary.
        group: the ranks that the vocabulary is divided over; None if this rank has all of it.
        vocab_size: ids from this one on are padding of the vocabulary and have probability 0.
        temperature: divides the logits, as the sampler does: one for all, or float32 ``[tokens]``.
        chunk_tokens: logits exist for this many tokens at once. With more than one chunk the backward pass computes
            each chunk's logits again.
    """

    def one_chunk(hidden: Tensor, targets: Tensor, divisor: float | Tensor) -> tuple[Tensor, Tensor]:
        logits = project(hidden)
        if targets.dim() == 1 and ((logits.is_cuda and _has_triton()) or transformer_engine.is_counted(logits)):
            divisor = torch.as_tensor(divisor, dtype=torch.float32, device=logits.device)
            scores: tuple[Tensor, Tensor] = FusedLogProbs.apply(logits, divisor, targets, group, vocab_size)
            return scores
        scaled = logits.float() / divisor
        del logits  # or it would live as long as the log-probabilities are computed
        return vocab_parallel_log_probs(scaled, targets, group, vocab_size=vocab_size)

    if hidden.size(0) <= chunk_tokens:
        return one_chunk(hidden, targets, *_divisors(temperature, 1, hidden.size(0)))
    chunks, parts = hidden.split(chunk_tokens), []
    divisors = _divisors(temperature, len(chunks), chunk_tokens)
    for chunk in zip(chunks, targets.split(chunk_tokens), divisors, strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(one_chunk, *chunk, use_reentrant=False))
        else:
            parts.append(one_chunk(*chunk))
    log_probs, entropy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def _divisors(temperature: float | Tensor, count: int, chunk_tokens: int) -> list[float | Tensor]:
    """Return the divisor of the logits of each chunk: the temperature, or ``[tokens, 1]``."""
    if isinstance(temperature, Tensor):
        return [*temperature[:, None].split(max(chunk_tokens, 1))]
    return [temperature] * count


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, *, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the same as ``log_probs_and_entropy``, from logits, which are overwritten.

    Args:
        logits: this rank's, float32 ``[tokens, vocab / tp]``, divided by the temperature.
        targets: ``[tokens]`` or ``[tokens, k]`` int64, ids in the whole vocabulary.
        group: the ranks that the vocabulary is divided over; None if this rank has all of it.
        vocab_size: ids from this one on are padding of the vocabulary and have probability 0.
    """
    if targets.dim() == 1:
        log_probs, entropy = _LogProbsAndEntropy.apply(logits, targets[:, None], group, vocab_size)
        return log_probs[:, 0], entropy
    return _LogProbsAndEntropy.apply(logits, targets, group, vocab_size)


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    k: int,
    group: dist.ProcessGroup | None,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` most likely tokens, int64 ``[tokens, k]``, and their log-probabilities, float32.

    Ranks exchange their ``k`` largest logits and two numbers for each token. The arguments are those of
    ``log_probs_and_entropy``; ``k`` is at most ``vocab_size``.
    """
    chunks = hidden.split(chunk_tokens)
    divisors = _divisors(temperature, len(chunks), chunk_tokens)
    parts = [
        _top_of_chunk(project(some).float() / divisor, k, group, vocab_size)
        for some, divisor in zip(chunks, divisors, strict=True)
    ]
    ids, log_probs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def _top_of_chunk(logits: Tensor, k: int, group: dist.ProcessGroup | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    width = logits.size(-1)
    first = 0 if group is None else group.rank() * width
    if first + width > vocab_size:
        logits[:, max(vocab_size - first, 0) :] = _PADDING_LOGIT
    values, ids = logits.topk(min(k, width))
    peak = values[:, 0].clone()
    _all_reduce(peak, dist.ReduceOp.MAX, group)
    total = (logits - peak[:, None]).exp().sum(-1)
    _all_reduce(total, dist.ReduceOp.SUM, group)
    ids = ids + first
    if group is not None and group.size() > 1:
        values, ids = (_gathered(column.contiguous(), group) for column in (values, ids))
        values, order = values.topk(k)
        ids = ids.gather(-1, order)
    return ids, values - (peak + total.log())[:, None]


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    return torch.cat(every, -1)


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        width = logits.size(-1)
        first = 0 if group is None else group.rank() * width
        if first + width > vocab_size:
            logits[:, max(vocab_size - first, 0) :] = _PADDING_LOGIT
        peak = logits.amax(-1)
        _all_reduce(peak, dist.ReduceOp.MAX, group)
        logits.sub_(peak[:, None])
        exp = logits.exp()
        local = targets - first
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        target_logits = torch.where(mine, logits.gather(-1, local), 0.0)
        sums = torch.stack((exp.sum(-1), (exp * logits).sum(-1), *target_logits.unbind(-1)))
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted = sums[:2]
        log_total = total.log()
        entropy = log_total - weighted / total
        log_probs = (sums[2:] - log_total).T
        probs = exp.div_(total[:, None])
        ctx.save_for_backward(probs, logits, log_total, entropy, local, mine)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits z: d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H)."""
        log_prob_grad, entropy_grad = grads
        probs, logits, log_total, entropy, local, mine = ctx.saved_tensors
        grad = logits - (log_total - entropy)[:, None]
        grad.mul_(entropy_grad[:, None]).add_(log_prob_grad.sum(-1, keepdim=True)).mul_(probs).neg_()
        grad.scatter_add_(-1, local, torch.where(mine, log_prob_grad, 0.0))
        return grad, None, None, None


class FusedLogProbs(torch.autograd.Function):
    """The same as ``vocab_parallel_log_probs`` for one target of each token, in three passes over the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, divisor: Tensor, targets: Tensor, group: dist.ProcessGroup | None, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, float32 ``[tokens]``.

        Args:
            ctx: of torch.
            logits: this rank's ``[tokens, vocab / tp]``, in the dtype of the model.
            divisor: the temperature, float32, of all tokens or ``[tokens, 1]``.
            targets: ``[tokens]`` int64, ids in the whole vocabulary.
            group: the ranks that the vocabulary is divided over; None if this rank has all of it.
            vocab_size: ids from this one on are padding of the vocabulary and have probability 0.
        """
        width = logits.size(-1)
        first = 0 if group is None else group.rank() * width
        valid = None if first + width <= vocab_size else max(vocab_size - first, 0)
        peak = _compiled(_peak_of)(logits, divisor, valid)
        _all_reduce(peak, dist.ReduceOp.MAX, group)
        local = targets - first
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)[:, None]
        target = logits.gather(-1, local).float().div(divisor)[:, 0] - peak
        sums = torch.stack((*_compiled(_sums_of)(logits, divisor, peak, valid), torch.where(mine, target, 0.0)))
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, target = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, divisor, peak, log_total, entropy, torch.where(mine, local[:, 0], -1))
        ctx.valid = valid
        return target - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of the logits, in their dtype."""
        return _compiled(_gradient_of)(*ctx.saved_tensors, *grads, ctx.valid), None, None, None, None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    on_gpu = torch.compile(function, dynamic=True)
    return lambda logits, *args: kernels.compiled(function, logits, *args) if logits.is_meta else on_gpu(logits, *args)


def _scaled(logits: Tensor, divisor: Tensor, valid: int | None) -> tuple[Tensor, Tensor]:
    """Return float32 logits divided by the temperature, and the number of each column; from ``valid`` on is padding."""
    columns, scaled = torch.arange(logits.size(-1), device=logits.device), logits.float() / divisor
    return scaled if valid is None else torch.where(columns < valid, scaled, _PADDING_LOGIT), columns


def _peak_of(logits: Tensor, divisor: Tensor, valid: int | None) -> Tensor:
    return _scaled(logits, divisor, valid)[0].amax(-1)


def _sums_of(logits: Tensor, divisor: Tensor, peak: Tensor, valid: int | None) -> tuple[Tensor, Tensor]:
    shifted = _scaled(logits, divisor, valid)[0] - peak[:, None]
    exp = shifted.exp()
    return exp.sum(-1), (exp * shifted).sum(-1)


def _gradient_of(
    logits: Tensor,
    divisor: Tensor,
    peak: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    local: Tensor,
    log_prob_grad: Tensor,
    entropy_grad: Tensor,
    valid: int | None,
) -> Tensor:
    """Return the gradient of the logits; ``local`` is -1 where another rank has the target."""
    scaled, columns = _scaled(logits, divisor, valid)
    log_probs = scaled - (peak + log_total)[:, None]
    target = torch.where(columns == local[:, None], log_prob_grad[:, None], 0.0)
    slope = log_prob_grad[:, None] + entropy_grad[:, None] * (log_probs + entropy[:, None])
    return ((target - log_probs.exp() * slope) / divisor).to(logits.dtype)


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
