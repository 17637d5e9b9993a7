"""``PolicyWeightSource`` as vLLM's own code reads it: sent and loaded by both sides of its transfer engine ``nccl``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightSource, layerwise_groups
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerWeightTransferEngine

import workers.generate.vllm.in_engine as in_engine
from tests.ranks import run_ranks
from tests.vllm.pipe_transport import Pipe, run_without_cuda
from tests.vllm.policies import POLICIES, actor_config
from tests.workers.roles import actor
from workers.generate.rollout_protocol import PolicyWeights
from workers.generate.vllm.engine_process import EngineProcess
from workers.generate.vllm.rollout import engine_arguments, engine_environment
from workers.generate.weight_source import PolicyWeightSource
from workers.weights.fingerprints import Fingerprint, tensor_fingerprints
from workers.weights.hf.config import hf_config_of

BUFFER_BYTES = 1 << 16
LAYOUTS: list[tuple[str, dict[str, int], int]] = [
    ("dense-tp2", {"tp": 2}, 2),
    ("tied-tp2", {"pp": 2}, 2),
    ("moe-ep2", {"ep": 2, "pp": 2}, 4),
]
IDS = ["dense", "tied", "experts"]


def source_of(policy: str, parallel: dict[str, int]) -> PolicyWeightSource:
    worker = actor(parallel, "actor", model=POLICIES[policy]["model"])
    return PolicyWeightSource(PolicyWeights(worker.model, worker.context), torch.bfloat16)


def read_by_vllm(policy: str, parallel: dict[str, int]) -> dict[str, Any]:
    """What the trainer's sides of vLLM's engines find in a source, and check."""
    source = source_of(policy, parallel)
    described = source.metadata()
    names = [each.name for each in described]
    sharded: Any = object.__new__(ShardedRDTTrainerWeightTransferEngine)
    sharded.source, sharded._meta, sharded._groups = source, described, layerwise_groups(names)
    sharded._resolve_ownership(dist.get_world_size(), dist.get_rank())
    batches = list(source.iter_groups())
    for index, (found, tensors) in enumerate(batches):
        sharded._validate_held_yields(index, found, tensors)
    return {
        "names": names,
        "groups": source.groups(),
        "of_vllm": layerwise_groups(names),
        "inherited": WeightSource.groups(source),  # type: ignore[arg-type]
        "batches": [found for found, _ in batches],
        "sent": [name for name, _ in NCCLTrainerWeightTransferEngine._checked_iter(source, described)],  # type: ignore[arg-type]
        "owners": sharded._owner_sets,
    }


@pytest.mark.simulated
@pytest.mark.parametrize(("policy", "parallel", "ranks"), LAYOUTS, ids=IDS)
def test_a_source_is_what_the_trainers_sides_of_vllms_engines_require(
    policy: str, parallel: dict[str, int], ranks: int
) -> None:
    for found in run_ranks(read_by_vllm, ranks, policy, parallel):
        assert found["groups"] == found["of_vllm"] == found["inherited"] == found["batches"]
        assert found["sent"] == found["names"] == [name for group in found["of_vllm"] for name in group]
        assert len(found["groups"]) == 4  # the embedding, two layers, and what is after them
        assert found["owners"] == [list(range(ranks))]  # every rank can serve every tensor


class Client:
    """Calls vLLM's side of a transfer in the process of an engine."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.calls: list[str] = []

    def start_weight_update(self) -> None:
        self.engine.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.call("finish_weight_update")


def sent_by_vllm(policy: str, parallel: dict[str, int], folder: Path) -> tuple[list[Fingerprint], list[Any]] | None:
    """Send a source with vLLM's trainer engine; return the fingerprints of the policy and of the engine."""
    source = source_of(policy, parallel)
    sender = dist.get_rank() == 0
    pipe = str(folder / "pipe")
    engine = None
    if sender:
        settings = engine_arguments(actor_config(policy, model={"dtype": "bfloat16"}), str(folder), None)
        engine = EngineProcess(
            settings | {"weight_transfer_config": {"backend": "nccl"}},
            engine_environment([]) | {"PYTHONPATH": os.pathsep.join([*in_engine.__path__, os.getcwd()])},
            start_timeout_s=300.0,
            silence_timeout_s=60.0,
            program=Path(__file__).parent / "serve_transfer.py",
        )
    trainer = NCCLTrainerWeightTransferEngine(
        client=Client(engine) if engine else None,  # type: ignore[arg-type]
        source=source,  # type: ignore[arg-type]
        is_sender=sender,
        packed_buffer_size_bytes=BUFFER_BYTES,
    )
    if engine is not None:
        engine.send("connect", path=pipe, buffer_bytes=BUFFER_BYTES)
        trainer.model_update_group = Pipe(pipe, sends=True)  # type: ignore[assignment]
        engine.result()
    trainer.send_weights()
    expected = tensor_fingerprints(source)
    if engine is None:
        return None
    trainer.shutdown()
    sums, _ = engine.call("held_weights")
    engine.close()
    return expected, sums


@pytest.mark.processes
@pytest.mark.parametrize(("policy", "parallel", "ranks"), LAYOUTS, ids=IDS)
def test_vllms_transfer_engine_sends_a_source_and_loads_it_into_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str, parallel: dict[str, int], ranks: int
) -> None:
    run_without_cuda(monkeypatch.setattr)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "config.json").write_text(json.dumps(hf_config_of(actor_config(policy).model)))
    [result, *_] = run_ranks(sent_by_vllm, ranks, policy, parallel, tmp_path)
    assert result is not None
    expected, held = result
    assert {tuple(each) for each in expected} == {tuple(each) for each in held}
    assert len(expected) > 20
