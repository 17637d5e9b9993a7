"""The calls of a role of a run, with its own worker class and losses, on a rank whose device has no memory."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcontroller.data.batch import DataProto
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.outcome import Use
from parallel_state.dry_run.training import begin, initialize_state, used
from parallel_state.layout import ParallelLayout
from workers.config import ActorConfig
from workers.config.roles import MicroBatchSize
from workers.losses.registry import POLICY_LOSSES

UPDATES = ("update_actor", "update_critic")
"""Calls that train."""
_FLOATS = (
    "old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "importance_weights", "values", "returns",
)  # fmt: skip


@dataclass(frozen=True)
class RoleCall:
    """A call of a role, with rows of full length.

    Attributes:
        worker_class: the class of its workers.
        config: their configuration.
        roles: of an actor's workers, such as ``"actor_ref"``; empty for others.
        method: the call.
        layout: its layout.
        prompt: tokens of a prompt.
        response: tokens of a response.
    """

    worker_class: Any
    config: Any
    roles: str
    method: str
    layout: ParallelLayout
    prompt: int
    response: int

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a micro-batch, and the number of micro-batches: no more than change the peak."""
        size: MicroBatchSize = self.config.update_size if self.method in UPDATES else self.config.scoring_size
        rows = max(1, size.tokens // (self.prompt + self.response)) if size.tokens else max(size.rows, 1)
        count = 2 * self.layout.pp
        if self.method in UPDATES:
            count = min(count, math.ceil(self.config.ppo_mini_batch_size / self.layout.dp / rows))
        if self.layout.vpp:
            count = math.ceil(count / self.layout.pp) * self.layout.pp
        return rows, count

    def __call__(self, mode: CountingMode) -> Use:
        """Build the worker of this rank, make the call, and return what was used."""
        rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
        os.environ.update({"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size})
        mode.memory.kind = "parameters"
        rows, count = self.rows
        config = replace(self.config, **self._changes(rows * count * self.layout.dp))
        worker = self.worker_class(config, self.roles) if self.roles else self.worker_class(config)
        with worker.call_context("init_model"):
            worker.init_model()
        _classify(mode, worker)
        batch = self._batch(rows * count, config)
        gc.collect()
        idle = begin(mode)
        with worker.call_context(self.method):
            getattr(worker, self.method)(batch)
        return used(mode, idle, [*worker.state.model, *getattr(worker, "reference", ())])

    def _changes(self, rows: int) -> dict[str, Any]:
        """Return fields of the configuration that differ: one mini-batch, local layers, random weights."""
        known = {field.name for field in dataclasses.fields(self.config)}
        model = self.config.model
        fused = {"gradient_accumulation_fusion": model.transformer_impl != "local"}
        model = replace(model, transformer_impl="local", hf_path=None, transformer=fused | model.transformer)
        changes: dict[str, Any] = {"model": model}
        if "optim" in known:
            optim = self.config.optim.resolved(self.layout.dp * self.layout.cp, on_gpu=True)
            changes |= {"optim": optim, "ppo_epochs": 1, "ppo_mini_batch_size": rows, "ppo_mini_batch_prompts": 0}
        if isinstance(self.config, ActorConfig):
            rollout = replace(self.config.rollout, engine="megatron")
            changes |= {"rollout": rollout, "router_replay": "none", "sft_optim": None}
        return changes

    def _batch(self, rows: int, config: Any) -> DataProto:
        tokens = torch.ones(rows, self.prompt + self.response, dtype=torch.long)
        responses = tokens[:, self.prompt :].contiguous()
        columns = {
            "input_ids": tokens,
            "attention_mask": tokens.clone(),
            "responses": responses,
            "response_mask": responses.clone(),
        }
        extra = POLICY_LOSSES[config.policy_loss].columns if isinstance(config, ActorConfig) else ()
        columns |= {name: torch.zeros(responses.shape) for name in (*_FLOATS, *extra)}
        return DataProto.from_dict(columns)


def _classify(mode: CountingMode, worker: Any) -> None:
    """Count the storages of a worker's model as what they are, and create the optimizer's state."""
    memory = mode.memory
    optimizer = worker.state.optimizer
    if optimizer is not None:
        memory.kind = "optimizer"
        initialize_state(optimizer)
        copies = getattr(optimizer, "chained_optimizers", [optimizer])
        for one in copies:
            for group in one.optimizer.param_groups if one.optimizer is not None else ():
                memory.change_kind(group["params"], "optimizer")
    memory.kind = "activations"
    for model in worker.state.model:
        memory.change_kind(model.parameters(), "parameters")
        for buffer in (
            (*getattr(model, "buffers", ()), *getattr(model, "expert_parallel_buffers", ())) if optimizer else ()
        ):
            memory.change_kind([buffer.grad_data], "gradients")
            memory.change_kind([buffer.param_data], "parameters")
