"""Sampling of tokens: temperature, filters, penalty, and random numbers that belong to the sample, not to the rank.

Tokens are drawn with the Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014, "A* Sampling", arXiv:1411.0030,
section 2): the largest sum of a log-probability and Gumbel noise. A rounding error moves one sum by as much as one
log-probability. With the inverse of a cumulative distribution it moves the boundaries of all later tokens.

The draw has two levels, so that a row needs noise for ``vocab / 64 + 64`` numbers and not for ``vocab``: first one of
the blocks of 64 consecutive token ids, by the sum of its probabilities, then one token of that block.

The noise is counter-based: SplitMix64 (Steele et al., 2014), in wrapping int64 arithmetic, which is exact on every
device. With ``mix`` its output function and ``GAMMA = 0x9E3779B97F4A7C15``:

    key(seed, position) = mix(seed + GAMMA * (position + 1))
    bits(key, counter) = mix(key + GAMMA * (counter + 1))      counter: 2 * token id, or 2 * block + 1
    u(bits) = (floor(bits / 2**12) + 0.5) / 2**52              bits unsigned, in float64
    gumbel(u) = -log(-log(u))

The code compares ``weight / -log(u)``, whose logarithm is ``log(weight) + gumbel(u)``: it takes one logarithm, not
three.

The seed of a sample is mixed from the seed of the run, the number of batches sampled before, the tokens of the prompt,
and the number of the sample among the samples of that prompt. The noise is therefore the same for every layout, every
device and every order of the batch.
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

from mcontroller.data.meta import check_near_names
from mcontroller.errors import ConfigError, DataError
from workers.config import RolloutConfig
from workers.config.sampling import OF_BATCHES, check_setting

_BLOCK = 64  # token ids in a block
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # of SplitMix64, as int64


@dataclass(frozen=True)
class Sampling:
    """Settings of generation for one batch: the rollout's configuration, overridden by the batch's meta_info.

    Attributes:
        response_length: the most tokens of a response.
        temperature: divides the logits.
        top_p: keep the most probable tokens that together have this probability; 1 keeps all.
        top_k: keep this many of the most probable tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the highest probability; 0 keeps all.
        repetition_penalty: lowers the logits of tokens that occurred before; 1 changes nothing.
        do_sample: whether to sample, or to take the most probable token.
        n: responses to each prompt.
        seed: of the random numbers, 64 bits, signed.
        eos_token_ids: a response ends with the first of these.
        pad_token_id: fills a response after its end.
    """

    response_length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    do_sample: bool
    n: int
    seed: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

    @classmethod
    def of(cls, config: RolloutConfig, meta_info: Mapping[str, Any]) -> Sampling:
        """Return the settings of a batch.

        Args:
            config: the default values.
            meta_info: of the batch; ``eos_token_id`` (one id or several) and ``pad_token_id`` are required; the
                other settings may be overridden.

        Raises:
            DataError: if ``eos_token_id`` or ``pad_token_id`` is missing.
            ConfigError: if a value has the wrong type or is out of range, or a key looks like a misspelled setting.
        """
        missing = [name for name in ("eos_token_id", "pad_token_id") if meta_info.get(name) is None]
        if missing:
            raise DataError(
                f"generate_sequences needs {' and '.join(missing)} in meta_info, which has {sorted(meta_info)}",
                missing=missing,
            )
        check_near_names(meta_info, (*OF_BATCHES, "eos_token_id", "pad_token_id"), "generation")
        sampling = cls(
            **{
                name: check_setting(name, name, meta_info.get(name, getattr(config, name)), f"meta_info[{name!r}]")
                for name in OF_BATCHES
            },
            eos_token_ids=_token_ids("eos_token_id", meta_info["eos_token_id"]),
            pad_token_id=_token_id("pad_token_id", meta_info["pad_token_id"]),
        )
        if sampling.response_length > config.response_length:
            key, value, most = "response_length", sampling.response_length, config.response_length
            raise ConfigError(f"meta_info[{key!r}] is {value}; it must be 1 to {most}", key=key, value=value)
        return sampling


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One id or several, in a list, an array or a tensor."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    several = plain if isinstance(plain, Sequence | Set) and not isinstance(plain, str) else (plain,)
    return tuple(_token_id(name, token) for token in several)


def _token_id(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ConfigError(f"meta_info[{name!r}] is {value!r}; expected int, a token id", key=name, value=value)
    return int(value)


def draw_tokens(
    logits: Tensor, keys: Tensor | None, sampling: Sampling, present: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    The repetition penalty is applied first (Keskar et al., 2019, arXiv:1909.05858, section 4.1), then the temperature.
    Top-k also keeps tokens that are as probable as the k-th. Of the tokens that remain, top-p keeps each one as long as
    the more probable ones together have less than ``top_p`` of their probability. Min-p (Nguyen et al., 2024,
    arXiv:2407.01082) keeps the tokens with at least ``min_p`` of the highest probability.

    Args:
        logits: ``[rows, vocab]``.
        keys: int64 ``[rows]``, from :func:`position_keys`; None takes the most probable token, as does
            ``do_sample=False``.
        sampling: penalty, temperature, filters and ``do_sample``.
        present: bool ``[rows, vocab]``, the tokens that the repetition penalty lowers; None for none.

    Returns:
        Tokens, int64 ``[rows]``, and their log-probabilities, float32 ``[rows]``: the policy's at the temperature but
        before penalty and filters, as ``compute_log_prob`` returns them.
    """
    log_probs = torch.log_softmax(_scaled(logits, sampling), dim=-1)
    lowered = log_probs
    if present is not None:
        lowered = torch.log_softmax(_scaled(_penalized(logits, present, sampling), sampling), dim=-1)
    if keys is None or not sampling.do_sample:
        tokens = _argmax(lowered)
    else:
        probs = lowered.exp()
        least = _least_kept(probs, sampling)
        tokens = _gumbel_max(keys, probs if least is None else torch.where(probs < least, 0.0, probs))
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _scaled(logits: Tensor, sampling: Sampling) -> Tensor:
    return logits.float() if sampling.temperature == 1.0 else logits.float() / sampling.temperature


def _penalized(logits: Tensor, present: Tensor, sampling: Sampling) -> Tensor:
    penalty = sampling.repetition_penalty
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _argmax(values: Tensor) -> Tensor:
    """Argmax along the last dim; on a CPU numpy takes a tenth of the time of torch."""
    return torch.from_numpy(values.numpy().argmax(-1)) if values.device.type == "cpu" else values.argmax(-1)


def _least_kept(probs: Tensor, sampling: Sampling) -> Tensor | None:
    """``[rows, 1]``: the least probability that top-k, top-p and min-p keep; None if they keep all tokens."""
    least = _least_of_top(probs, sampling)
    if sampling.min_p == 0.0:
        return least
    of_highest = sampling.min_p * probs.amax(-1, keepdim=True)
    return of_highest if least is None else torch.maximum(least, of_highest)


def _least_of_top(probs: Tensor, sampling: Sampling) -> Tensor | None:
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
    """Sorted along the last dim; on a CPU numpy takes a fifth of the time of torch."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), -1)).flip(-1)
    return values.sort(-1, descending=True).values


def _gumbel_max(keys: Tensor, weights: Tensor) -> Tensor:
    """Draw an index in proportion to ``weights`` ``[rows, n]``, int64 ``[rows]``; its weight is never 0.

    The largest ``weight / -log(u)`` is drawn; of equal ones that with the lowest index.
    """
    blocks = torch.nn.functional.pad(weights, (0, -weights.size(-1) % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    numbers = torch.arange(blocks.size(1), device=weights.device)
    block = _argmax(blocks.sum(-1) / _exponential(keys, 2 * numbers + 1))[:, None]
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    return tokens.gather(-1, _argmax(inside / _exponential(keys, 2 * tokens))[:, None]).squeeze(-1)


def _exponential(keys: Tensor, counters: Tensor) -> Tensor:
    """``-log(u)`` of the counters, ``[n]`` or ``[rows, n]``, of each key; float64 ``[rows, n]``, above 0."""
    bits = _mix(keys[:, None] + _GAMMA * (counters + 1))
    return _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_()


def prompt_hashes(ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return a hash of each prompt's tokens, int64 ``[rows]``, which does not depend on the padding.

    Args:
        ids: int64 ``[rows, seq]``.
        attention_mask: ``[rows, seq]``; only tokens with a mask of 1 count.
    """
    from_the_end = torch.flip(torch.flip(attention_mask.long(), [1]).cumsum(1), [1])
    mixed = _mix(ids * (1 << 32) + from_the_end)
    return torch.where(attention_mask != 0, mixed, 0).sum(1)


def sample_seeds(hashes: Sequence[int], earlier: Mapping[int, int], *, n: int, seed: int, call: int) -> Tensor:
    """Return the seed of every sample, int64 ``[rows * n]``, samples of one prompt next to each other.

    Args:
        hashes: of this rank's prompts.
        earlier: number of prompts with each hash on the data-parallel ranks before this one. If a prompt occurs twice
            in the batch, on any ranks, the second one is sampled with the next seeds of that prompt.
        n: samples per row.
        seed: of the run.
        call: number of batches that the run has sampled before; negative for held-out problems.
    """
    counts = Counter(earlier)
    order = []
    for value in hashes:
        order += [counts[value] * n + sample for sample in range(n)]
        counts[value] += 1
    base = _mix(torch.tensor([seed]) * (1 << 32) + call)
    prompts = torch.tensor(list(hashes), dtype=torch.long).repeat_interleave(n)
    return _mix(_mix(prompts ^ base) + torch.tensor(order, dtype=torch.long))


def later_seeds(seeds: Tensor, generated: Tensor) -> Tensor:
    """Return the seeds with which position 0 has the keys of position ``generated``, int64 ``[rows]``.

    An engine that draws from the seed in another way gets other numbers for every number of tokens.
    """
    return seeds + _GAMMA * generated


def later_seed(seed: int, generated: int) -> int:
    """Return what ``later_seeds`` returns, for one seed."""
    return _signed((seed + _GAMMA * generated) % (1 << 64))


def position_keys(seeds: Tensor, position: int) -> Tensor:
    """Return the key of each sample's noise at a position of its response, int64 ``[rows]``."""
    return _mix(seeds + _signed(_GAMMA * (position + 1) % (1 << 64)))


def _mix(value: Tensor) -> Tensor:
    """The output function of SplitMix64, in wrapping int64 arithmetic."""
    value = value + _GAMMA
    value.bitwise_xor_(_shifted(value, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    value.bitwise_xor_(_shifted(value, 27)).mul_(_signed(0x94D049BB133111EB))
    return value.bitwise_xor_(_shifted(value, 31))


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical right shift; int64's own is arithmetic and copies the sign."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
