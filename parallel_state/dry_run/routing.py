"""Which experts the tokens of a dry run choose: nobody knows the router's scores, and token counts follow from them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from parallel_state.dry_run.errors import DryRunError
from parallel_state.dry_run.values import set_value

_ROUTERS = "megatron.core.transformer.moe.moe_utils", "megatron.core.transformer.moe.router"
_FUNCTION = "topk_routing_with_score_function"

Choose = Callable[[int, int, int], torch.Tensor]
"""Tokens, experts and experts of a token -> bool ``[tokens, experts]``: the experts of each token."""


def routing_of(text: str) -> Choose:
    """Return how tokens choose experts.

    Args:
        text: ``"balanced"``: all experts get equal shares. ``"skewed"``: the n-th expert's share is in proportion to
            1 / n, so that the first rank of the ep axis has the most. Else a file that ``torch.save`` wrote: recorded
            counts of tokens, ``[experts]`` or ``[layers, experts]``, whose shares are used.

    Raises:
        DryRunError: there is no such file, or it has no counts.
    """
    if text == "balanced":
        return lambda tokens, experts, chosen: _by_shares(torch.ones(experts), tokens, chosen)
    if text == "skewed":
        return lambda tokens, experts, chosen: _by_shares(1.0 / torch.arange(1, experts + 1), tokens, chosen)
    if not Path(text).is_file():
        raise DryRunError(f"routing {text!r} is neither balanced, skewed, nor a file of counts", routing=text)
    try:
        counts = torch.load(text, weights_only=True)
    except Exception:  # of many kinds, for a file that torch did not write
        counts = None
    is_table = isinstance(counts, torch.Tensor) and counts.dim() in (1, 2)
    if not is_table or not bool((counts >= 0).all()) or not bool(counts.any()):
        raise DryRunError(
            f"{text} has no counts of tokens: expected a tensor [experts] or [layers, experts]", path=text
        )
    shares = counts.double().reshape(-1, counts.shape[-1]).sum(0)

    def recorded(tokens: int, experts: int, chosen: int) -> torch.Tensor:
        if len(shares) != experts:
            raise DryRunError(f"{text} has counts of {len(shares)} experts; the model has {experts}", path=text)
        return _by_shares(shares, tokens, chosen)

    return recorded


def _by_shares(shares: torch.Tensor, tokens: int, chosen: int) -> torch.Tensor:
    """Return experts of tokens, of which each gets its share, to one token (systematic sampling).

    The experts lie one after the other on a line, as long as their shares; a token takes those under points at a
    distance of 1 from each other.
    """
    lengths = shares.double().clamp(min=1e-30)
    lengths *= chosen / lengths.sum()
    while bool((lengths > 1).any()):  # what is more than all tokens of an expert goes to the others
        rest = torch.where(lengths < 1, lengths, 0.0)
        lengths = torch.where(lengths < 1, rest * ((chosen - (lengths >= 1).sum()) / rest.sum()), 1.0)
    first = (torch.arange(tokens, dtype=torch.float64) + 0.5) / tokens
    points = first[:, None] + torch.arange(chosen)
    experts = torch.searchsorted(lengths.cumsum(0), points, right=True).clamp(max=len(shares) - 1)
    return torch.zeros(tokens, len(shares), dtype=torch.bool).scatter_(1, experts, True)


@contextlib.contextmanager
def routed(choose: Choose) -> Iterator[None]:
    """Return a context manager in which Megatron's routers choose so."""
    modules: Sequence[Any] = [importlib.import_module(name) for name in _ROUTERS]
    route = getattr(modules[0], _FUNCTION)
    maps: dict[tuple[int, int, int], torch.Tensor] = {}

    def route_known(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        probabilities, chosen = route(logits, topk, *args, **kwargs)
        if chosen.is_meta and chosen.dtype == torch.bool:
            key = logits.shape[0], logits.shape[1], topk
            if key not in maps:
                maps[key] = choose(*key)
            set_value(chosen, maps[key])
        return probabilities, chosen

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, _FUNCTION, route_known))
        yield
