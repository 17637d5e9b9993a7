"""The served engine on a stand-in for vLLM: what is awake when, and what has memory at one time."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.generate.vllm.signatures import SIGNATURES, argument_names, check_arguments
from tests.workers.generate.vllm.stand_in import (
    CONTEXT_BYTES,
    WEIGHTS_BYTES,
    EngineInProcess,
    Gpu,
    StandInLLM,
    standing_in,
)
from workers.generate.vllm.buckets import SharedBuckets
from workers.weights.whole_tensors import tensor_in

GB = 1 << 30
WEIGHT = ("weight", "float32", (3,), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    return tmp_path


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    created = Gpu(total=80 * GB, used=30 * GB)
    with standing_in(lambda: created):
        yield created


def engine(folder: Path, **arguments: Any) -> EngineInProcess:
    defaults = {"model": str(folder), "max_model_len": 32, "kv_cache_memory_bytes": None, "enable_sleep_mode": True}
    return EngineInProcess({**defaults, **arguments}, {})


def update(served: EngineInProcess, **options: Any) -> None:
    served.call("begin_update", **options)
    buckets = SharedBuckets(64)
    tensor_in(buckets.memory(12), WEIGHT).copy_(torch.ones(3))
    served.call("receive_bucket", paths=[buckets.path], tensors=[WEIGHT])
    buckets.close()
    [[arrived]] = served.call("finish_update")
    assert arrived[:2] == ("weight", "float32")
    served.call("resume", version=1)


def generate(served: EngineInProcess) -> Any:
    served.call("listen", host="127.0.0.1", token="secret")
    return served.call("generate", prompt=[3, 4], parameters={}, temperature=1.0)


def test_weights_wake_before_the_update_and_the_cache_with_the_next_generation(gpu: Gpu, folder: Path) -> None:
    served = engine(folder, gpu_memory_utilization=0.5)
    served.call("sleep")
    before = 30 * GB + CONTEXT_BYTES
    assert gpu.used == before  # an engine without weights has no memory
    for _ in range(2):
        update(served)
        assert gpu.used == before + WEIGHTS_BYTES
        assert generate(served)[:2] == ([7, 2], [-7.0, -2.0])
        assert gpu.used == before + 40 * GB
    weights = ["wake weights", "begin_policy_update", "receive_policy_bucket", "finish_policy_update"]
    once = ["sleep 2", *weights, "wake kv_cache", "generate"]
    assert served.llm.events == [*once, *once]  # the second update begins with a sleep


def test_an_engine_without_a_policy_beside_it_keeps_its_memory_in_updates(gpu: Gpu, folder: Path) -> None:
    served = engine(folder, gpu_memory_utilization=0.5)
    for _ in range(2):
        update(served, beside_policy=False)
        generate(served)
    assert "sleep 2" not in served.llm.events and gpu.used == 70 * GB + CONTEXT_BYTES
    served.call("sleep")  # another group uses the GPU
    update(served, beside_policy=False)
    assert gpu.used == 30 * GB + CONTEXT_BYTES + WEIGHTS_BYTES


def test_sleep_frees_weights_and_cache_once_whatever_is_awake(gpu: Gpu, folder: Path) -> None:
    served = engine(folder, gpu_memory_utilization=0.5)
    assert served.call("sleep") == 40 * GB and served.call("sleep") == 0
    update(served)
    assert served.call("sleep") == WEIGHTS_BYTES
    update(served)
    generate(served)
    assert served.call("sleep") == 40 * GB and served.call("sleep") == 0
    assert gpu.used == 30 * GB + CONTEXT_BYTES


def test_an_engine_on_a_cpu_never_sleeps(folder: Path) -> None:
    with standing_in():
        served = engine(folder, enable_sleep_mode=False)
        assert served.call("sleep") == 0
        update(served)
        generate(served)
        assert "sleep 2" not in served.llm.events and "wake weights" not in served.llm.events


def test_the_stand_in_takes_the_arguments_of_vllm_only(folder: Path) -> None:
    with standing_in():
        with pytest.raises(TypeError):
            engine(folder, no_such_argument=1)
        with pytest.raises(TypeError):
            engine(folder).call("generate", prompt=[3], parameters={"no_such_argument": 1}, temperature=1.0)
        llm = engine(folder).llm
        lora_request = importlib.import_module("vllm.lora.request").LoRARequest
    named = {"LoRARequest": lora_request}
    named |= {name: getattr(llm, name.partition(".")[2]) for name in SIGNATURES if name.startswith("AsyncLLM.")}
    named["AsyncMPClient.pause_scheduler_async"] = llm.engine_core.pause_scheduler_async
    for name, function in named.items():
        check_arguments(name, argument_names(function))


def test_requests_in_flight_go_on_with_new_weights_and_say_which_tokens_are_theirs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInLLM, "answer", staticmethod(lambda prompt: [*range(10, 10 + 40 * prompt[0]), 2]))
    with standing_in():
        served = engine(folder, enable_sleep_mode=False, max_model_len=500)

        async def generate_and_update() -> tuple[Any, Any, Any]:
            requests = [asyncio.ensure_future(served.served.generate([length], {}, 1.0)) for length in (1, 5)]
            other = asyncio.ensure_future(served.served.generate([1], {}, 0.5))  # waits for those with 1.0
            while served.llm.tokens_made < 20:
                await asyncio.sleep(0)
            await served.served.begin_update()
            made = served.llm.tokens_made
            await asyncio.sleep(0.01)
            assert served.llm.tokens_made == made
            await served.served.finish_update()
            await served.served.resume(7)
            return await requests[0], await requests[1], await other

        first, second, other = served.loop.run_until_complete(generate_and_update())
    for response, length in ((first, 41), (second, 201)):
        assert [version for version, _ in response.versions] == [0, 7]
        assert sum(count for _, count in response.versions) == len(response.tokens) == len(response.log_probs) == length
        assert response.reason == "stop"
    assert other.versions == [[7, 41]]
