"""What runs in the processes of an engine, on a stand-in for vLLM's modules."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.generate.vllm.stand_in import standing_in
from workers.generate.vllm.buckets import SharedBuckets
from workers.weights.whole_tensors import tensor_in


@pytest.fixture
def module() -> Iterator[Any]:
    with standing_in():
        import policy_receiver

        policy_receiver.current_platform = SimpleNamespace(is_cpu=lambda: True)
        yield policy_receiver


def test_vllm_loads_and_repacks_weights_under_its_own_config(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config

    config, during, weight = SimpleNamespace(parallel_config=SimpleNamespace(node_rank_within_dp=0)), [], torch.ones(3)

    def note(*_: Any) -> None:
        during.append(vllm.config.current is config)

    def load(pairs: Any) -> set[str]:
        note()
        return {name for name, _ in pairs}

    monkeypatch.setattr(module, "initialize_layerwise_reload", note)
    monkeypatch.setattr(module, "finalize_layerwise_reload", note)
    monkeypatch.setattr(module, "_repack", note)
    receiver = module.PolicyReceiver()
    model = SimpleNamespace(named_parameters=lambda: [("weight", weight)], load_weights=load)
    receiver.vllm_config, receiver.device = config, torch.device("cpu")
    receiver.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None)
    buckets = SharedBuckets(64)
    receiver.begin_policy_update()
    place = ("weight", "float32", (3,), 0)
    tensor_in(buckets.memory(12), place).copy_(weight)
    receiver.receive_policy_bucket([buckets.path], [place])
    receiver.finish_policy_update()
    assert during == [True] * 4 and vllm.config.current is None

    def load_none(pairs: Any) -> set[str]:
        raise KeyError([*pairs][-1][0])

    model.load_weights = load_none
    with pytest.raises(RuntimeError, match=r"weight of \[3\]"):
        receiver.receive_policy_bucket([buckets.path], [place])
