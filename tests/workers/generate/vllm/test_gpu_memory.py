"""An engine beside a policy gets the part of the GPU that is free, and starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcontroller.errors import ConfigError
from tests.workers.generate.vllm.stand_in import EngineInProcess, Gpu, standing_in
from workers import ActorConfig, load_config
from workers.generate.vllm.gpu_memory import GpuMemory, utilization
from workers.generate.vllm.start import engine_arguments

GB = 1 << 30
MODEL = {
    "vocab_size": 1024,
    "max_sequence_length": 4096,
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}


def config(**vllm: Any) -> ActorConfig:
    rollout = {"engine": "vllm", "prompt_length": 1024, "response_length": 1024, "vllm": vllm}
    return load_config(ActorConfig, {"model": MODEL, "rollout": rollout})


@pytest.mark.parametrize(("used", "due"), [(0, 0), (20, 0), (20, 30), (70, 2)])
def test_an_engine_starts_beside_a_policy_and_leaves_what_the_policy_needs(used: int, due: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1024}')
    settings, gpu = config(), Gpu(80 * GB, used * GB)
    share = utilization(settings, [GpuMemory(gpu.free(), gpu.total, due * GB)])
    with standing_in(lambda: gpu):
        EngineInProcess(engine_arguments(settings, str(tmp_path), share), {})
    assert share == pytest.approx(min(0.92, (80 - used - due - 3.2 - 0.3) / 80), abs=1e-4)


def test_the_gpu_with_the_least_room_decides() -> None:
    gpus = [GpuMemory(60 * GB, 80 * GB, 0), GpuMemory(30 * GB, 80 * GB, 5 * GB)]
    assert utilization(config(tp=2), gpus) == pytest.approx((30 - 5 - 3.2 - 2 * 0.3) / 80, abs=1e-4)


@pytest.mark.parametrize(("total", "tp", "left"), [(24, 1, 2.3), (80, 1, 3.5), (80, 8, 5.6), (140, 4, 6.8)])
def test_an_engine_leaves_a_margin_for_what_vllm_does_not_count(total: int, tp: int, left: float) -> None:
    model = {"num_attention_heads": 8, "num_query_groups": 8}
    settings = load_config(ActorConfig, {"model": MODEL | model, "rollout": {"engine": "vllm", "vllm": {"tp": tp}}})
    gpus = [GpuMemory(total * GB // 2, total * GB, 0)] * tp
    assert utilization(settings, gpus) == pytest.approx((total / 2 - left) / total, abs=1e-4)


def test_an_engine_that_does_not_fit_is_rejected() -> None:
    gpus = [GpuMemory(7 * GB, 80 * GB, 3 * GB // 2)]
    assert utilization(config(kv_cache_bytes=GB), gpus) == pytest.approx(2 / 80, abs=1e-4)
    for settings, free in ((config(kv_cache_bytes=3 * GB), 7), (config(), 4)):
        with pytest.raises(ConfigError) as caught:
            utilization(settings, [gpus[0]._replace(free=free * GB)])
        assert (caught.value.key, caught.value.value) == ("rollout.vllm.tp", 1)


def test_the_cache_is_what_the_share_has_left_unless_its_size_is_set() -> None:
    assert engine_arguments(config(), "", 0.5)["kv_cache_memory_bytes"] is None
    assert engine_arguments(config(kv_cache_bytes=3 * GB), "", 0.5)["kv_cache_memory_bytes"] == 3 * GB
    on_cpu = engine_arguments(config(), "", None)
    assert on_cpu["kv_cache_memory_bytes"] == GB and "gpu_memory_utilization" not in on_cpu
