"""What actor, critic and reward worker have in common: a model on a layout that is scored, trained and saved.

To change what is computed, override ``build_model``, ``build_optimizer``, ``forward_step``, ``loss`` or ``metrics``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from mcontroller.decorator import register
from mcontroller.dispatch import Dispatch
from mcontroller.errors import ConfigError, DataError
from mcontroller.protocol import DataProto
from workers.agreement import on_every_rank
from workers.background_saves import BackgroundSaves
from workers.batches import Rows, mini_batch_rows
from workers.checkpoint import Training, load_checkpoint, open_checkpoint, save_checkpoint
from workers.config import ModelConfig, OptimConfig, ParallelConfig
from workers.fit import length_multiple_of
from workers.forward import owned_targets, sum_over_context
from workers.hf import export_hf
from workers.megatron_worker import MegatronWorker
from workers.metrics import Rule, reduce_reports
from workers.micro_batches import (
    MicroBatch,
    MicroBatchSize,
    equal_micro_batches,
    least_count,
    packed_equal_micro_batches,
    token_micro_batches,
)
from workers.nonfinite import all_finite, raise_nonfinite
from workers.offload import Offload, Sleeper, gradient_tensors, model_tensors, optimizer_tensors
from workers.optimizer import guarded_step, make_optimizer, make_scheduler, wrap_for_training
from workers.pipeline import Loss, run_for_gradients, run_for_scores
from workers.router_losses import RouterLosses

__all__ = ["ModelWorker"]


class ModelWorker(MegatronWorker):
    """A model on this rank's place in a layout.

    Attributes:
        model: the model chunks of this rank, inside DistributedDataParallel where they are trained.
        optimizer, scheduler: Megatron's, where the model is trained.
        phases: the ways in which it can be trained, by name; ``phase`` is the one that the optimizer belongs to.
        packed: whether the rows of a micro-batch go through the model as one sequence (see ``workers.packing``).
        updates, optimizer_steps: how many calls have trained the model, and how many steps this optimizer has made.
        weights_version: another number whenever the weights may have changed.
    """

    # The parts (see ``offload``) that a registered method computes with; one that is not named here has all of them.
    # An override that computes with more than what it overrides must be named anew.
    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {"offload": (), "reload": (), "wait_for_checkpoint": ()}

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, *, timeout_s: float, packed: bool = False) -> None:
        super().__init__(parallel, seed=model.seed, timeout_s=timeout_s)
        self.model_config = model
        self.packed = packed
        self.model: list[Any] = []
        self.phases: dict[str, OptimConfig] = {}
        self.phase = ""
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        self.updates = 0
        self.optimizer_steps = 0
        self.weights_version = 0
        self._background_saves = BackgroundSaves()
        self._offload = Offload()

    # ---- what a user overrides ---------------------------------------------------------------------------------------

    def build_model(self) -> list[nn.Module]:
        """This rank's model chunks on its device, without DistributedDataParallel.

        Chunks that ``workers.build_model`` did not make need ``workers.place_chunks``.
        """
        raise NotImplementedError(f"{type(self).__name__} must say which model it runs: override build_model")

    def build_optimizer(
        self, model: Sequence[Any], config: OptimConfig
    ) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        """The optimizer over ``model`` (inside DistributedDataParallel) and its learning-rate schedule."""
        optimizer = make_optimizer(model, config)
        return optimizer, make_scheduler(optimizer, config)

    def forward_step(self, model: nn.Module, rows: Rows) -> Tensor:
        """One micro-batch through one chunk: hidden states, or on the last stage what ``loss`` and scoring take.

        Where ``rows.packing`` is set the chunk is to take the rows as one sequence, as ``workers.forward`` does.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what its model computes: override forward_step")

    def loss(self, rows: Rows, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss summed over the valid tokens of a micro-batch, their number, and a report for ``metrics``.

        Valid is where ``rows.mask`` is not 0: targets that another context-parallel rank has are left to its own loss.
        """
        raise NotImplementedError(f"{type(self).__name__} is not trained: it has no loss")

    def metrics(self) -> dict[str, Rule]:
        """What ``loss`` reports beside ``TOKENS``, and how the reports of all micro-batches and ranks are reduced."""
        return {}

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def set_up(self, phases: Mapping[str, OptimConfig]) -> None:
        """Build the model, and what trains it in the first of ``phases``; without any it is not trained."""
        self.model = self.build_model()
        self.phases = dict(phases)
        for phase, optim in list(phases.items())[:1]:
            self.model = wrap_for_training(self.model, optim)
            self.use_phase(phase)

    def use_phase(self, phase: str, *, afresh: bool = False) -> None:
        """Train in this phase from now on: with a fresh optimizer and schedule, unless its settings are the same.

        Args:
            afresh: with fresh ones in any case, if those that there are have made a step.
        """
        optim = self.phases[phase]
        used = self.scheduler is not None and self.scheduler.num_steps > 0
        if self.optimizer is None or optim != self.phases[self.phase] or (afresh and used):
            self.optimizer, self.scheduler = self.build_optimizer(self.model, optim)
            self.optimizer_steps = 0
        self.phase = phase

    @property
    def sequence_multiple(self) -> int:
        """What the length of sequences must be a multiple of, for cp, sequence parallelism and fp8."""
        return length_multiple_of(self.model_config, self.parallel)

    def rows_of_every_rank(self, make: Callable[[], Rows]) -> Rows:
        """What ``make`` reads from this rank's shard; a DataError over any shard is raised on every rank."""
        return on_every_rank(make, self.context.pg.dp)

    # ---- scoring -----------------------------------------------------------------------------------------------------

    def score(self, model: Sequence[nn.Module], rows: Rows, size: MicroBatchSize) -> Tensor | None:
        """``forward_step``'s output of all rows, in their order, on the last stage; None elsewhere.

        The rows' dim is the one before the last. What context-parallel ranks hold of it is summed.
        """
        most = max(self._of_every_shard(len(rows)))
        batches = self._micro_batches(rows, torch.arange(len(rows)), most, size)
        outputs = run_for_scores(model, [batch.rows.to(self.device) for batch in batches], self.forward_step)
        if not outputs:
            return None
        own = [output.narrow(-2, 0, len(batch.index)) for output, batch in zip(outputs, batches, strict=True)]
        order = torch.cat([batch.index for batch in batches]).argsort().to(self.device)
        joined = torch.cat(own, dim=-2).index_select(-2, order)
        return sum_over_context(joined, self.context.pg).cpu()

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        method: str,
        rows: Rows,
        *,
        loss: Loss,
        rules: Mapping[str, Rule],
        micro_batch_size: MicroBatchSize,
        mini_batch_size: int | None = None,
        epochs: int = 1,
        shuffle_seed: int | None = None,
    ) -> dict[str, float]:
        """Optimizer steps over mini-batches of the rows that all data-parallel ranks hold together, and the metrics.

        Mini-batches are those of ``batches.mini_batch_rows`` over the rows that have a valid token: the same whatever
        the data-parallel size, and whatever rows without loss fill the shards up. Every step's loss is averaged over
        all valid tokens of its mini-batch on all ranks; router losses, and their metrics, over all its tokens.

        Args:
            mini_batch_size: rows of all ranks to one step; None takes all of them.
            shuffle_seed: every epoch draws its own mini-batches from this and the number of updates so far; None
                takes the rows in their order.

        Raises:
            DataError: on every rank, if no row of the batch has a valid token.
            NonFiniteGradient: on every rank, before the weights change, unless ``optim.on_nonfinite`` is ``skip``.
        """
        counted = (rows.mask != 0).any(1).nonzero().flatten()
        sizes = self._of_every_shard(len(counted))
        if sum(sizes) == 0:
            raise DataError(f"{method}: no row of the batch has a valid token to learn from", method=method)
        generator = None
        if shuffle_seed is not None:
            generator = torch.Generator().manual_seed(shuffle_seed * 1_000_003 + self.updates)
        self.weights_version += 1
        reports: list[dict[str, Tensor]] = []
        norms: list[float | None] = []
        routers = RouterLosses(self.model, self.context.pg, self.device)
        for _ in range(epochs):
            dp_rank = self.context.pg.dp.rank()
            for index, most in mini_batch_rows(sizes, dp_rank, mini_batch_size or sum(sizes), generator):
                batches = self._micro_batches(rows, counted[index], most, micro_batch_size)
                norm, its_reports = self._step(method, [batch.rows for batch in batches], loss, routers)
                norms.append(norm)
                reports += its_reports
        self._gather_parameters()
        self._background_saves.finish_if_written()
        self.updates += 1
        assert self.scheduler is not None
        made = [norm for norm in norms if norm is not None]
        return (
            reduce_reports(reports, rules, self.context.pg, self.device)
            | routers.means()
            | ({"grad_norm": sum(made) / len(made)} if made else {})
            | {
                "lr": float(self.scheduler.get_lr({})),
                "skipped_steps": float(len(norms) - len(made)),
            }
        )

    def _step(
        self, method: str, batches: Sequence[Rows], loss: Loss, routers: RouterLosses
    ) -> tuple[float | None, list[dict[str, Tensor]]]:
        """One mini-batch: its gradient norm (None if the step was skipped) and its reports (kept if it was made)."""
        assert self.optimizer is not None and self.scheduler is not None
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        routers.begin(batches)
        on_device = [batch.to(self.device) for batch in batches]
        own_loss = functools.partial(_loss_of_own_targets, loss, self.context.pg)
        reports = run_for_gradients(self.model, on_device, self.forward_step, own_loss)
        step = guarded_step(self.optimizer)
        if step.overflow and not all_finite(reports, self.device):
            step = step._replace(overflow=False)  # a smaller scale of the loss would not mend it
        routers.end(step.made)
        if step.made:
            self.scheduler.step(1)
            self.optimizer_steps += 1
            return step.grad_norm, reports
        if not step.overflow and self.phases[self.phase].on_nonfinite == "raise":
            where = self.context.rank_info()
            raise_nonfinite(method, self.optimizer_steps, step.grad_norm, self.model, reports, str(where))
        return None, []

    def _gather_parameters(self) -> None:
        """Where a distributed optimizer gathers parameters as the next forward pass needs them: gather them now."""
        if self.phases[self.phase].overlap_param_gather:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)

    def _micro_batches(self, rows: Rows, index: Tensor, most: int, size: MicroBatchSize) -> list[MicroBatch]:
        """The rows at ``index`` in as many micro-batches as every data-parallel rank makes of its own (a collective).

        Args:
            most: the largest number of rows that any data-parallel rank has.
        """
        multiple = self.parallel.pp if self.parallel.vpp else 1  # what an interleaved schedule takes
        length_multiple = self.sequence_multiple
        if not size.tokens and not self.packed:
            return equal_micro_batches(rows, index, most, size.rows, multiple)
        if not size.tokens:
            return packed_equal_micro_batches(rows, index, most, size.rows, multiple, length_multiple=length_multiple)
        least = least_count(rows.lengths[index], size.tokens, length_multiple, packed=self.packed)
        count = -(-max(self._of_every_shard(least)) // multiple) * multiple
        return token_micro_batches(rows, index, count, size.tokens, length_multiple=length_multiple, packed=self.packed)

    def _of_every_shard(self, number: int) -> list[int]:
        """The number of every data-parallel rank, in the order of their shards (a collective)."""
        group = self.context.pg.dp
        numbers = torch.zeros(group.size(), dtype=torch.long, device=self.device)
        numbers[group.rank()] = number
        if group.size() > 1:
            dist.all_reduce(numbers, group=group)
        return numbers.tolist()

    # ---- taking turns on the device ----------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self, parts: Sequence[str] | None = None) -> int:
        """Move parts of this role from the device to host memory: the bytes of device memory that this frees.

        A method that needs a part brings it back first (``parts_needed``), so that no call can fail for it.

        Args:
            parts: of ``params``, ``reference`` (where there is one), ``grads`` and ``optimizer`` (where the model is
                trained), ``rollout`` (where generation has weights of its own); None is all. Gradients are not kept:
                every update begins by clearing them; nor are a rollout's weights: it is given them anew.

        Raises:
            ConfigError: a part that this role does not have.
        """
        available = self.parts()
        return self._offload.offload(available, tuple(available) if parts is None else parts, discard=("grads",))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reload(self, parts: Sequence[str] | None = None) -> None:
        """Bring offloaded parts back to the device ahead of the call that needs them; None is all."""
        self._offload.reload(parts)

    def parts(self) -> dict[str, Iterable[Tensor] | Sleeper]:
        """What can be offloaded, by part. Memory that two of them share belongs to the first."""
        models = self.training().models
        parts: dict[str, Iterable[Tensor] | Sleeper] = {
            "params" if part == "model" else part: model_tensors(chunks) for part, chunks in models.items() if chunks
        }
        if self.optimizer is not None:
            parts |= {"grads": gradient_tensors(self.model), "optimizer": optimizer_tensors(self.optimizer)}
        return parts

    def before_call(self, method: str) -> None:
        needed = self.parts_needed.get(method)
        if needed and not self.parts():
            raise ConfigError(f"{method} was called before init_model: there is no model yet", key="init_model")
        self._offload.reload(needed)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def training(self) -> Training:
        """What a checkpoint of this worker holds, and where it is put when one is loaded."""
        counters: dict[str, int | str] = {
            "phase": self.phase,
            "updates": self.updates,
            "optimizer_steps": self.optimizer_steps,
        }
        return Training(self.context, {"model": self.model}, self.optimizer, self.scheduler, counters)

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Take over the counters of a loaded checkpoint."""
        self.updates = counters["updates"]
        self.optimizer_steps = counters["optimizer_steps"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, path: str, global_step: int = 0, max_to_keep: int | None = None, asynchronous: bool = False
    ) -> str:
        """Write ``<path>/global_step_<global_step>``, readable in any layout, and keep ``max_to_keep`` in all.

        Returns the directory. See ``workers.checkpoint`` for what is in it.

        Args:
            asynchronous: return once the state is set aside; a process beside each worker writes it. The directory
                appears at the end of an update that finds it written, or at the latest with the next save, load,
                ``wait_for_checkpoint`` or the group's shutdown.
        """
        if max_to_keep is not None and max_to_keep < 1:
            text = f"save_checkpoint: max_to_keep is {max_to_keep}; it must be at least 1, or None to keep all"
            raise ConfigError(text, key="max_to_keep", value=max_to_keep)
        self._background_saves.finish()
        background = self._background_saves if asynchronous else None
        return str(save_checkpoint(self.training(), path, global_step, max_to_keep, background))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint of the last asynchronous save is in its place."""
        self._background_saves.finish()

    def before_shutdown(self) -> None:
        """The group waits for a checkpoint under way before it ends."""
        with self.context.activate():
            self._background_saves.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the model as a new Hugging Face directory, with the tokenizer of the one that it started from, if any.

        Raises:
            DataError, ConfigError: see ``workers.hf.export_hf``.
        """
        export_hf(self.model, self.context, path, self.model_config, companions_from=self.model_config.hf_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Go on from the checkpoint at ``path``, or the latest one under it: the step that it was saved at.

        Of a distributed checkpoint that Megatron-LM wrote the weights are taken over. Where there is no state of the
        optimizer, as in one that was saved before the first step, training begins with a fresh one.

        Raises:
            DataError: there is none, or it does not fit the model; with the names of the weights.
        """
        self._background_saves.finish()
        checkpoint, manifest = open_checkpoint(path, self.model_config.vocab_size)
        counters = manifest["counters"]
        if self.phases:
            phase = counters.get("phase") or self.phase
            if phase not in self.phases:
                raise DataError(
                    f"the checkpoint {str(checkpoint)!r} was saved in the phase {phase!r}; {type(self).__name__} is "
                    f"trained in {', '.join(self.phases)}",
                    path=str(checkpoint),
                    phase=phase,
                )
            self.use_phase(phase, afresh="optimizer" not in manifest["parts"])
        self.weights_version += 1
        load_checkpoint(self.training(), checkpoint, manifest)
        if counters:
            self.restore(counters)
        return manifest["step"]


def _loss_of_own_targets(loss: Loss, pg: ProcessGroupCollection, rows: Rows, output: Any) -> Any:
    return loss(dataclasses.replace(rows, mask=rows.mask * owned_targets(rows, pg)), output)


def reported(prefix: str, metrics: Mapping[str, float]) -> DataProto:
    """A result that is metrics only, each under ``prefix/name``."""
    return DataProto(meta_info={"metrics": {f"{prefix}/{name}": value for name, value in metrics.items()}})
