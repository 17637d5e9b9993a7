"""The first sampled tokens of 256 prompts on 1, 2 and 3 tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcontroller.data.batch import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import PROMPT, SAMPLED, actor

pytestmark = pytest.mark.simulated

ROWS, VOCAB = 256, 1_003
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_query_groups": 6,
    "ffn_hidden_size": 96,
    "init_method_std": 0.1,
}


def first_tokens(tp: int, dtype: str) -> torch.Tensor:
    worker = actor({"tp": tp}, "actor_rollout", model=MODEL | {"dtype": dtype})
    ids = torch.randint(2, VOCAB, (ROWS, PROMPT), generator=torch.Generator().manual_seed(5))
    meta_info: dict[str, Any] = SAMPLED | {"response_length": 1}
    batch = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, meta_info=meta_info)
    return worker.generate_sequences(batch).batch["responses"][:, 0].cpu()


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0), ("bfloat16", 3)])
def test_first_tokens_are_those_of_one_process(dtype: str, most: int) -> None:
    """In bfloat16, the layouts round the hidden states differently: at most 1% of the tokens may change."""
    (expected,) = run_ranks(first_tokens, 1, 1, dtype)
    assert len(set(expected.tolist())) > 100
    for tp in (2, 3):
        ranks = run_ranks(first_tokens, tp, tp, dtype)
        assert all(torch.equal(rank, ranks[0]) for rank in ranks)
        assert int((ranks[0] != expected).sum()) <= most
