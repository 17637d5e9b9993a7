"""An actor on the fake CUDA device with a stand-in for vLLM beside it: start, update, generation, training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fake_cuda.cuda_api import MEMORY_BYTES, runtime
from tests.fake_cuda.streams import HostMemoryRace
from tests.fake_cuda.tags import GPUS, current, memory
from tests.forking import RankFailure
from tests.ranks import run_ranks
from tests.workers.generate.vllm.stand_in import WEIGHTS_BYTES, Gpu, standing_in
from tests.workers.roles import MODEL, SAMPLED, actor, experience, own_shard, prompts
from workers.generate.vllm.buckets import SharedBuckets
from workers.generate.vllm.engine_process import EngineError
from workers.generate.vllm.gpu_memory import bytes_of_first_step
from workers.weights.fingerprints import tensor_fingerprints
from workers.weights.whole_tensors import tensor_in

pytestmark = pytest.mark.processes

GB = 1 << 30
OF_OTHERS = 100 * GB


class RankGpu(Gpu):
    """The current fake CUDA device."""

    def __init__(self) -> None:
        self.total, self._memory = MEMORY_BYTES, memory[GPUS[current.index]]

    @property
    def used(self) -> int:  # type: ignore[override]
        return self.total - torch.cuda.mem_get_info()[0]

    @used.setter
    def used(self, value: int) -> None:
        self._memory.hold(value - self.used)


def beside_others(options: dict[str, Any], **vllm: Any) -> dict[str, Any]:
    """An actor whose GPU another process uses too: generate, train, generate."""
    for each in memory.values():
        each.beside += OF_OTHERS
    with standing_in(RankGpu):
        worker = actor({"tp": 2}, "actor_rollout", rollout={"engine": "vllm", "vllm": {"options": options, **vllm}})
        llm = worker.rollout.engine.llm
        figures = {"share": llm.arguments["gpu_memory_utilization"], "started": RankGpu().used}
        batch = own_shard(prompts(4, SAMPLED), worker)
        worker.generate_sequences(batch)
        figures["generating"] = RankGpu().used
        worker.update_actor(own_shard(experience(8), worker))
        figures["trained"] = RankGpu().used
        worker.generate_sequences(batch)
        events = [event for event in llm.events if event != "receive_policy_bucket"]
        return figures | {"events": events, "pinned": (runtime.most, len(runtime.registered))}


def test_an_engine_fits_beside_others_and_sleeps_while_the_actor_trains() -> None:
    for figures in run_ranks(beside_others, 2, {}):
        started = figures["started"]
        assert figures["share"] == pytest.approx((40 - 5.9) / 140, abs=0.03)  # 4% and 0.3 GB stay free
        assert started < OF_OTHERS + 3 * GB  # contexts and communicators of two processes
        assert figures["generating"] - started > 30 * GB
        assert figures["trained"] - started < WEIGHTS_BYTES
        update = ["wake weights", "begin_policy_update", "finish_policy_update", "wake kv_cache", "generate"]
        assert figures["events"] == ["sleep 2", *update] * 2
        most, left = figures["pinned"]
        assert most >= 64 << 20 and left > 0  # the buckets stay registered for the next update


def test_an_engine_leaves_what_other_roles_will_take() -> None:
    for figures in run_ranks(lambda: beside_others({}, reserved_bytes=OF_OTHERS + 10 * GB), 2):
        assert figures["share"] == pytest.approx((40 - 10 - 5.9) / 140, abs=0.01)
        assert figures["generating"] < OF_OTHERS + 26 * GB


def first_step(distributed: bool) -> tuple[int, int]:
    """Return the bytes that the optimizer's first step should allocate, and those that it did."""
    model = MODEL | {"dtype": "bfloat16"}
    worker = actor({}, "actor", model=model, ppo_epochs=1, optim={"distributed_optimizer": distributed})
    expected, before = bytes_of_first_step(worker.state.optimizer), torch.cuda.memory_allocated()
    worker.update_actor(own_shard(experience(8), worker))
    return expected, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("distributed", [False, True])
def test_the_first_step_of_an_optimizer_allocates_what_an_engine_leaves_free(distributed: bool) -> None:
    for expected, allocated in run_ranks(first_step, 2, distributed):
        assert allocated == pytest.approx(expected, rel=0.01) and expected > 0


def test_the_users_own_share_wins_and_vllm_refuses_it() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(beside_others, 2, {"gpu_memory_utilization": 0.9})
    assert EngineError.__name__ in str(caught.value)


def through_buckets(waits: bool) -> dict[str, Any]:
    """Send twenty tensors in ten buckets to the receiver in an engine, which waits for its copies or does not."""
    if not waits:
        torch.cuda.current_stream = lambda: SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment,return-value]
    weights = {str(number): torch.full((16,), float(number)) for number in range(20)}
    loaded: dict[str, torch.Tensor] = {}

    def load(pairs: Any) -> set[str]:
        new = dict(pairs)
        loaded.update(new)
        return set(new)

    with standing_in(RankGpu):
        import policy_receiver

        policy_receiver.current_platform = SimpleNamespace(is_cpu=lambda: False)
        receiver = policy_receiver.PolicyReceiver()
        model = SimpleNamespace(named_parameters=weights.items, load_weights=load)
        receiver.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None)
        receiver.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(node_rank_within_dp=0))
        receiver.device = torch.device("cuda")
        buckets, registered = SharedBuckets(128), runtime.count  # earlier tests of the parent process registered too
        for _ in range(2):
            receiver.begin_policy_update()
            for first in range(0, 20, 2):
                memory = buckets.memory(128)
                places = [(str(first + number), "float32", (16,), 64 * number) for number in range(2)]
                for place in places:
                    tensor_in(memory, place).copy_(weights[place[0]])
                receiver.receive_policy_bucket([buckets.path], places)
            assert receiver.finish_policy_update() == [each[:3] for each in tensor_fingerprints(weights.items())]
        most, count = runtime.most, runtime.count - registered
        buckets.close()
    equal = all(torch.equal(loaded[name].cpu(), tensor) and loaded[name].is_cuda for name, tensor in weights.items())
    return {"equal": equal, "count": count, "most": most, "left": len(runtime.registered)}


def test_both_sides_register_each_of_two_buckets_once_for_all_updates() -> None:
    assert run_ranks(through_buckets, 1, True) == [{"equal": True, "count": 4, "most": 4 * 128, "left": 2}]


def test_a_receiver_that_does_not_wait_before_a_bucket_is_filled_again_is_caught() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(through_buckets, 1, False)
    assert HostMemoryRace.__name__ in str(caught.value)
