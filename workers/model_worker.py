"""The base class of actor, critic and reward worker: a model on a layout that is scored, trained and saved.

To change what is computed, override ``build_model``, ``build_optimizer``, ``parameter_groups``, ``forward_step``,
``loss`` or ``metrics``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import ConfigError, DataError, before_changes
from parallel_state.agreement import raise_on_every_rank
from parallel_state.communicators import Communicators
from workers.checkpoint.background_saves import BackgroundSaves
from workers.checkpoint.load import check_checkpoint, load_checkpoint, open_checkpoint
from workers.checkpoint.save import save_checkpoint
from workers.checkpoint.state import TrainingState
from workers.config import ModelConfig, OptimConfig, ParallelConfig
from workers.config.constructor import check_constructor
from workers.config.fit import length_multiple_of
from workers.distinct_tokens.attention import computes_distinct_tokens
from workers.megatron_worker import MegatronWorker
from workers.memory.use import MemoryUse
from workers.mini_batch_gradients import AppliedStep, Gradients, step_metrics
from workers.model.transformer_config import check_chunks
from workers.model.utilization import model_flops_utilization
from workers.train.batches import TokenBatch
from workers.train.forward import sum_over_context
from workers.train.metrics import Rule, reduce_reports
from workers.train.micro_batches import MicroBatch, MicroBatchSize, micro_batches, width_multiple
from workers.train.mini_batches import Division, mini_batches_of_update, of_every_shard, shuffle_generator
from workers.train.optimizer import (
    ParameterGroups,
    check_not_ended,
    check_schedule_unit,
    gather_parameters,
    make_optimizer,
    make_scheduler,
    standard_parameter_groups,
    wrap_for_training,
)
from workers.train.pipeline import Count, Loss, run_for_scores
from workers.train.router_losses import RouterLosses
from workers.weights.hf.model import export_hf
from workers.weights.offload import (
    Offload,
    Sleepable,
    buffer_tensors,
    drop_cached_tables,
    gradient_tensors,
    model_tensors,
    optimizer_tensors,
)

__all__ = ["ModelWorker"]

COMMUNICATORS = "communicators"
"""Name of the buffers of NCCL among the offloaded parts."""


class ModelWorker(MegatronWorker):
    """A worker with one model, or several, on this rank.

    Args:
        model: the model.
        parallel: the sizes of the axes.
        timeout_s: seconds after which the rendezvous or a collective fails.
        packed: whether the rows of a micro-batch go through the model as one sequence (see ``workers.train.packing``).

    Attributes:
        parts_needed: by method, the parts (see ``offload``) that it computes with. They are brought back to the device
            before the method runs. A method without an entry gets all parts. An override that needs more parts
            than the method that it overrides needs a new entry.
        share_prompts: whether equal prompts are computed once where possible (see ``workers.distinct_tokens``).
        model: the model chunks of this rank, inside DistributedDataParallel if they are trained.
        optimizer, scheduler: Megatron's; None if the model is not trained.
        phases: optimizer configurations by phase of training; ``phase`` is the one that the optimizer belongs to.
        ended_phases: those whose optimizer has made steps and was replaced by that of another phase.
        updates, optimizer_steps: number of calls that trained the model, and of steps of this optimizer.
        gradients: those that ``optim_step`` applies; None if there are none.
        weights_version: a number that changes whenever the weights may have changed.
        offloaded: the parts that are in host memory now.
        memory_use: the memory of this process during the calls.
    """

    parallel: ParallelConfig  # never None

    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("get_megatron_rank_info", "get_megatron_global_info", "execute_func_rank_zero"), ()),
        **dict.fromkeys(("offload", "reload", "take_memory_use", "verify_checkpoint", "wait_for_checkpoint"), ()),
        "save_checkpoint": ("params", "reference", "optimizer"),
        "load_checkpoint": ("params", "reference", "optimizer"),
        "export_hf": ("params",),
    }

    schedule_unit: ClassVar[str] = "steps"
    """What the schedule of ``build_optimizer`` counts: ``"steps"`` of the optimizer, or ``"samples"``, the rows of each
    step's mini-batch on all ranks, as those of Megatron-LM's training loop do."""

    config_class: ClassVar[type | None] = None
    """The type of the constructor's ``config`` argument. None: any."""

    @classmethod
    def check_init(cls, *args: Any, **kwargs: Any) -> None:
        """Check the constructor's arguments, and that ``config`` is a ``config_class``, before any process starts.

        Raises:
            ConfigError: an argument is missing, unknown, or of another type.
        """
        check_constructor(cls, cls.config_class, args, kwargs)

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, *, timeout_s: float, packed: bool = False) -> None:
        super().__init__(parallel, seed=model.seed, timeout_s=timeout_s)
        self.model_config = model
        self.packed = packed
        self.share_prompts = False
        self.model: list[Any] = []
        self.phases: dict[str, OptimConfig] = {}
        self.phase = ""
        self.ended_phases: set[str] = set()
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        self.updates = 0
        self.optimizer_steps = 0
        self.weights_version = 0
        self.gradients: Gradients | None = None
        self._background_saves = BackgroundSaves()
        self.offloaded = Offload()
        self.memory_use = MemoryUse()

    # ---- what a user overrides ---------------------------------------------------------------------------------------

    def build_model(self) -> list[nn.Module]:
        """Return this rank's model chunks on its device, without DistributedDataParallel.

        Call ``workers.place_chunks`` on chunks that ``workers.build_model`` did not make.
        """
        raise NotImplementedError(f"{type(self).__name__} must override build_model")

    def build_optimizer(
        self, model: Sequence[Any], config: OptimConfig
    ) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        """Return the optimizer of ``model`` (inside DistributedDataParallel) and its learning-rate schedule.

        The schedule counts what ``schedule_unit`` names. An override that returns another schedule than that of
        ``config`` sets it in its class.
        """
        optimizer = make_optimizer(model, config, self.context.pg, self.parameter_groups(model, config))
        return optimizer, make_scheduler(optimizer, config)

    def parameter_groups(self, model: Sequence[Any], config: OptimConfig) -> ParameterGroups:
        """Return settings of single parameters that differ from the optimizer's: learning rates, weight decay.

        The keys select parameters by name pattern, attribute or function (``megatron.core.optimizer.ParamKey``); every
        rank returns the same. An override extends the result of this method, which is Megatron's own.

        Args:
            model: this rank's chunks, inside DistributedDataParallel.
            config: the optimizer.

        Example:
            >>> slow = ParamGroupOverride(max_lr=config.lr / 10, min_lr=config.min_lr / 10)
            >>> return {**super().parameter_groups(model, config), ParamKey(name="*router.weight"): slow}
        """
        return standard_parameter_groups(model, config)

    def forward_step(self, model: nn.Module, rows: TokenBatch) -> Tensor:
        """Run one micro-batch through one chunk.

        If ``rows.packing`` is set, the chunk must get the rows as one sequence, as ``workers.train.forward`` does. So
        it must if ``rows.distinct`` is, but only methods with ``takes_distinct_tokens`` get such rows.

        Returns:
            Hidden states, or on the last stage the argument of ``loss`` and the result of ``score``.
        """
        raise NotImplementedError(f"{type(self).__name__} must override forward_step")

    def loss(self, rows: TokenBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss summed over the valid tokens of a micro-batch, their number, and a report for ``metrics``.

        Tokens are valid if ``rows.mask`` is not 0. It is 0 for targets of another context-parallel rank, which
        ``rows.whole_mask`` has too. The number may be of anything that the sum over all micro-batches and ranks of the
        mini-batch is to be divided by, such as responses, or a fraction of them.

        Args:
            rows: the micro-batch; its columns are ``[rows, targets]``.
            output: of ``forward_step`` on the last stage.
        """
        raise NotImplementedError(f"{type(self).__name__} is not trained: it has no loss")

    def loss_count(self, rows: TokenBatch) -> Tensor:
        """Return the number that ``loss`` returns for the rows, from the mask of all context-parallel ranks.

        Router losses are weighted by it. If ``loss`` returns another number, gradients with them are computed twice.
        """
        return rows.mask.sum()

    def metrics(self) -> dict[str, Rule]:
        """Return how each value that ``loss`` reports is reduced over micro-batches and ranks, except ``TOKENS``."""
        return {}

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def set_up(self, phases: Mapping[str, OptimConfig], ddp: Mapping[str, Any] | None = None) -> None:
        """Build the model, and the optimizer of the first of ``phases``; without phases it is not trained.

        Args:
            phases: optimizer configurations by phase.
            ddp: further fields of Megatron's DistributedDataParallelConfig.
        """
        self.check_call_context()
        self.model = self.build_model()
        check_chunks(self.model, self.model_config, self.parallel, f"{type(self).__name__}.build_model")
        replicas, on_gpu = self.context.pg.dp_cp.size(), self.device.type == "cuda"
        self.phases = {phase: optim.resolved(replicas, on_gpu=on_gpu) for phase, optim in phases.items()}
        for phase, optim in list(self.phases.items())[:1]:
            self.model = wrap_for_training(self.model, optim, self.context.pg, ddp)
            self.use_phase(phase)

    def use_phase(self, phase: str, *, reset: bool = False) -> None:
        """Train in this phase from now on, with a new optimizer and schedule unless its settings are the same.

        Args:
            phase: one of ``phases``.
            reset: build new ones also for the same settings, if the current ones have made a step.

        Raises:
            ConfigError: the phase has ended: its optimizer was replaced by that of another.
        """
        optim = self.phases[phase]
        used = self.scheduler is not None and self.scheduler.num_steps > 0
        replaced = self.optimizer is not None and optim != self.phases[self.phase]
        if replaced:
            check_not_ended(phase, self.ended_phases)
        if self.optimizer is None or replaced or (reset and used):
            self.ended_phases |= {self.phase} if replaced and used else set()
            self.optimizer, self.scheduler = self.build_optimizer(self.model, optim)
            check_schedule_unit(ModelWorker, type(self), self.scheduler, optim)
            self.optimizer_steps = 0
        self.phase = phase

    @property
    def sequence_multiple(self) -> int:
        """The number that the length of sequences must be a multiple of, for cp, sequence parallelism and fp8."""
        return length_multiple_of(self.model_config, self.parallel)

    def rows_of_every_rank(self, make: Callable[[], TokenBatch]) -> TokenBatch:
        """Return ``make()``; a DataError on any rank is raised on every rank of the dp group (a collective)."""
        with before_changes():
            return raise_on_every_rank(make, self.context.pg.dp)

    # ---- scoring -----------------------------------------------------------------------------------------------------

    def score(self, model: Sequence[nn.Module], rows: TokenBatch, size: MicroBatchSize) -> Tensor | None:
        """Return the outputs of ``forward_step`` for all rows, in their order, on the last stage; None elsewhere.

        Args:
            model: this rank's chunks.
            rows: this rank's shard.
            size: of micro-batches.

        Returns:
            ``[..., rows, targets]`` on the CPU, summed over context-parallel ranks.
        """
        self.check_call_context()
        most = max(self._of_every_shard(len(rows)))
        batches = self._micro_batches(rows, torch.arange(len(rows)), most, size)
        on_device = self._on_device(model, (each.batch for each in batches))
        outputs = run_for_scores(model, on_device, self.forward_step, self.context.pg)
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
        rows: TokenBatch,
        *,
        loss: Loss,
        rules: Mapping[str, Rule],
        micro_batch_size: MicroBatchSize,
        count: Count | None = None,
        mini_batch_size: int | None = None,
        epochs: int = 1,
        shuffle_seed: int | None = None,
        mini_batches: Tensor | None = None,
    ) -> dict[str, float]:
        """Make optimizer steps over mini-batches of the rows of all data-parallel ranks, and return the metrics.

        Mini-batches are those of ``draw_mini_batches`` over the rows that have a valid token: the same for every
        data-parallel size, and for any rows without loss that pad the shards. The loss of a step is averaged over all
        valid tokens of its mini-batch on all ranks; router losses, and their metrics, over all its tokens.

        Args:
            method: the name of the called method, for error messages.
            rows: this rank's shard.
            loss: see ``loss``.
            rules: see ``metrics``.
            micro_batch_size: rows or tokens of a micro-batch.
            count: of ``loss``; None for ``loss_count``.
            mini_batch_size: rows of all ranks for one step; None is all.
            epochs: number of passes over the rows.
            shuffle_seed: every epoch draws its mini-batches from this and the number of updates so far; None keeps the
                order of the rows.
            mini_batches: the mini-batch of each row in each epoch, int64 ``[rows, epochs]``; None draws them.

        Raises:
            DataError: on every rank, if no row of the batch has a valid token, or ``mini_batches`` does not fit.
            NonFiniteGradient: on every rank, before the weights change, unless ``optim.on_nonfinite`` is ``skip``.
        """
        self.check_call_context()
        self.gradients = None
        started = time.perf_counter()
        counted = rows.counted.nonzero().flatten()
        division = Division(mini_batches, mini_batch_size, epochs, shuffle_generator(shuffle_seed, self.updates))
        taken = mini_batches_of_update(method, rows.counted, division, self.context.pg.dp, self.device)
        self.weights_version += 1
        reports, steps = list[dict[str, Tensor]](), list[AppliedStep]()
        routers = RouterLosses(self.model, self.context.pg, self.device, count or self.loss_count)
        for index, most, total in taken:
            batches = self._micro_batches(rows, counted[index], most, micro_batch_size)
            gradients = self._computed(method, batches, loss, routers, total)
            steps.append(self._applied(gradients))
            reports += [] if steps[-1].grad_norm is None else gradients.reports
            del gradients  # with its micro-batches on the device
        gather_parameters(self.model, self.phases[self.phase])
        self._background_saves.finish_if_written()
        self.updates += 1
        metrics = reduce_reports(reports, rules, self.context.pg, self.device) | routers.means()
        lengths, seconds = rows.lengths[counted].repeat(epochs), time.perf_counter() - started  # the device is done
        metrics |= model_flops_utilization(self.model, lengths, self.context.pg, seconds)
        return metrics | step_metrics(steps)

    def _computed(
        self, method: str, batches: Sequence[MicroBatch], loss: Loss, routers: RouterLosses, samples: int
    ) -> Gradients:
        assert self.optimizer is not None
        rows, forward, pg = [each.batch for each in batches], self.forward_step, self.context.pg
        optimizer, on_device = self.optimizer, functools.partial(self._on_device, self.model)
        return Gradients(method, self.model, optimizer, rows, on_device, forward, loss, routers, pg, samples)

    def _applied(self, gradients: Gradients) -> AppliedStep:
        """Make one optimizer step, or skip it."""
        assert self.optimizer is not None and self.scheduler is not None
        step = gradients.apply(
            self.optimizer,
            self.scheduler,
            advance=gradients.samples if self.schedule_unit == "samples" else 1,
            steps=self.optimizer_steps,
            skips_nonfinite=self.phases[self.phase].on_nonfinite != "raise",
            device=self.device,
            rank=str(self.context.rank_info()),
        )
        self.optimizer_steps += step.grad_norm is not None
        return step

    def _micro_batches(self, rows: TokenBatch, index: Tensor, most: int, size: MicroBatchSize) -> list[MicroBatch]:
        """Divide the rows at ``index`` into micro-batches, as many on every data-parallel rank (a collective).

        ``most`` is the largest number of rows that any data-parallel rank has.
        """
        multiple = self.parallel.pp if self.parallel.vpp else 1  # required by an interleaved schedule
        lengths = self.sequence_multiple if self.packed else width_multiple(self.sequence_multiple, self.device)
        return micro_batches(rows, index, most, size, multiple, lengths, self._of_every_shard, packed=self.packed)

    def _on_device(self, model: Sequence[nn.Module], batches: Iterable[TokenBatch]) -> list[TokenBatch]:
        """Return micro-batches on the device, with this rank's targets located while their masks are on the CPU."""
        cp, forward = self.context.pg.cp, getattr(self.forward_step, "takes_distinct_tokens", False)
        if forward and self.share_prompts and not self.packed and computes_distinct_tokens(model):
            batches = [batch.with_distinct_tokens(self.sequence_multiple) for batch in batches]
        return [batch.for_rank(cp.size(), cp.rank()).to(self.device) for batch in batches]

    def _of_every_shard(self, number: int) -> list[int]:
        """Return the ``number`` of every data-parallel rank, in the order of their shards (a collective)."""
        return [one for (one,) in of_every_shard([number], self.context.pg.dp, self.device)]

    # ---- memory of the device ----------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(
        self, parts: Sequence[str] | None = None, keep_for: str | None = None, communicators: bool = False
    ) -> int:
        """Move parts of this role from the device to host memory, and return the bytes of device memory freed.

        A method that needs a part brings it back first (see ``parts_needed``), so no call fails because of it.

        Args:
            parts: of ``params``, ``reference`` (if there is one), ``grads`` and ``optimizer`` (if the model is
                trained), ``rollout`` (if it has a copy of the weights); None is all. Gradients are not kept, because
                every update clears them first. Nor are the weights of a rollout, which are updated before it generates.
            keep_for: a method that is called next; the parts that it needs are not moved.
            communicators: free the buffers of NCCL too. The next method that needs a part allocates them again.

        Raises:
            ConfigError: this role has no such part.
            ParallelStateError: ``communicators`` is set, and the installed NCCL cannot free its buffers.
        """
        available = self.parts()
        chosen = tuple(available) if parts is None else parts
        if keep_for is not None:
            kept = self.parts_for(keep_for)
            chosen = () if kept is None else tuple(part for part in chosen if part not in kept)
        for chunks in self.models().values():
            drop_cached_tables(chunks)
        if "grads" in chosen:
            self.gradients = None
        freed = self.offloaded.offload(available, chosen, discard=("grads",))
        if communicators:
            freed += self.offloaded.offload({COMMUNICATORS: Communicators(self.process_groups())}, (COMMUNICATORS,))
        return freed

    def process_groups(self) -> list[ProcessGroup]:
        """Return the process groups of this role, in the same order on every rank."""
        return self.context.groups()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reload(self, parts: Sequence[str] | None = None) -> None:
        """Bring offloaded parts back before the call that needs them; None is all, and frees their host memory."""
        self.offloaded.reload(parts, release=parts is None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_memory_use(self) -> dict[str, dict[str, float]]:
        """Return the memory of this process by method, since the last call of this one: see ``MemoryUse.take``."""
        return self.memory_use.take()

    def models(self) -> dict[str, list[Any]]:
        """Return the model chunks on this rank, by the name of their model; none before they are built."""
        return {"model": self.model} if self.model else {}

    def parts(self) -> dict[str, Iterable[Tensor] | Sleepable]:
        """Return the parts that can be offloaded, by name. Memory that two of them share belongs to the first."""
        parts: dict[str, Iterable[Tensor] | Sleepable] = {
            "params" if name == "model" else name: itertools.chain(model_tensors(chunks), buffer_tensors(chunks))
            for name, chunks in self.models().items()
        }
        if self.optimizer is not None:
            parts |= {"grads": gradient_tensors(self.model), "optimizer": optimizer_tensors(self.optimizer)}
        return parts

    @contextlib.contextmanager
    def call_context(self, method: str) -> Iterator[None]:
        """Run a call in this worker's Megatron context, with the parts on the device that the method needs.

        Raises:
            ConfigError: the method needs parts, and no model has been built.
        """
        measured = self.memory_use.of(method) if self.parts_for(method) != () else contextlib.nullcontext()
        with super().call_context(method), measured:
            self.reload_for(method)
            yield

    def parts_for(self, method: str) -> tuple[str, ...] | None:
        """Return the parts that ``method`` needs; None is all. By default those of ``parts_needed``."""
        return self.parts_needed.get(method)

    def reload_for(self, method: str) -> None:
        """Bring back the parts that ``method`` needs (see ``parts_for``).

        Raises:
            ConfigError: the method needs parts, and no model has been built.
        """
        needed = self.parts_for(method)
        if needed and not self.parts():
            with before_changes():
                raise ConfigError(f"{method} was called before init_model: there is no model yet", key="init_model")
        self.offloaded.reload((COMMUNICATORS, *needed) if needed else needed)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def training(self) -> TrainingState:
        """Return the state that a checkpoint of this worker contains, and that loading one fills."""
        counters: dict[str, int | str] = {
            "phase": self.phase,
            "updates": self.updates,
            "optimizer_steps": self.optimizer_steps,
        }
        if self.ended_phases:
            counters["ended_phases"] = ",".join(sorted(self.ended_phases))
        return TrainingState(self.context, dict(self.models()), self.optimizer, self.scheduler, counters)

    def prepare_to_load(self, counters: Mapping[str, Any]) -> None:
        """Make room for the state in a checkpoint with these counters, and forget what it replaces."""
        self.ended_phases = set()

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Set the counters to those of a loaded checkpoint."""
        self.gradients = None
        self.updates = counters["updates"]
        self.optimizer_steps = counters["optimizer_steps"]
        self.ended_phases = set(filter(None, counters.get("ended_phases", "").split(",")))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        path: str,
        global_step: int = 0,
        max_to_keep: int | None = None,
        asynchronous: bool = False,
        reshardable: bool = True,
    ) -> str:
        """Write ``<path>/global_step_<global_step>`` and return the directory. Any layout can load the weights.

        Args:
            path: a directory on a file system that all nodes share.
            global_step: the step that ``load_checkpoint`` returns.
            max_to_keep: number of checkpoints that stay under ``path``, this one included; None keeps all.
            asynchronous: return when the state is copied; a separate process of each worker writes it. The directory
                appears at the end of an update after it is written, or at the latest with the next save, load,
                ``wait_for_checkpoint`` or shutdown of the group.
            reshardable: whether any layout can load a distributed optimizer too; see ``workers.checkpoint.save``.

        Raises:
            ConfigError: ``max_to_keep`` is less than 1.
            DataError: on every rank, if one of them cannot write; earlier checkpoints stay. An asynchronous save
                raises in the call that would finish it.
        """
        self._background_saves.finish()
        background = self._background_saves if asynchronous else None
        return str(save_checkpoint(self.training(), path, global_step, max_to_keep, background, reshardable))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint of the last asynchronous save is complete."""
        self._background_saves.finish()

    def before_shutdown(self) -> None:
        """Finish an asynchronous save."""
        with self.context.activate():
            self._background_saves.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the model as a new Hugging Face directory, with the tokenizer of the one that it was loaded from.

        Args:
            path: a directory that does not exist yet, or is empty, on a file system that all nodes share.

        Raises:
            DataError: ``path`` is not empty, or a tensor has no counterpart; see ``workers.export_hf``.
            ConfigError: no model family is built like the model.
        """
        export_hf(self.model, self.context, path, self.model_config, companions_from=self.model_config.hf_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def verify_checkpoint(self, path: str) -> str:
        """Return how the checkpoint at ``path`` is damaged; "" if it is whole, and nothing in it would run code."""
        self._background_saves.finish()
        try:
            open_checkpoint(path, self.model_config.vocab_size)
        except DataError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Load the checkpoint at ``path``, or the latest one under it, and return the step that it was saved at.

        From a distributed checkpoint of Megatron-LM, the weights are loaded. From one that was saved before the first
        step of the optimizer, training continues with a new optimizer. A model with a value head loads the weights of a
        model with logits, without those of the head, with a warning.

        Args:
            path: a checkpoint, or the directory that ``save_checkpoint`` was called with.

        Raises:
            DataError: there is none, it is damaged, or it does not fit the model; with the names of the weights.
        """
        self._background_saves.finish()
        distributed = {phase: bool(optim.distributed_optimizer) for phase, optim in self.phases.items()}
        with before_changes():
            checkpoint, manifest = open_checkpoint(path, self.model_config.vocab_size)
            without_head = check_checkpoint(self.training(), checkpoint, manifest, distributed)
        counters = manifest["counters"]
        self.prepare_to_load(counters)
        if self.phases:
            phase = self.phase if without_head else counters.get("phase") or self.phase
            self.use_phase(phase, reset=without_head or "optimizer" not in manifest["parts"])
        self.weights_version += 1
        load_checkpoint(self.training(), checkpoint, manifest, without_head=without_head)
        if counters and not without_head:
            self.restore(counters)
        return manifest["step"]
