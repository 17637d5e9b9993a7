"""A batch is generated in passes of ``max_rows`` rows, which ranks end at different steps."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcontroller.errors import DataError
from tests.ranks import run_ranks
from tests.training import device
from tests.workers.roles import EOS, GREEDY, SAMPLED, actor, own_shard, prompts

ROWS = 12
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_load_balancing_type": "none"},
}


def samples_in_passes(max_rows: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return samples, and the rows of each pass over prompts."""
    worker = actor({}, "rollout", rollout={"max_rows": max_rows})
    rows: list[int] = []

    def record(chunk: Any, args: tuple[Any, ...]) -> None:
        if args[0].size(1) > 1:
            rows.append(args[0].size(0))

    worker.model[0].register_forward_pre_hook(record)
    return dict(worker.generate_sequences(prompts(ROWS, SAMPLED | {"n": 2})).batch), rows


@pytest.mark.simulated
def test_samples_do_not_depend_on_the_passes() -> None:
    ((whole, rows),) = run_ranks(samples_in_passes, 1, 256)
    assert rows == [2 * ROWS]
    ((parts, rows),) = run_ranks(samples_in_passes, 1, 10)
    assert rows == [8] * 3
    for name, column in whole.items():
        if name == "rollout_log_probs":
            torch.testing.assert_close(parts[name], column, atol=1e-5, rtol=0)
        else:
            assert torch.equal(parts[name], column), name


def stops_at_different_steps(max_rows: int) -> tuple[int, ...]:
    """Generate with experts divided over ranks with different rows, of which one is done after its first token."""
    worker = actor({"etp": 2}, "rollout", model=EXPERTS, rollout={"max_rows": max_rows})
    first = (
        worker.generate_sequences(own_shard(prompts(8, GREEDY), worker))
        .batch["responses"][:, 0]
        .contiguous()
        .to(device())
    )
    dist.broadcast(first, 0)
    rows = own_shard(prompts(8, GREEDY | {"eos_token_id": first.tolist()}), worker)
    return tuple(worker.generate_sequences(rows[: 4 - dist.get_rank()]).batch["response_mask"].sum(1).tolist())


@pytest.mark.simulated
@pytest.mark.parametrize("max_rows", [8, 1])
def test_rank_that_is_done_still_exchanges_tokens_of_experts(max_rows: int) -> None:
    done, other = run_ranks(stops_at_different_steps, 2, max_rows)
    assert done == (1, 1, 1, 1)
    assert len(other) == 3 and max(other) > 1


def greedy_of(parallel: dict[str, Any], shares: list[int], stops: list[int], max_rows: int) -> list[list[int]]:
    """Return this rank's responses without padding; data-parallel rank ``i`` has ``shares[i]`` of the rows."""
    worker = actor(parallel, "rollout", model=EXPERTS, rollout={"max_rows": max_rows})
    rank = worker.context.pg.dp.rank()
    first = sum(shares[:rank])
    rows = prompts(sum(shares), GREEDY | {"eos_token_id": stops})[first : first + shares[rank]]
    made = worker.generate_sequences(rows).batch
    return [ids[mask == 1].tolist() for ids, mask in zip(made["responses"], made["response_mask"], strict=True)]


@functools.cache
def greedy_alone(rows: int, stops: tuple[int, ...]) -> list[list[int]]:
    return run_ranks(greedy_of, 1, {}, [rows], list(stops), 256)[0]


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("parallel", "shares", "max_rows"),
    [
        ({"ep": 2}, [2, 4, 3, 1], 256),
        ({"ep": 4}, [2, 4, 3, 1], 2),
        ({"tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True}, [2, 8], 256),
    ],
    ids=["ep2", "ep4-in-passes", "over-tp-and-dp"],
)
def test_ranks_with_shared_experts_may_end_generation_at_different_steps(
    parallel: dict[str, Any], shares: list[int], max_rows: int
) -> None:
    stops = tuple(response[0] for response in greedy_alone(10, (EOS,))[: shares[0]])
    expected = greedy_alone(10, stops)
    longest = [
        max(map(len, expected[end - share : end])) for share, end in zip(shares, accumulate(shares), strict=True)
    ]
    assert longest[0] == 1 and longest[1] > 2  # the rows of the first rank end while others continue
    found = run_ranks(greedy_of, 4, parallel, shares, list(stops), max_rows)
    copies = 4 // len(shares)  # tensor-parallel ranks have the same rows
    assert [response for rank in found[::copies] for response in rank] == expected
    assert found[::copies] == found[copies - 1 :: copies]


def padding_only_on_one_rank() -> dict[str, Any]:
    worker = actor({"tp": 2}, "rollout")
    batch = prompts(4, GREEDY)
    batch.batch["attention_mask"][3] = 0
    with pytest.raises(DataError) as caught:
        worker.generate_sequences(own_shard(batch, worker))
    return caught.value.fields


@pytest.mark.simulated
def test_invalid_prompt_of_one_rank_raises_on_all() -> None:
    for fields in run_ranks(padding_only_on_one_rank, 4):
        assert (fields["method"], fields["row"]) == ("generate_sequences", 1)
