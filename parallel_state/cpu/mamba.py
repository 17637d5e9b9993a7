"""Mamba layers on a CPU: the functions of mamba-ssm and causal-conv1d that Megatron's mixer calls, in plain PyTorch.

Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060): each head has a state ``[channels, state]``, which a token multiplies by
``exp(dt * A)`` and to which it adds ``dt * x B^T``; the output is ``C`` times the state. Tokens of one chunk are
computed together, as attention with a mask of decays, and the state goes from chunk to chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def patch_mixer(module: Any) -> None:
    """Patch ``megatron.core.ssm.mamba_mixer`` unless mamba-ssm is installed."""
    if not module.HAVE_MAMBA_SSM:
        module.HAVE_MAMBA_SSM = True
        module.ExtendedRMSNorm = GroupedRMSNorm
        module.mamba_split_conv1d_scan_combined = convolve_and_scan


class GroupedRMSNorm(nn.Module):
    """RMSNorm over groups of channels, which ranks of tensor parallelism divide.

    Args:
        hidden_size: channels of this rank.
        eps: epsilon inside the square root.
        group_size: channels that are normalized together.
        device: of the weight.
        dtype: of the weight.
    """

    tp_group: Any

    def __init__(
        self, hidden_size: int, *, eps: float, group_size: int, device: Any = None, dtype: Any = None, **unused: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalized ``[..., channels]``."""
        groups = torch.unflatten(hidden, -1, (-1, self.group_size)).to(_sum_dtype(hidden))
        normalized = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        output: Tensor = normalized.flatten(-2) * self.weight
        return output.to(hidden.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the weight as it is divided in a checkpoint."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        weights = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(weights, prefix, {"weight": 0}, sharded_offsets, **groups)


def convolve_and_scan(
    projected: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    headdim: int | None,
    ngroups: int,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Return the output of a mixer before its norm, ``[batch, seq, heads * channels]``, in the dtype of the tokens.

    The names of the parameters are those of ``mamba_split_conv1d_scan_combined``, whose activation is Megatron's: silu.

    Args:
        projected: z, x, B, C and dt of every token, ``[batch, seq, width]``.
        conv1d_weight: of the convolution over x, B and C, ``[width, tokens]``.
        conv1d_bias: ``[width]``.
        dt_bias: ``[heads]``.
        A: ``[heads]``, negative.
        D: the weight of x itself, ``[heads]`` or ``[heads, channels]``.
        chunk_size: tokens that are computed together.
        headdim: channels of a head; None if ``D`` has them.
        ngroups: groups of heads that have B and C in common.
        seq_idx: the sequence of every token of packed rows, ``[batch, seq]``.
        **unused: choices of kernels.
    """
    heads, channels = len(A), headdim or D.size(-1)
    mixed = conv1d_weight.size(0)
    width = (mixed - heads * channels) // 2
    gate, convolved, dt = torch.split(projected, [heads * channels, mixed, heads], -1)
    convolved = functional.silu(_convolve(convolved, conv1d_weight, conv1d_bias, seq_idx))
    tokens, inputs, outputs = torch.split(convolved, [heads * channels, width, width], -1)
    tokens = torch.unflatten(tokens, -1, (heads, channels))
    to_heads = functools.partial(torch.repeat_interleave, repeats=heads // ngroups, dim=2)
    scanned = scan(
        tokens,
        functional.softplus(dt.to(_sum_dtype(dt)) + dt_bias),
        A,
        to_heads(torch.unflatten(inputs, -1, (ngroups, -1))),
        to_heads(torch.unflatten(outputs, -1, (ngroups, -1))),
        chunk_size,
        seq_idx,
    )
    scanned = scanned + tokens * (D if D.dim() == 2 else D[:, None])
    gated: Tensor = scanned.flatten(-2) * functional.silu(gate.to(scanned.dtype))
    return gated.to(projected.dtype)


def scan(
    tokens: Tensor,
    dt: Tensor,
    decay: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    chunk_size: int,
    sequences: Tensor | None = None,
) -> Tensor:
    """Return the states of all tokens times ``outputs``, ``[batch, seq, heads, channels]``, float32 at least.

    Args:
        tokens: x, ``[batch, seq, heads, channels]``.
        dt: the step of every token, positive, ``[batch, seq, heads]``.
        decay: A, ``[heads]``.
        inputs: B, ``[batch, seq, heads, state]``.
        outputs: C, ``[batch, seq, heads, state]``.
        chunk_size: tokens that are computed together.
        sequences: the sequence of every token of packed rows, ``[batch, seq]``; the state of another one is 0.
    """
    tokens, inputs, outputs = (part.to(_sum_dtype(part)) for part in (tokens, inputs, outputs))
    if sequences is None:
        sequences = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    state = tokens.new_zeros(tokens.size(0), tokens.size(2), tokens.size(3), inputs.size(3))
    before, scanned = sequences[:, :1], []
    parts = (tokens * dt[..., None], dt * decay, inputs, outputs, sequences)
    for added, logs, written, read, sequence in zip(*(torch.split(part, chunk_size, 1) for part in parts), strict=True):
        total = logs.cumsum(1)  # log of the decay from the start of the chunk
        later = torch.ones(2 * [total.size(1)], dtype=torch.bool, device=total.device).triu(1)
        hidden = later | (sequence[:, :, None] != sequence[:, None])
        between = (total[:, :, None] - total[:, None]).masked_fill(hidden[..., None], -torch.inf).exp()
        within = torch.einsum("bihn,bjhn,bijh,bjhp->bihp", read, written, between, added)
        kept = total.exp() * (sequence == before)[..., None]
        scanned.append(within + torch.einsum("bihn,bhpn,bih->bihp", read, state, kept))
        state = state * kept[:, -1, :, None, None] + torch.einsum("bjhn,bjh,bjhp->bhpn", written, between[:, -1], added)
        before = sequence[:, -1:]
    return torch.cat(scanned, 1)


def _convolve(tokens: Tensor, weight: Tensor, bias: Tensor, sequences: Tensor | None) -> Tensor:
    """Return the sum of every token and those before it in its sequence, weighted by channel, ``[batch, seq, width]``.

    Args:
        tokens: ``[batch, seq, width]``.
        weight: ``[width, tokens]``; the last one is that of the token itself.
        bias: ``[width]``.
        sequences: ``[batch, seq]``, or None.
    """
    convolved = bias + tokens * weight[:, -1]
    for back in range(1, weight.size(1)):
        earlier = functional.pad(tokens, (0, 0, back, 0))[:, : tokens.size(1)]
        if sequences is not None:
            earlier = earlier * (functional.pad(sequences, (back, 0), value=-1)[:, :-back] == sequences)[..., None]
        convolved = convolved + earlier * weight[:, -1 - back]
    return convolved


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
