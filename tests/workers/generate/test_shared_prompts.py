"""Responses to one prompt share its pass through the model, which changes no response."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.utils import unwrap_model

from mcontroller.data.batch import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import SAMPLED, actor, prompts
from workers.generate.shared_prompts import distinct_prompts, repeat_cache

ROWS, SAMPLES = 5, 3
Columns = dict[str, torch.Tensor]


def chunks_with(experts: int | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(config=SimpleNamespace(num_moe_experts=experts))]


def test_prompts_are_distinct_if_their_tokens_or_their_lengths_differ() -> None:
    ids = torch.tensor([[5, 6], [5, 6], [5, 0], [5, 0], [5, 9], [5, 6]])  # what is behind a prompt does not count
    lengths = torch.tensor([2, 2, 2, 1, 1, 2])
    distinct = distinct_prompts(chunks_with(None), ids, lengths)
    assert distinct.ids.tolist() == [[5, 6], [5, 0], [5, 0], [5, 6]]
    assert distinct.lengths.tolist() == [2, 2, 1, 2]
    assert distinct.of_row is not None and distinct.of_row.tolist() == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize(("experts", "rows"), [(4, [[5, 6], [5, 6]]), (None, [[5, 6], [6, 5]])])
def test_every_row_passes_with_experts_or_without_equal_prompts(experts: int | None, rows: list[list[int]]) -> None:
    distinct = distinct_prompts(chunks_with(experts), torch.tensor(rows), torch.tensor([2, 2]))
    assert distinct.of_row is None
    assert distinct.ids.tolist() == rows


def test_a_repeated_cache_keeps_the_order_in_memory() -> None:
    cache = StaticInferenceContext(2, 4)
    keys, values = (
        torch.randn(2, 3, 4, 5).permute(2, 0, 1, 3),
        torch.randn(4, 2, 3, 5),
    )  # [positions, rows, heads, width]
    cache.key_value_memory_dict[1] = (keys, values)
    cache.sequence_len_offset = 3
    of_row = torch.tensor([0, 0, 1])
    repeat_cache(cache, of_row)
    for before, after in zip((keys, values), cache.key_value_memory_dict[1], strict=True):
        assert torch.equal(after[:3], before[:3, of_row])
        assert sorted(range(4), key=lambda dim: after.stride(dim)) == sorted(
            range(4), key=lambda dim: before.stride(dim)
        )
    assert cache.max_batch_size == 3


def generated(shared: bool) -> tuple[Columns, int]:
    """Return the responses to each prompt, and the rows of the first pass.

    Without sharing, equal prompts are not neighbors; they are sampled with the same seeds.
    """
    worker = actor({}, "actor_rollout")
    rows: list[int] = []
    unwrap_model(worker.model[0]).register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    batch = prompts(ROWS, SAMPLED | {"n": SAMPLES if shared else 1})
    batch = batch if shared else DataProto.concat([batch] * SAMPLES)
    output = worker.generate_sequences(batch)
    assert output is not None
    columns = {name: output.batch[name] for name in ("responses", "response_mask", "rollout_log_probs")}
    if shared:
        return columns, rows[0]
    order = torch.arange(ROWS * SAMPLES).view(SAMPLES, ROWS).T.flatten()
    return {name: column[order] for name, column in columns.items()}, rows[0]


@pytest.mark.simulated
def test_responses_are_those_of_rows_that_pass_separately() -> None:
    ((shared, shared_rows),) = run_ranks(generated, 1, True)
    ((separate, separate_rows),) = run_ranks(generated, 1, False)
    assert (shared_rows, separate_rows) == (ROWS, ROWS * SAMPLES)
    assert torch.equal(shared["responses"], separate["responses"])
    assert torch.equal(shared["response_mask"], separate["response_mask"])
    torch.testing.assert_close(shared["rollout_log_probs"], separate["rollout_log_probs"], atol=1e-5, rtol=0)
