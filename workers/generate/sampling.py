"""How a token is drawn: temperature, top-k, top-p, and random numbers that belong to the sample and not to the rank.

A sample's random numbers come from a counter-based generator (SplitMix64, Steele et al. 2014) keyed by the seed, the
tokens of its prompt, and which sample of that prompt it is. The same sample comes out whatever the layout, the order
of the batch, and whatever else was sampled before.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcontroller.errors import ConfigError, DataError
from workers.config import RolloutConfig

__all__ = ["Sampling", "draw_tokens", "prompt_hashes", "sample_seeds", "uniform"]

_BLOCK = 64  # weights that are summed as one when a token is looked for


@dataclass(frozen=True)
class Sampling:
    """How one batch is generated: the rollout's configuration with what the batch's meta_info sets otherwise."""

    response_length: int
    temperature: float
    top_p: float
    top_k: int
    do_sample: bool
    n: int
    seed: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

    @classmethod
    def of(cls, config: RolloutConfig, meta_info: Mapping[str, Any]) -> Sampling:
        """Raises DataError without ``pad_token_id`` or ``eos_token_id``; ConfigError for a value that cannot be."""
        missing = [name for name in ("eos_token_id", "pad_token_id") if meta_info.get(name) is None]
        if missing:
            raise DataError(
                f"generate_sequences needs {' and '.join(missing)} in meta_info; it has {sorted(meta_info)}",
                missing=missing,
            )
        sampling = cls(
            **{name: _number(name, meta_info.get(name, getattr(config, name)), kind) for name, kind in _KINDS.items()},
            eos_token_ids=_token_ids("eos_token_id", meta_info["eos_token_id"]),
            pad_token_id=_number("pad_token_id", meta_info["pad_token_id"], int),
        )
        longest = config.response_length
        for name, fits, wanted in (
            ("response_length", 1 <= sampling.response_length <= longest, f"1 to {longest}"),
            ("temperature", sampling.temperature > 0, "more than 0; for greedy decoding set do_sample to False"),
            ("top_p", 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", sampling.top_k >= 0, "at least 0"),
            ("n", sampling.n >= 1, "at least 1"),
            ("seed", -(1 << 63) <= sampling.seed < 1 << 63, "a number of 64 bits"),
        ):
            if not fits:
                value = getattr(sampling, name)
                raise ConfigError(f"meta_info[{name!r}] is {value}; it must be {wanted}", key=name, value=value)
        return sampling


_KINDS: dict[str, type] = {
    "response_length": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "do_sample": bool,
    "n": int,
    "seed": int,
}


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One id or several, in a list, an array or a tensor."""
    held = value.tolist() if hasattr(value, "tolist") else value
    several = held if isinstance(held, Sequence | Set) and not isinstance(held, str) else (held,)
    return tuple(_number(name, each, int) for each in several)


def _number(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, numbers.Real if kind is float else numbers.Integral):
        raise ConfigError(f"meta_info[{name!r}] is {value!r}; expected {kind.__name__}", key=name, value=value)
    return kind(value)


def draw_tokens(logits: Tensor, noise: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row, int64 ``[rows]``, and its log-probability, float32 ``[rows]``.

    Args:
        logits: ``[rows, vocab]``.
        noise: float64 ``[rows]`` in [0, 1); None, or ``do_sample`` off, takes the most probable token.

    The log-probability is the policy's own, at the temperature but before top-k and top-p, as ``compute_log_prob``
    gives it. Top-k comes first, and keeps what is as probable as the k-th; of what it leaves, top-p keeps a token while
    the more probable ones have less than ``top_p`` of it together.
    """
    scaled = logits.float() if sampling.temperature == 1.0 else logits.float() / sampling.temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    if noise is None or not sampling.do_sample:
        tokens = _argmax(log_probs)
    else:
        probs = log_probs.exp()
        least = _least_kept(probs, sampling)
        tokens = _at(noise, probs if least is None else torch.where(probs < least, 0.0, probs))
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _argmax(values: Tensor) -> Tensor:
    """Along the last dim. numpy's takes a tenth of the time of torch's on a CPU."""
    return torch.from_numpy(values.numpy().argmax(-1)) if values.device.type == "cpu" else values.argmax(-1)


def _least_kept(probs: Tensor, sampling: Sampling) -> Tensor | None:
    """``[rows, 1]``: the probability under which top-k and top-p cut tokens off; None where they keep all."""
    cut = 0 < sampling.top_k < probs.size(-1)
    if not cut and sampling.top_p == 1.0:
        return None
    ordered = probs.topk(sampling.top_k).values if cut else _descending(probs)
    if sampling.top_p == 1.0:
        return ordered[:, -1:]
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    kept = cumulative - ordered < sampling.top_p * cumulative[:, -1:]
    return ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)


def _descending(values: Tensor) -> Tensor:
    """Sorted along the last dim. numpy's takes a fifth of the time of torch's on a CPU."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), -1)).flip(-1)
    return values.sort(-1, descending=True).values


def _at(noise: Tensor, weights: Tensor) -> Tensor:
    """int64 ``[rows]``: where ``noise`` falls when [0, 1) is divided by ``weights`` ``[rows, n]``; never on a 0.

    First the block of weights is found and then the place in it: a cumulative sum over all takes far longer.
    """
    blocks = torch.nn.functional.pad(weights, (0, -weights.size(-1) % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1)
    ends = sums.cumsum(-1, dtype=torch.float64)
    point = noise[:, None] * ends[:, -1:]
    block = _first_beyond(ends, point)
    start = (ends - sums).gather(-1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(-1, dtype=torch.float64)
    return (block * _BLOCK + _first_beyond(inside, (point - start).clamp(min=0.0))).squeeze(-1)


def _first_beyond(cumulative: Tensor, point: Tensor) -> Tensor:
    """``[rows, 1]``: the first entry above ``point``, or the last at which anything is added: sums are rounded."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.searchsorted(cumulative, point, right=True).minimum(last)


def prompt_hashes(ids: Tensor, attention_mask: Tensor) -> Tensor:
    """int64 ``[rows]``: a hash of each prompt's tokens, wherever they stand in the row.

    Args:
        ids, attention_mask: ``[rows, seq]``; only tokens with a mask of 1 count.
    """
    from_the_end = torch.flip(torch.flip(attention_mask.long(), [1]).cumsum(1), [1])
    mixed = _mix(ids * (1 << 32) + from_the_end)
    return torch.where(attention_mask != 0, mixed, 0).sum(1)


def sample_seeds(hashes: Sequence[int], earlier: Mapping[int, int], *, n: int, seed: int, call: int) -> Tensor:
    """int64 ``[rows * n]``: the seed of every sample, samples of one prompt next to each other.

    Args:
        hashes: of this rank's prompts.
        earlier: how often each hash comes on the data-parallel ranks before this one, so that a prompt that comes
            twice in the batch is sampled as its first and as its second sample, wherever its rows are.
        n: samples per row.
        seed, call: of the run, and how many batches it has sampled before.
    """
    seen = Counter(earlier)
    order = []
    for value in hashes:
        order += [seen[value] * n + sample for sample in range(n)]
        seen[value] += 1
    base = _mix(torch.tensor([seed]) * (1 << 32) + call)
    prompts = torch.tensor(list(hashes), dtype=torch.long).repeat_interleave(n)
    return _mix(_mix(prompts ^ base) + torch.tensor(order, dtype=torch.long))


def uniform(seeds: Tensor, step: int) -> Tensor:
    """float64 ``[rows]`` in [0, 1): the ``step``-th random number of each seed."""
    return _shifted(_mix(seeds + _signed(0x9E3779B97F4A7C15 * (step + 1) % (1 << 64))), 32).double() / (1 << 32)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's output function, in wrapping int64 arithmetic."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: int64's own copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
