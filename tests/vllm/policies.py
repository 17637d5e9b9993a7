"""Small policies whose rollout is vLLM's, as groups on Ray, and batches for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mcontroller import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from workers import ActorConfig, ActorRolloutRefWorker, load_config
from workers.generate.vllm.rollout import VllmRollout
from workers.weights.fingerprints import WeightsNotArrived
from workers.weights.moves import TensorInBucket
from workers.weights.whole_tensors import BucketMemory, PolicyWeights, Receivers, tensor_in

VOCAB, PROMPT, RESPONSE = 131, 160, 12  # prompts of more than one block of vLLM's cache
EOS, PAD = 2, 0
PYTHON = str(Path(__file__).parents[2] / ".venv-vllm/bin/python")  # has vLLM, and nothing of this project
SIZES = {
    "vocab_size": VOCAB,
    "max_sequence_length": 256,
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "init_method_std": 0.2,
}
POLICIES: dict[str, dict[str, Any]] = {
    "dense-tp2": {"model": SIZES, "parallel": {"tp": 2}},
    "dense-tp2-engine-tp2": {"model": SIZES, "parallel": {"tp": 2}, "engine_tp": 2},
    "adapter-tp2": {
        "model": SIZES | {"lora": {"rank": 4, "alpha": 8.0}},
        "parallel": {"tp": 2},
        "engine_tp": 2,
        "adapter_alone": True,
    },
    "tied-tp2": {"model": SIZES | {"add_qkv_bias": True, "tie_embeddings": True}, "parallel": {"tp": 2}},
    "moe-ep2": {
        "model": SIZES
        | {
            "qk_layernorm": True,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 64,
            "transformer": {"moe_router_pre_softmax": False, "moe_router_dtype": "fp32"},
        },
        "parallel": {"ep": 2},
    },
}


class HalfOld(PolicyWeights):
    """The weights of a policy, of which every second one of the tensors that have changed is old."""

    def __init__(self, weights: PolicyWeights, old: dict[str, torch.Tensor]) -> None:
        self._weights, self._old = weights, old

    def buckets(self, memory: BucketMemory, receivers: Receivers = "all") -> Iterator[list[TensorInBucket]]:
        filled = torch.empty(0)

        def remembered(nbytes: int) -> torch.Tensor:
            nonlocal filled
            filled = memory(nbytes)
            return filled

        changed = 0
        for bucket in self._weights.buckets(remembered, receivers):
            for place in bucket:
                tensor, old = tensor_in(filled, place), self._old[place[0]]
                changed += not torch.equal(tensor, old)
                if changed % 2:
                    tensor.copy_(old)
            yield bucket


class Actor(ActorRolloutRefWorker):
    """An actor whose engine a test can end or stop, or update incompletely."""

    old: dict[str, torch.Tensor]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def repeat_sampling(self) -> None:
        """Use the seeds of the first sampled batch again."""
        self.state.counters["sampled_batches"] = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_pause(self, mode: str) -> None:
        """Set ``rollout.vllm.pause`` of the engine."""
        assert isinstance(self.rollout, VllmRollout)
        self.rollout._config = load_config(ActorConfig, self.rollout._config, {"rollout": {"vllm": {"pause": mode}}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def engine_pid(self) -> int | None:
        assert isinstance(self.rollout, VllmRollout)
        return None if self.rollout.engine is None else self.rollout.engine.pid

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def signal_engine(self, name: str) -> None:
        pid = self.engine_pid()
        if pid is not None:
            os.kill(pid, getattr(signal, name))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_engine(self, fault: str = "") -> Mapping[str, float] | WeightsNotArrived:
        """Update the engine as a generation does; return the metrics, or the error."""
        rollout = self.rollout
        assert isinstance(rollout, VllmRollout)
        correct = rollout.update_weights
        if fault == "old":
            rollout.update_weights = lambda weights: {}  # type: ignore[method-assign]
        elif fault == "half":
            rollout.update_weights = lambda weights: correct(HalfOld(weights, self.old))  # type: ignore[method-assign]
        try:
            metrics = self.generator.current_rollout()[1]
            if not fault:
                self.old = {name: tensor.clone() for name, tensor in self.generator.rollout_weights()}
            return metrics
        except WeightsNotArrived as error:
            return error
        finally:
            rollout.update_weights = correct  # type: ignore[method-assign]


def actor_config(policy: str, **changes: Any) -> ActorConfig:
    chosen = POLICIES[policy]
    defaults = {
        "model": chosen["model"],
        "parallel": chosen["parallel"],
        "optim": {"lr": 1e-2, "eps": 1e-4},
        "rollout": {
            "engine": "vllm",
            "prompt_length": PROMPT,
            "response_length": RESPONSE,
            "seed": 3,
            "vllm": {
                "python": PYTHON,
                "tp": chosen.get("engine_tp", 1),
                "kv_cache_bytes": 128 << 20,
                "bucket_bytes": 1 << 16,
                "seeds": True,
                "adapter_alone": chosen.get("adapter_alone", False),
            },
        },
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size": 2,
    }
    return load_config(ActorConfig, defaults, changes)


def prompts(rows: int = 8, **meta_info: Any) -> DataProto:
    """Random prompts of 3 to 160 tokens, padded on the left."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (rows, PROMPT), generator=generator)
    lengths = torch.randint(3, PROMPT + 1, (rows, 1), generator=generator)
    lengths[: rows // 2] = PROMPT
    mask = (torch.arange(PROMPT) >= PROMPT - lengths).long()
    columns = {"input_ids": ids * mask, "attention_mask": mask}
    return DataProto.from_dict(columns, meta_info={"eos_token_id": EOS, "pad_token_id": PAD, **meta_info})
