"""The attention in plain PyTorch: masks, caches, packed sequences, the cp axis."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from mcontroller.errors import ConfigError, DataError
from tests.ranks import run_ranks
from tests.training import SMALL_GPT, Role, device, largest_difference, new_context
from workers.config import ParallelConfig
from workers.model.build import build_model
from workers.model.local_attention import TEDotProductAttention
from workers.model.transformer_config import transformer_config
from workers.zigzag import zigzag_join, zigzag_slice

pytestmark = pytest.mark.simulated

LENGTHS = (16, 8, 4, 12)


def attention(cp: int = 1, **transformer: Any) -> TEDotProductAttention:
    parallel = ParallelConfig(cp=cp)
    model = dataclasses.replace(SMALL_GPT, transformer=transformer)
    config = transformer_config(model, parallel)
    return TEDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=new_context(parallel).pg)


def inputs(length: int = 8, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value: [length, batch, heads, width], two queries' heads to one of the keys'."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(length, batch, 4, 16, generator=generator),
        torch.randn(length, batch, 2, 16, generator=generator),
        torch.randn(length, batch, 2, 16, generator=generator),
    )


def by_definition(allowed: torch.Tensor) -> torch.Tensor:
    """softmax(QK^T / sqrt(d)) V of ``inputs()`` with ``allowed`` [batch or 1, queries, keys], written out."""
    query, key, value = inputs()
    key, value = key.repeat_interleave(2, dim=2), value.repeat_interleave(2, dim=2)
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / 16**0.5
    weights = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


CAUSAL = torch.ones(1, 8, 8, dtype=torch.bool).tril()
LEFT_PADDING = torch.tensor([[False] * 8, [True] * 2 + [False] * 6, [True] * 5 + [False] * 3])  # [batch, keys]


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        pytest.param(None, CAUSAL, id="causal"),
        pytest.param(LEFT_PADDING[:, None, None], CAUSAL & ~LEFT_PADDING[:, None], id="hidden keys"),
        pytest.param(~CAUSAL[None], CAUSAL, id="causal, given"),
        pytest.param(torch.zeros(1, 1, 8, 8, dtype=torch.bool), torch.ones_like(CAUSAL), id="everything, given"),
    ],
)
@pytest.mark.parametrize("cp", [1, 2])
def test_masks_determine_the_visible_keys(mask: torch.Tensor | None, allowed: torch.Tensor, cp: int) -> None:
    def attended() -> torch.Tensor:
        mine = [zigzag_slice(tensor, cp, dist.get_rank(), dim=0).to(device()) for tensor in inputs()]
        return attention(cp)(*mine, None if mask is None else mask.to(device()))

    output = zigzag_join(run_ranks(attended, cp), dim=0)
    torch.testing.assert_close(output, by_definition(allowed), rtol=0, atol=1e-6)


def test_the_last_queries_see_all_cached_keys() -> None:
    def attended(queries: int) -> torch.Tensor:
        query, key, value = (tensor.to(device()) for tensor in inputs())
        return attention()(query[-queries:], key, value, None, attn_mask_type=AttnMaskType.no_mask)

    for queries in (1, 3):
        [output] = run_ranks(attended, 1, queries)
        torch.testing.assert_close(output, by_definition(CAUSAL)[-queries:], rtol=0, atol=1e-6)


def test_padding_hidden_from_every_key_has_zeros_and_no_nan_gradient() -> None:
    def gradient() -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (tensor.to(device()).requires_grad_() for tensor in inputs())
        output = attention()(query, key, value, LEFT_PADDING[:, None, None].to(device()))
        output.sum().backward()
        assert query.grad is not None and key.grad is not None
        return output.detach(), torch.cat([query.grad.flatten(), key.grad.flatten()])

    [(output, grads)] = run_ranks(gradient, 1)
    assert torch.equal(output[:5, 2], torch.zeros(5, 64))
    assert torch.isfinite(grads).all()


def packed_logits(cp: int, tp: int) -> torch.Tensor:
    """Logits of sequences of LENGTHS packed into one row, in their own order."""
    parallel = ParallelConfig(cp=cp, tp=tp, sequence_parallel=tp > 1)
    context = new_context(parallel)
    [chunk] = build_model(SMALL_GPT, parallel, context)
    bounds = [0, *itertools.accumulate(LENGTHS)]
    ends = torch.tensor(bounds, dtype=torch.int32, device=device())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )
    rank = context.pg.cp.rank()
    mine = torch.cat([zigzag_slice(row, cp, rank, dim=0) for row in packed_tokens().split(LENGTHS)])[None].to(device())
    with context.activate(), torch.no_grad():
        logits = chunk(
            mine,
            torch.arange(mine.size(1), device=device())[None],
            None,
            packed_seq_params=packed,
            runtime_gather_output=True,
        )
    parts = [torch.empty_like(logits) for _ in range(cp)]
    dist.all_gather(parts, logits, group=context.pg.cp)
    by_sequence = zip(*(part[0].split([length // cp for length in LENGTHS]) for part in parts), strict=True)
    return torch.cat([zigzag_join(list(sequence), dim=0) for sequence in by_sequence])[:, : SMALL_GPT.vocab_size]


def packed_tokens() -> torch.Tensor:
    return torch.randint(0, SMALL_GPT.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))


def separate_logits() -> torch.Tensor:
    parallel = ParallelConfig()
    context = new_context(parallel)
    [chunk] = build_model(SMALL_GPT, parallel, context)
    with context.activate(), torch.no_grad():
        rows = [row[None] for row in packed_tokens().to(device()).split(LENGTHS)]
        return torch.cat([chunk(row, torch.arange(row.size(1), device=device())[None], None)[0] for row in rows])


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_packed_sequences_are_computed_as_separate_ones(cp: int, tp: int) -> None:
    [expected] = run_ranks(separate_logits, 1)
    for logits in run_ranks(packed_logits, cp * tp, cp, tp):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_recomputed_activations_drop_the_same_entries() -> None:
    def weights(**recompute: Any) -> dict[str, torch.Tensor]:
        model = dataclasses.replace(SMALL_GPT, attention_dropout=0.3, hidden_dropout=0.3, transformer=recompute)
        role = Role(model, ParallelConfig(tp=2))
        role.train_step(0)
        return role.weights()

    def recomputed() -> dict[str, torch.Tensor]:
        return weights(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

    def without_dropout() -> dict[str, torch.Tensor]:
        role = Role(SMALL_GPT, ParallelConfig(tp=2))
        role.train_step(0)
        return role.weights()

    kept = run_ranks(weights, 2)[0]
    assert largest_difference(run_ranks(recomputed, 2)[0], kept) < 1e-6
    assert largest_difference(run_ranks(without_dropout, 2)[0], kept) > 1e-4


def test_a_sequence_that_does_not_divide_is_rejected() -> None:
    def rejected() -> tuple[int, int]:
        module = attention(cp=2)
        with pytest.raises(DataError) as caught:
            module(*(tensor.to(device()) for tensor in inputs(length=3)), None)
        return caught.value.length, caught.value.multiple

    assert run_ranks(rejected, 2) == [(6, 4)] * 2


def test_fields_that_need_transformer_engine_are_rejected() -> None:
    def rejected() -> tuple[str, str]:
        with pytest.raises(ConfigError) as caught:
            attention(softmax_type="learnable")
        return caught.value.key, caught.value.value

    assert run_ranks(rejected, 1) == [("model.transformer.softmax_type", "learnable")]
