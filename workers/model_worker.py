"""The base class of actor, critic and reward worker: a model on a layout that is scored, trained and saved.

To change what is computed, override ``build_model``, ``build_optimizer``, ``parameter_groups``, ``forward_step``,
``loss``, ``loss_count`` or ``metrics``. The components do the rest: each is a class in a separate file.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from mcontroller.errors import ConfigError
from mcontroller.worker import delegate
from workers.checkpoint.checkpointer import Checkpointer
from workers.checkpoint.save import Saver
from workers.config import ModelConfig, OptimConfig, ParallelConfig, RoleConfig
from workers.config.fit import length_multiple_of
from workers.config.roles import TrainedConfig
from workers.lora.base import base_hash
from workers.lora.peft_files import check_adapter
from workers.megatron_worker import MegatronWorker
from workers.memory.offloader import Offloader
from workers.model.transformer_config import check_chunks, given_fields
from workers.profiling.profiler import Profiler
from workers.role_worker import RoleWorker
from workers.train.batches import RowReader, TokenBatch
from workers.train.metrics import Rule, checked_rules
from workers.train.micro_batches import MicroBatcher
from workers.train.mini_batches import configured_mini_batches
from workers.train.optimizer import (
    ParameterGroups,
    check_schedule_unit,
    make_optimizer,
    make_scheduler,
    standard_parameter_groups,
)
from workers.train.scorer import Scorer
from workers.train.state import TrainingState
from workers.train.trainer import Trainer
from workers.weights.hf.checkpoint import check_checkpoint_files


class ModelWorker(MegatronWorker, RoleWorker):
    """A worker with one model, or several, on this rank.

    Args:
        model: the model.
        parallel: the sizes of the axes.
        timeout_s: seconds after which the rendezvous or a collective fails.
        packed: whether the rows of a micro-batch go through the model as one sequence (see ``workers.train.packing``).
        share_prompts: whether equal prompts are computed once where possible (see ``workers.distinct_tokens``).

    Attributes:
        parts_needed: by method, the parts (see ``Offloader.offload``) that it computes with. They are brought back to
            the device before the method runs. A method without an entry gets all parts. An override that needs more
            parts than the method that it overrides needs a new entry.
        state: the models on this rank, and what trains them.
        reader: reads batches as rows of tokens.
        batcher: divides rows into micro-batches.
        scorer: runs rows through a model.
        trainer: trains the model.
        offloader: moves models and optimizer to host memory and back.
        checkpointer: saves and loads the state.
        profiler: profiles calls, and dumps CUDA's memory.
    """

    parallel: ParallelConfig  # never None

    warm_imports: ClassVar[Sequence[str]] = (__name__,)
    offload = delegate("offloader", Offloader.offload)
    reload = delegate("offloader", Offloader.reload)
    take_memory_use = delegate("offloader", Offloader.take_memory_use)
    save_checkpoint = delegate("checkpointer", Checkpointer.save_checkpoint)
    load_checkpoint = delegate("checkpointer", Checkpointer.load_checkpoint)
    save_to_memory = delegate("checkpointer", Checkpointer.save_to_memory)
    load_from_memory = delegate("checkpointer", Checkpointer.load_from_memory)
    wait_for_checkpoint = delegate("checkpointer", Checkpointer.wait_for_checkpoint)
    verify_checkpoint = delegate("checkpointer", Checkpointer.verify_checkpoint)
    export_hf = delegate("checkpointer", Checkpointer.export_hf)
    export_adapter = delegate("checkpointer", Checkpointer.export_adapter)
    start_profile = delegate("profiler", Profiler.start_profile)
    stop_profile = delegate("profiler", Profiler.stop_profile)
    record_memory = delegate("profiler", Profiler.record_memory)
    save_memory_snapshot = delegate("profiler", Profiler.save_memory_snapshot)

    parts_needed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "get_megatron_rank_info": (),
        "get_megatron_global_info": (),
        "execute_func_rank_zero": (),
        "start_profile": (),
        "stop_profile": (),
        "record_memory": (),
        "save_memory_snapshot": (),
        "offload": (),
        "reload": (),
        "take_memory_use": (),
        "verify_checkpoint": (),
        "wait_for_checkpoint": (),
        "save_checkpoint": ("params", "reference", "optimizer"),
        "load_checkpoint": ("params", "reference", "optimizer"),
        "save_to_memory": ("params", "reference", "optimizer"),
        "load_from_memory": ("params", "reference", "optimizer"),
        "export_hf": ("params",),
        "export_adapter": ("params",),
        "forward_backward": ("params", "grads", "optimizer"),
        "optim_step": ("params", "grads", "optimizer"),
    }

    schedule_unit: ClassVar[str] = "steps"
    """The unit of the schedule of ``build_optimizer``: ``"steps"`` of the optimizer, or ``"samples"``, the rows of each
    step's mini-batch on all ranks, as in Megatron-LM's training loop."""

    config_class: ClassVar[type | None] = None
    """The type of the constructor's ``config`` argument. None: any."""

    @classmethod
    def check_init(cls, *args: Any, **kwargs: Any) -> None:
        """Check the constructor's arguments, and the files of a checkpoint, before any process starts.

        Raises:
            ConfigError: ``config`` is of another type, a field of ``model.transformer`` cannot be set, or the adapter
                at ``model.lora.path`` is of another base.
            DataError: files of ``model.hf_path`` are missing or damaged.
        """
        bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments
        config = bound.get("config")
        if cls.config_class is None or "config" not in bound or isinstance(config, cls.config_class):
            if isinstance(config, RoleConfig):
                check_checkpoint_files(config.model)
                check_adapter(config.model)
                if config.model.provider != "bridge":
                    given_fields(config.model, config.parallel)
            return
        name, kind = cls.config_class.__name__, type(config).__name__
        made = f"load_config({name}, {{...}})" if isinstance(config, Mapping) else f"{name}(...)"
        raise ConfigError(
            f"{cls.__name__}: config is of type {kind}; expected {name}: write config={made}, or set "
            f"{cls.__name__}.config_class if its configuration has another type",
            key="config",
            value=config,
        )

    @classmethod
    def layouts(cls, config: Any) -> Sequence[ParallelConfig]:
        """Return the layout of the model."""
        return (config.parallel,)

    @classmethod
    def mini_batches(cls, config: Any, rows: int, n: int, update: int) -> Tensor | None:
        """Return the mini-batch of each row in each epoch of an update; see ``configured_mini_batches``."""
        return configured_mini_batches(config, rows, n, update) if isinstance(config, TrainedConfig) else None

    @classmethod
    def shares_prompts(cls, config: Any) -> bool:
        """Return whether a pass computes a prompt once for the rows that begin with it."""
        return isinstance(config, TrainedConfig) and config.share_prompts and not config.packed

    @classmethod
    def overrides(cls, method: Callable[..., Any]) -> bool:
        """Return whether this class has another method in place of one of a base class."""
        return getattr(cls, method.__name__) is not method

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        *,
        timeout_s: float,
        packed: bool = False,
        share_prompts: bool = False,
    ) -> None:
        super().__init__(parallel, seed=model.seed, timeout_s=timeout_s)
        self.model_config = model
        pg, forward, multiple = self.context.pg, self.forward_step, length_multiple_of(model, parallel)
        self.state = TrainingState(self.context)
        self.reader = RowReader(model.vocab_size, model.max_sequence_length, multiple, pg.dp)
        self.batcher = MicroBatcher(
            pg,
            self.device,
            count_multiple=parallel.pp if parallel.vpp else 1,  # required by an interleaved schedule
            length_multiple=multiple,
            packed=packed,
            share_prompts=share_prompts and getattr(forward, "takes_distinct_tokens", False),
        )
        self.scorer = Scorer(self.state, self.batcher, forward)
        saver = Saver()
        self.trainer = Trainer(
            self.state,
            self.batcher,
            forward=forward,
            loss_count=self.loss_count,
            build_optimizer=self._checked_optimizer,
            schedule_unit=self.schedule_unit,
            after_update=saver.finish_if_written,
        )
        self.profiler = Profiler(self.get_megatron_rank_info)
        self.offloader = Offloader(self.state, self.parts_needed)
        self.checkpointer = Checkpointer(self.state, model, self.trainer, saver)

    @property
    def model(self) -> list[Any]:
        """This rank's chunks of the model, inside DistributedDataParallel if they are trained."""
        return self.state.model

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

        The schedule counts what ``schedule_unit`` names. An override that returns another schedule than the one of
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

        Examples:
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

    # ---- what the controller and subclasses call ---------------------------------------------------------------------

    def set_up(self, phases: Mapping[str, OptimConfig], ddp: Mapping[str, Any] | None = None) -> None:
        """Build the model, and the optimizer of the first of ``phases``; without phases it is not trained.

        Args:
            phases: optimizer configurations by phase of training.
            ddp: other fields of Megatron's DistributedDataParallelConfig.
        """
        self.state.check_context()
        model = self.built_chunks()
        if self.model_config.provider == "native":
            check_chunks(model, self.model_config, self.parallel, f"{type(self).__name__}.build_model")
        self.state.models["model"] = model
        lora = self.model_config.lora
        if lora is not None:
            base, path = base_hash(self.model_config), self.model_config.hf_path
            self.state.base = {"path": path, "sha256": base, "scale": lora.scale}
        self.trainer.set_up(phases, ddp)

    def built_chunks(self) -> list[nn.Module]:
        """Return the chunks of ``build_model``.

        Raises:
            ConfigError: it returned something else than a module for each virtual stage.
        """
        chunks: Any = self.build_model()
        expected, given = self.parallel.vpp or 1, type(chunks).__name__
        if isinstance(chunks, list | tuple):
            given = f"{given} of {', '.join(type(chunk).__name__ for chunk in chunks) or 'nothing'}"
            if len(chunks) == expected and all(isinstance(chunk, nn.Module) for chunk in chunks):
                return list(chunks)
        text = f"{type(self).__name__}.build_model returned {given}; expected a list of {expected} modules, one for "
        raise ConfigError(f"{text}each virtual stage of this rank", key="build_model")

    def metric_rules(self) -> Mapping[str, Rule]:
        """Return the ``metrics`` of the worker, checked."""
        return checked_rules(self.metrics(), f"{type(self).__name__}.metrics()")

    def _checked_optimizer(
        self, model: Sequence[Any], config: OptimConfig
    ) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        optimizer, scheduler = self.build_optimizer(model, config)
        check_schedule_unit(ModelWorker, type(self), scheduler, config)
        return optimizer, scheduler

    @contextlib.contextmanager
    def call_context(self, method: str) -> Iterator[None]:
        """Run a call in this worker's Megatron context, with the parts on the device that the method needs.

        Raises:
            ConfigError: the method needs parts, and no model has been built.
        """
        with super().call_context(method), self.profiler.during(method), self.offloader.during(method):
            yield

    def before_shutdown(self) -> None:
        """Finish an asynchronous save."""
        with self.context.activate():
            self.checkpointer.wait_for_checkpoint()
