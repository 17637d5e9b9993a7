"""The roles of a run as programs that ``verify`` trains: each with its own worker class, loss and update rules.

A step calls ``forward_backward``, the methods that score, ``optim_step``, and the update that the trainer calls, with
its mini-batches and epochs. A role that is not trained only scores.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from mcontroller.data.batch import DataProto
from parallel_state.layout import ParallelLayout
from parallel_state.verify.layouts import Variant
from parallel_state.verify.program import Program
from parallel_state.verify.training import ADAM_EPS, LEARNING_RATE, StepValues, Training
from workers.config import ActorConfig, OptimConfig, ParallelConfig, VllmConfig
from workers.losses.policy import POLICY_LOSSES
from workers.model.transformer_config import transformer_config

_PROMPT, _RESPONSE, _ROWS = 8, 8, 2  # tokens, and rows of a micro-batch
_SCORES = {"actor": "compute_log_prob", "ref": "compute_ref_log_prob"}


@dataclass(frozen=True)
class ModelRole:
    """A role of a run that has a model.

    Attributes:
        worker_class: the class of its workers.
        config: their configuration.
        roles: of an actor's workers, such as ``"actor_ref"``; empty for others.
        variant: its layout.
    """

    worker_class: Any
    config: Any
    roles: str
    variant: Variant

    @classmethod
    def of(cls, worker_class: Any, config: Any, roles: str, world_size: int) -> ModelRole:
        """Return a role in the layout of its configuration on a number of ranks.

        Raises:
            LayoutError: the axes do not divide the ranks.
        """
        return cls(worker_class, config, roles, variant_of(config, config.parallel.layout(world_size)))

    @property
    def updates(self) -> list[str]:
        """The method that trains it; none if it is not trained."""
        if self.roles:
            return ["update_actor"] if "actor" in self.roles.split("_") else []
        return ["update_critic"] if hasattr(self.config, "optim") else []

    @property
    def scores(self) -> list[str]:
        """The methods that score."""
        if self.roles:
            return [method for role, method in _SCORES.items() if role in self.roles.split("_")]
        return ["compute_values"] if hasattr(self.config, "optim") else ["compute_rm_score"]

    def without(self, part: str) -> ModelRole:
        """Return an actor's role without one of its parts."""
        return replace(self, roles="_".join(one for one in self.roles.split("_") if one != part))

    def worker(self, rows: int, **changes: Any) -> Any:
        """Return the worker of this rank, without a model yet and without an engine.

        Args:
            rows: of an optimizer step.
            changes: fields of the configuration that differ.
        """
        rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
        os.environ.update({"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size})
        if "optim" in changes:
            changes |= {"ppo_mini_batch_size": rows, "ppo_mini_batch_prompts": 0}
        if isinstance(self.config, ActorConfig):
            rollout = replace(changes.get("rollout", self.config.rollout), engine="megatron", vllm=VllmConfig())
            changes |= {"rollout": rollout, "sft_optim": None}
        config = replace(self.config, **changes)
        return self.worker_class(config, self.roles) if self.roles else self.worker_class(config)

    def verified_worker(self, variant: Variant, rows: int) -> Any:
        """Return the worker of this rank as ``verify`` trains it, without a model yet; ``rows`` are those of a step."""
        config = self.config
        known = {field.name for field in dataclasses.fields(config)}
        changes: dict[str, Any] = dict.fromkeys((name for name in known if "micro_batch" in name), 0)
        limits = [name for name in known if name.endswith("tokens_per_micro_batch") and getattr(config, name)]
        changes |= dict.fromkeys(limits, (_PROMPT + _RESPONSE) * _ROWS * variant.merged)
        changes["micro_batch_size" if "micro_batch_size" in known else "ppo_micro_batch_size"] = _ROWS * variant.merged
        changes["parallel"] = parallel_config(variant.layout, variant.sequence_parallel)
        if "optim" in known:
            changes["optim"] = _steady(config.optim, variant.distributed_optimizer)
            changes["ppo_epochs"] = min(config.ppo_epochs, 2)
        if isinstance(config, ActorConfig):
            changes["rollout"] = replace(config.rollout, prompt_length=_PROMPT, response_length=_RESPONSE)
            changes["router_replay"] = "none"
        return self.worker(rows // 2, **changes)


def _steady(optim: OptimConfig, distributed: bool) -> OptimConfig:
    """Return an optimizer whose updates are in proportion to the gradients."""
    return replace(
        optim,
        lr=LEARNING_RATE,
        min_lr=0.0,
        eps=ADAM_EPS,
        decay_style="constant",
        warmup_steps=0,
        total_steps=0,
        wsd_decay_steps=0,
        distributed_optimizer=distributed,
        overlap_param_gather=optim.overlap_param_gather and distributed,
        megatron={} if optim.optimizer == "adam" else optim.megatron,
    )


def parallel_config(layout: ParallelLayout, sequence_parallel: bool) -> ParallelConfig:
    """Return the axes of a layout as the configuration of a worker."""
    axes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")}
    return ParallelConfig(**axes, sequence_parallel=sequence_parallel)


class RoleTraining(Training):
    """A role's worker on this rank; see ``Training``."""

    program: RoleProgram

    def build(self) -> list[Any]:
        """Return the chunks of the worker's model, or of its reference if it has no other."""
        role, program = self.program.role, self.program
        self.worker = role.verified_worker(self.variant, program.micro_batches * _ROWS)
        with self.worker.call_context("init_model"):
            self.worker.init_model()
        models = self.worker.model or self.worker.reference
        return [getattr(chunk, "module", chunk) for chunk in models]

    def make_optimizer(self) -> Any:
        """Return the worker's optimizer, with the weights that the chunks have now; None if it is not trained."""
        optimizer = self.worker.state.optimizer
        if optimizer is not None:
            optimizer.reload_model_params()
        return optimizer

    def forward_backward(self, step: int) -> StepValues:
        """Compute the gradients of a step, and then the scores."""
        metrics: dict[str, float] = {}
        if self.optimizer is not None:
            metrics = self._call("forward_backward", step).meta_info["metrics"]
        rows = self.micro_batches(step)
        first = (rows[0] - step * self.program.micro_batches) * _ROWS
        rows_of_step = slice(first, first + len(rows) * _ROWS)
        scores = {}
        for method in self.program.role.scores:
            scored = self._call(method, step)
            for name, column in () if scored is None else scored.batch.items():
                scores[name] = column, rows_of_step
        gradients: list[tuple[torch.Tensor, slice] | None] = [None] * len(self.named)
        if self.optimizer is not None:
            gradients = self.gradients()
        return StepValues(gradients, metrics, scores)

    def update(self, step: int) -> dict[str, float]:
        """Make a step of the optimizer, and the trainer's update of the same batch."""
        if self.optimizer is None:
            return {}
        with self.worker.call_context("optim_step"):
            metrics: dict[str, float] = self.worker.trainer.optim_step()
        reported = {"of all parameters": metrics.pop("grad_norm"), **metrics}
        (update,) = self.program.role.updates
        metrics = self._call(update, step).meta_info["metrics"]
        return reported | {f"{update}: {name}": value for name, value in metrics.items() if not name.endswith("mfu")}

    def _call(self, method: str, step: int) -> Any:
        data = DataProto.concat([self.program.batch(index) for index in self.micro_batches(step)])
        with self.worker.call_context(method):
            return getattr(self.worker, method)(data)


@dataclass(frozen=True)
class RoleProgram(Program):
    """A role of a run, as ``verify`` trains it; see ``role_programs``."""

    trained_by: ClassVar[Any] = RoleTraining
    seeded: ClassVar[bool] = True
    scale: ClassVar[float] = 1.0

    role: ModelRole = None  # type: ignore[assignment]

    @classmethod
    def of(cls, role: ModelRole, micro_batches: int) -> RoleProgram:
        """Return the program of a role, with a number of micro-batches in a step over all ranks."""
        model, worker = role.config.model, role.worker_class

        def config(**fields: Any) -> Any:
            return transformer_config(model, ParallelConfig.from_megatron_args(SimpleNamespace(**fields)))

        def batch(index: int) -> DataProto:
            return rows_of_role(index, role.config)

        lengths = _PROMPT + _RESPONSE
        return cls(config, worker.build_model, worker.forward_step, batch, lengths, micro_batches, _ROWS, role=role)

    def recorded(self) -> RoleProgram:
        """Return the role with the same rows, whole, in every micro-batch of every layout."""
        neutral = {"share_prompts": False, "ppo_max_tokens_per_micro_batch": 0, "max_tokens_per_micro_batch": 0}
        known = {field.name for field in dataclasses.fields(self.role.config)}
        config = replace(self.role.config, **{name: value for name, value in neutral.items() if name in known})
        return self.of(replace(self.role, config=config), self.micro_batches)


def rows_of_role(
    index: int, config: Any, rows: int = _ROWS, prompt: int = _PROMPT, response: int = _RESPONSE
) -> DataProto:
    """Return rows with all columns that a role reads.

    Args:
        index: the seed: even ones give full rows in which some tokens do not count, odd ones padded rows of one prompt.
        config: of the role's workers.
        rows: their number.
        prompt: tokens of a prompt.
        response: tokens of a response.
    """
    vocabulary = config.model.vocab_size
    generator = torch.Generator().manual_seed(index)
    is_padded = index % 2 == 1

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(rows, response, generator=generator) * scale

    tokens = torch.randint(0, vocabulary, (rows, prompt + response), generator=generator)
    mask, counted = torch.ones_like(tokens), (torch.rand(rows, response, generator=generator) < 0.7).long()
    counted[:, 0] = 1
    if is_padded:
        tokens[:, :prompt] = tokens[:1, :prompt]
        mask[:, : index % (prompt - 1)] = 0
        lengths = torch.randint(1, response + 1, (rows, 1), generator=generator)
        mask[:, prompt:] = counted = (torch.arange(response) < lengths).long()
    tokens = tokens * mask
    columns = {
        "input_ids": tokens,
        "attention_mask": mask,
        "responses": tokens[:, prompt:].contiguous(),
        "response_mask": counted,
        "old_log_probs": noise(0.1) - math.log(vocabulary),
        "rollout_log_probs": noise(0.1) - math.log(vocabulary),
        "ref_log_prob": noise(0.1) - math.log(vocabulary),
        "advantages": noise(1.0),
        "importance_weights": 1.0 + noise(0.1),
        "values": noise(0.5),
        "returns": noise(1.0),
    }
    of_loss = POLICY_LOSSES[config.policy_loss].columns if isinstance(config, ActorConfig) else ()
    columns |= {name: noise(1.0) for name in of_loss if name not in columns}
    return DataProto.from_dict(columns)


def variant_of(section: Any, layout: ParallelLayout) -> Variant:
    """Return a role's layout with its flags, and its text."""
    sharded = False
    if hasattr(section, "optim"):
        chosen = section.optim.resolved(layout.dp * layout.cp, on_gpu=True).distributed_optimizer
        sharded = bool(chosen) and layout.dp * layout.cp > 1
    sequence_parallel = section.parallel.sequence_parallel and layout.tp > 1
    sizes = {axis: layout.sizes[axis] for axis in ("tp", "pp", "cp", "dp", "ep")}
    parts = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    parts += [f"etp={layout.etp}"] * (layout.etp not in (None, layout.tp) and layout.ep > 1)
    parts += [f"vpp={layout.vpp}"] * bool(layout.vpp) + ["sp"] * sequence_parallel + ["distopt"] * sharded
    return Variant(",".join(parts) or "one process", layout, sequence_parallel, sharded)
