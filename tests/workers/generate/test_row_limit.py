"""The rows of a pass fit into memory, and the samples do not depend on the parts that a batch is generated in."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcontroller.errors import ConfigError
from parallel_state import ParallelLayout
from parallel_state.megatron import MegatronContext
from tests import forking
from tests.ranks import run_ranks
from tests.workers.roles import RESPONSE, SAMPLED, VOCAB, actor, prompts
from workers.config import RolloutConfig
from workers.generate import decoding
from workers.generate.row_limit import RowBytes, RowLimit, row_bytes

ROWS = 12


def cached_and_counted(parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the bytes of the cache that Megatron allocates on this rank for a batch, and the counted bytes."""
    worker = actor(parallel, "rollout", model={"vocab_size": VOCAB + 3})
    caches = []
    create = decoding.StaticInferenceContext
    monkeypatch.setattr(decoding, "StaticInferenceContext", lambda *args: caches.append(create(*args)) or caches[-1])
    batch = prompts(ROWS, SAMPLED)
    worker.generate_sequences(batch)
    tensors = [tensor for pair in caches[0].key_value_memory_dict.values() for tensor in pair]
    width = int(batch.batch["attention_mask"].sum(1).max())
    one = row_bytes(worker.model, width, RESPONSE, VOCAB)
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors), ROWS * one.cache


@pytest.mark.simulated
@pytest.mark.parametrize(("world_size", "parallel"), [(1, {}), (4, {"tp": 2, "pp": 2})])
def test_counted_cache_is_that_of_megatron(
    world_size: int, parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for allocated, counted in run_ranks(cached_and_counted, world_size, parallel, monkeypatch):
        assert allocated == counted > 0


class Measured(RowLimit):
    """A limit on ranks with different free memory."""

    def free_bytes(self) -> int:
        return 1000 * (1 + dist.get_rank())


def limits(parallel: dict[str, int], fraction: float) -> tuple[int, int, list[str]]:
    context = MegatronContext(ParallelLayout(4, **parallel))
    records: list[str] = []
    logger = logging.getLogger("workers.generate.row_limit")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    device = torch.device(torch.cuda.current_device())
    limit = Measured(context.pg, device, fraction=fraction, processes_on_node=1)
    one = RowBytes(cache=60, workspace=40)
    return limit.of(one, 100), limit.of(one, 100), records


@pytest.mark.simulated
def test_ranks_of_a_replica_have_the_smallest_limit_of_their_memory() -> None:
    assert [found[0] for found in run_ranks(limits, 4, {"tp": 2}, 0.5)] == [5, 5, 15, 15]
    assert [found[0] for found in run_ranks(limits, 4, {"tp": 2, "pp": 2}, 1.0)] == [10] * 4
    assert run_ranks(limits, 4, {}, 0.01)[0][0] == 1


@pytest.mark.processes
def test_batch_that_does_not_fit_is_reported_once_with_the_reason() -> None:
    first, second, *_ = forking.run_ranks(limits, 4, {"tp": 2}, 0.5)  # each rank's log is its process's
    [message] = first[2]
    assert message.startswith(
        "generation: at most 5 rows at once, of 100: one row takes 0.0 MB (0.0 MB of them cached keys and values), "
        "this rank may use 0.50 of its 0.0 MB of free memory"
    )
    assert second[2] == []


def samples_in_parts(memory_rows: int | None, max_rows: int) -> tuple[Any, list[int]]:
    """Return samples, and the rows of each pass, with memory for this many rows."""
    worker = actor({}, "rollout", rollout={"max_rows": max_rows} | ({} if max_rows else {"memory_fraction": 0.5}))
    batch = prompts(ROWS, SAMPLED | {"n": 2})
    passes: list[int] = []

    def record(chunk: Any, args: tuple[Any, ...]) -> None:
        if args[0].size(1) > 1:
            passes.append(args[0].size(0))

    worker.model[0].register_forward_pre_hook(record)
    with pytest.MonkeyPatch.context() as patch:
        if memory_rows is not None:
            width = int(batch.batch["attention_mask"].sum(1).max())
            free = 2 * memory_rows * row_bytes(worker.model, width, RESPONSE, VOCAB).total
            patch.setattr(RowLimit, "free_bytes", lambda self: free)
        return dict(worker.generate_sequences(batch).batch), passes


@pytest.mark.simulated
def test_samples_do_not_depend_on_the_parts_of_the_batch() -> None:
    whole, passes = run_ranks(samples_in_parts, 1, None, 0)[0]
    assert passes == [ROWS]  # the responses of a prompt share its pass
    for memory_rows, max_rows, expected in ((7, 0, [3] * 4), (0, 0, [1] * 24), (7, 10, [4] * 3)):
        parts, passes = run_ranks(samples_in_parts, 1, memory_rows, max_rows)[0]
        assert passes == expected
        for name, column in whole.items():
            if name == "rollout_log_probs":
                torch.testing.assert_close(parts[name], column, atol=1e-5, rtol=0)
            else:
                assert torch.equal(parts[name], column), name


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_fraction_outside_0_to_1_is_rejected(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.memory_fraction"):
        RolloutConfig(memory_fraction=fraction)
