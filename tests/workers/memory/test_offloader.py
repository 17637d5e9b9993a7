"""The offloader of a worker: which parts a method brings back, and which leave before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError
from workers.memory.offloader import Offloader
from workers.train.state import TrainingState

NEEDS: dict[str, tuple[str, ...]] = {"score": ("params",), "generate": ("rollout",), "status": ()}


class Engine:
    """A part that frees its memory itself."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self) -> int:
        self.calls.append("sleep")
        return 7

    def wake_up(self) -> None:
        self.calls.append("wake up")


def offloader(**models: Any) -> tuple[Offloader, Engine]:
    context: Any = SimpleNamespace(groups=list)
    made, engine = Offloader(TrainingState(context, models), NEEDS), Engine()
    made.sleepers["rollout"] = engine
    return made, engine


def called(made: Offloader, method: str) -> tuple[str, ...]:
    """The parts in host memory during a call."""
    with made.during(method):
        return made.offloaded.parts


def test_a_method_brings_back_its_parts_and_one_without_needs_brings_back_all() -> None:
    made, engine = offloader(model=[torch.nn.Linear(2, 3)])
    assert made.offload() == 36 + 7
    assert called(made, "status") == ("params", "rollout")
    assert called(made, "score") == ("rollout",) and engine.calls == ["sleep"]
    made.offload(["params"])
    assert called(made, "unknown") == () and engine.calls == ["sleep", "wake up"]


def test_a_part_that_is_alone_leaves_before_methods_with_other_parts() -> None:
    made, engine = offloader(model=[torch.nn.Linear(2, 3)])
    made.alone.add("rollout")
    assert called(made, "status") == called(made, "generate") == () and engine.calls == []
    assert called(made, "score") == ("rollout",)
    assert called(made, "generate") == () and engine.calls == ["sleep", "wake up"]


def test_offload_keeps_what_the_next_method_needs_and_drops_gradients() -> None:
    made, _ = offloader(model=[torch.nn.Linear(2, 3)], reference=[torch.nn.Linear(4, 1)])
    assert made.offload(keep_for="score") == 20 + 7
    assert made.offloaded.parts == ("reference", "rollout")
    assert made.offload(keep_for="unknown") == 0


def test_a_method_before_the_model_is_built_is_rejected() -> None:
    made, _ = offloader()
    made.sleepers.clear()
    with pytest.raises(ConfigError) as caught:
        called(made, "score")
    assert caught.value.key == "init_model"
    assert called(made, "status") == ()


def test_a_worker_that_only_serves_an_engine_has_no_methods_that_need_a_model() -> None:
    made, _ = offloader()
    made.serves_engine()
    assert made.needs["receive_weights"] == made.needs["weight_fingerprints"] == ("rollout",)
    assert called(made, "generate") == called(made, "receive_weights") == ()
    with pytest.raises(ConfigError) as caught:
        called(made, "score")
    assert (caught.value.key, caught.value.value) == ("role", "rollout")


def test_memory_use_is_reported_once_for_methods_that_compute() -> None:
    made, _ = offloader(model=[torch.nn.Linear(2, 3)])
    for method in ("score", "status"):
        called(made, method)
    assert list(made.take_memory_use()) == ["score"] and made.take_memory_use() == {}
