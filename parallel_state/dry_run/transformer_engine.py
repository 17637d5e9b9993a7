"""What the modules of Transformer Engine 2.20.2 save for backward, for layers on tensors without memory.

Layers in plain PyTorch with Transformer Engine's parameters, names and shardings stand in for its modules. Where its
modules save something else, they call the functions of this module. What was compared with its source, for t tokens of
a rank (and a norm, or attention, with one float32 number for each token, and head):

=================== ================================= ==============================================================
Transformer Engine  saved for backward                besides
=================== ================================= ==============================================================
LayerNormLinear     input, normalized input, numbers  sequence parallelism: all normalized tokens, in both passes only
Linear              input                             sequence parallelism: all tokens, in the backward pass only
all linear layers   weights                           kept: one gradient for each shape of weights; 32 MiB for cuBLAS.
                                                      The gradient of a weight is added to ``main_grad`` by the product
GroupedLinear       input as one tensor               kept: four times 32 MiB for cuBLAS
RMSNorm, LayerNorm  contiguous input, numbers
DotProductAttention contiguous queries, keys, values, backward: gradients of the queries in float32
  (flash, cuDNN)    output, numbers
  with cp (p2p)     queries, output, numbers, one     forward: a second buffer, three outputs in float32; backward:
                    buffer of keys and values         four buffers
fused RoPE          angles
SwiGLU (Megatron)   input                             compiled: results only
permute             int32 [t, 2 experts + 1]
sort chunks         int32 [rows]
unpermute           as permute; with probabilities,
                    these and the input
routing, scores     map, float32 [t, experts]
=================== ================================= ==============================================================

Not counted: FP8 and FP4, which are rejected, ``ub_overlap``, other ``cp_comm_type`` than p2p, Transformer Engine's
cross entropy. Megatron does not use LayerNormMLP.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel_state.dry_run.counting import counts_transformer_engine
from parallel_state.dry_run.errors import DryRunError
from parallel_state.dry_run.kernels import compiled, count_flops, one_kernel

VERSION = "2.20.2"
CUBLAS_WORKSPACE = (32 << 20) + 1024
"""[bytes] Of a stream on GPUs from Hopper on; grouped products have four streams."""
_GROUPED_STREAMS = 4
_COUNTED = ("moe_permute_fusion", "moe_router_fusion", "window_attn_skip_freq", "softmax_type")


def is_counted(tensor: torch.Tensor) -> bool:
    """Whether a layer that gets a tensor calls the functions of this module."""
    return tensor.is_meta and counts_transformer_engine()


def counted_fields() -> tuple[str, ...]:
    """Return the fields of TransformerConfig that only Transformer Engine has, and that the running rank counts."""
    return _COUNTED if counts_transformer_engine() else ()


def check_counted(fields: Mapping[str, Any]) -> None:
    """Check that what a model stores is counted.

    Args:
        fields: of its TransformerConfig, or of a command line.

    Raises:
        DryRunError: its products are in FP8 or FP4.
    """
    for name in ("fp8", "fp4"):
        if fields.get(name):
            raise DryRunError(
                f"{name}={fields[name]!r}: a dry run does not count the copies of weights and inputs that Transformer "
                f"Engine stores in {name.upper()}; leave it out to count bfloat16",
                field=name,
                value=fields[name],
            )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, pairs: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the output of DotProductAttention, ``[..., heads * width of values]``.

    Args:
        query: ``[tokens, heads, width]`` of packed rows, or ``[seq, batch, heads, width]``, of this rank.
        key: as ``query``, with heads of its own number.
        value: as ``key``, of any width.
        pairs: pairs of a query of this rank and a key.
        group: the context-parallel ranks, which pass keys and values on in a ring.
    """
    steps = 0 if group is None else group.size() - 1
    flops = 2 * pairs * query.shape[-2] * (query.shape[-1] + value.shape[-1])

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        count_flops(flops)
        output = query.new_empty(*query.shape[:-2], query.shape[-2] * value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if not steps:
            return output, (query, key, value, output, sums)
        both = torch.cat((key.view(-1), value.view(-1)))
        parts = [output.float() for _ in range(3)]
        both = _pass_on(both, steps, group)
        del parts
        return output, (query, both, output, sums)

    def run_backward(query: torch.Tensor, *saved: torch.Tensor) -> Any:
        count_flops(2.5 * flops)
        temporaries = [query.float()]
        if steps:
            both = saved[0].expand(2, -1)
            temporaries.append(_pass_on(both.contiguous(), steps, group))
        return temporaries

    return one_kernel(run, query, key, value, run_backward=run_backward)  # type: ignore[no-any-return]


def _pass_on(tensor: torch.Tensor, steps: int, group: Any) -> torch.Tensor:
    """Send a tensor to the next rank of a group, and receive that of the rank before, several times."""
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    buffers = [tensor, torch.empty_like(tensor)]
    for step in range(steps):
        source, target = buffers[step % 2], buffers[(step + 1) % 2]
        sending = dist.P2POp(dist.isend, source, ranks[(place + 1) % len(ranks)], group)
        receiving = dist.P2POp(dist.irecv, target, ranks[place - 1], group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
    return buffers[steps % 2]


def grouped_linear(tokens: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the output of GroupedLinear, ``[tokens, out]``.

    Args:
        tokens: ``[tokens, in]``, sorted by expert.
        weights: of each expert, ``[out, in]``.
    """
    width, flops = len(weights[0]), 2 * len(tokens) * weights[0].numel()

    def run(tokens: torch.Tensor, *weights: torch.Tensor) -> Any:
        count_flops(flops)
        return tokens.new_empty(len(tokens), width), (tokens, *weights)

    def run_backward(*saved: torch.Tensor) -> None:
        count_flops(flops * (1 + weights[0].requires_grad))

    return one_kernel(run, tokens, *weights, run_backward=run_backward)  # type: ignore[no-any-return]


def workspace(models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return what Transformer Engine keeps on a GPU for the linear layers of models, from the first step on.

    The output layer, which is Megatron's own, no longer adds its gradient to ``main_grad``: only Apex has that kernel.
    """
    named = [item for model in models for item in model.named_modules()]
    for name, module in named:
        if name.endswith("output_layer") and hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False
    modules = [module for _, module in named]
    linears = [module for module in modules if type(module).__name__.endswith("Linear")]
    weights = [weight for module in linears for weight in module.parameters(recurse=False) if weight.dim() == 2]
    shapes = {(weight.shape, weight.dtype) for weight in weights if hasattr(weight, "main_grad")}
    is_grouped = any(type(module).__name__.endswith("GroupedLinear") for module in linears)
    sizes = [CUBLAS_WORKSPACE] * (1 + _GROUPED_STREAMS * is_grouped)
    kept = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    return kept + [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]


# ---- functions of Megatron that call Transformer Engine's kernels --------------------------------------------------


def _rotate(t: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return one_kernel(lambda t: (t.new_empty(t.shape), (freqs,)), t)  # type: ignore[no-any-return]


def _rotate_packed(t: torch.Tensor, bounds: torch.Tensor, freqs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return one_kernel(lambda t: (t.new_empty(t.shape), (freqs, bounds)), t)  # type: ignore[no-any-return]


def _permute(tokens: torch.Tensor, routing_map: torch.Tensor, *, num_out_tokens: int) -> Any:
    return _permute_with_probs(tokens, None, routing_map, num_out_tokens=num_out_tokens)[::2]


def _permute_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor | None, routing_map: torch.Tensor, *, num_out_tokens: int
) -> Any:
    count, experts = routing_map.shape
    rows = torch.empty(count, 2 * experts + 1, dtype=torch.int32, device="meta")

    def run(tokens: torch.Tensor, probs: torch.Tensor | None) -> Any:
        permuted = tokens.new_empty(int(num_out_tokens), tokens.shape[-1])
        return (permuted, None if probs is None else probs.new_empty(len(permuted))), (rows,)

    permuted, permuted_probs = one_kernel(run, tokens, probs)
    return permuted, permuted_probs, rows


def _unpermute(permuted: torch.Tensor, rows: torch.Tensor, *, merging_probs: Any = None, restore_shape: Any) -> Any:
    def run(permuted: torch.Tensor, probs: torch.Tensor | None) -> Any:
        saved = (rows,) if probs is None else (permuted, rows, probs)
        return permuted.new_empty(restore_shape), saved

    return one_kernel(run, permuted, merging_probs)


def _sort_chunks(tokens: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return _sort_chunks_with_probs(tokens, None, sizes, order)[0]  # type: ignore[no-any-return]


def _sort_chunks_with_probs(tokens: torch.Tensor, probs: Any, sizes: torch.Tensor, order: torch.Tensor) -> Any:
    def run(tokens: torch.Tensor, probs: torch.Tensor | None) -> Any:
        rows = torch.empty(len(tokens), dtype=torch.int32, device="meta")
        return (torch.empty_like(tokens), None if probs is None else torch.empty_like(probs)), (rows,)

    return one_kernel(run, tokens, probs)


def _route(*, logits: torch.Tensor, **options: Any) -> Any:
    def run(logits: torch.Tensor) -> Any:
        routing_map = torch.empty_like(logits, dtype=torch.bool)
        return (torch.empty_like(logits), routing_map), (routing_map, torch.empty_like(logits, dtype=torch.float32))

    return one_kernel(run, logits)


def _score(**options: Any) -> Any:
    return _route(**options)[::-1]


def _balance_loss(*, probs: torch.Tensor, tokens_per_expert: torch.Tensor, **options: Any) -> Any:
    return one_kernel(lambda probs: (probs.new_empty(()), (tokens_per_expert,)), probs)


def _unshared_buffer(buffers: Any, shape: Sequence[int], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta")


_EXPERTS = "megatron.core.transformer.moe.moe_utils"
_KERNELS: dict[str, dict[str, Any]] = {
    "megatron.core.models.common.embeddings.rope_utils": {
        "fused_apply_rotary_pos_emb": _rotate,
        "fused_apply_rotary_pos_emb_thd": _rotate_packed,
    },
    "megatron.core.fusions.fused_bias_swiglu": dict.fromkeys(
        (
            "swiglu",
            "swiglu_back",
            "bias_swiglu",
            "bias_swiglu_back",
            "weighted_swiglu",
            "weighted_swiglu_back",
        )
    ),
    _EXPERTS: {
        "fused_permute": _permute,
        "fused_permute_with_probs": _permute_with_probs,
        "fused_unpermute": _unpermute,
        "fused_sort_chunks_by_index": _sort_chunks,
        "fused_sort_chunks_by_index_with_probs": _sort_chunks_with_probs,
        "fused_topk_with_score_function": _route,
        "fused_compute_score_for_moe_aux_loss": _score,
        "fused_moe_aux_loss": _balance_loss,
    },
    "megatron.core.utils:GlobalMemoryBuffer": {"get_tensor": _unshared_buffer},
}
"""Module, or module and class -> the name of a function -> what computes it instead; None: itself, compiled."""


@contextlib.contextmanager
def engine_kernels() -> Iterator[None]:
    """Return a context manager in which ranks that count Transformer Engine have its kernels."""

    def replaced(function: Any, kernel: Any) -> Any:
        kernel = kernel or functools.partial(compiled, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (kernel if function is None or counts_transformer_engine() else function)(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(importlib.import_module(_EXPERTS), "HAVE_TE", True))
        for place, kernels in _KERNELS.items():
            module, _, name = place.partition(":")
            owner: Any = importlib.import_module(module)
            owner = getattr(owner, name) if name else owner
            for function, kernel in kernels.items():
                wrapped = replaced(getattr(owner, function, None), kernel)
                stack.enter_context(mock.patch.object(owner, function, wrapped, create=True))
        yield
