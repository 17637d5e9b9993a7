"""Bytes that a role needs on each GPU, from its configuration and layout. Nothing is allocated and nothing runs.

Not counted: workspaces of cuBLAS and cuDNN, and fragmentation. ``mcontroller check`` adds CUDA contexts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from mcontroller.errors import ConfigError
from parallel_state import ParallelLayout
from workers.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, ParallelConfig, RewardConfig
from workers.config.fit import length_multiple_of
from workers.config.optim import DDP_DEFAULTS, OPTIMIZER_SET_ELSEWHERE
from workers.memory.activations import Tokens, in_flight, layer_gradients, layer_passing, layer_saved, recomputes_all
from workers.memory.parameters import Parameters, Shape, count_parameters, layers_of_chunks
from workers.model.transformer_config import checked_fields

CONTEXT_BYTES = 512 << 20
"""What CUDA takes on a GPU for each process that uses it, or that has mapped memory of it."""
NCCL_BYTES_OF_TWO_RANKS, NCCL_BYTES_PER_GROUP = 256 << 20, 1 << 30
"""A guess of the buffers of one NCCL communicator, of two ranks or of more.

It depends on NCCL's version, the network and the channels. Users report 7 to 10 GB on each of 8 GPUs with tp, pp, dp
and ep, and nothing has been measured here.
"""
_FLOAT = 4
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATES = {"adam": ("exp_avg_dtype", "exp_avg_sq_dtype"), "sgd": ("exp_avg_dtype",)}


def communicator_bytes(ranks: int) -> int:
    """Return the guess for the buffers of one NCCL communicator; one of a single rank has next to none."""
    if ranks < 2:
        return 0
    return NCCL_BYTES_OF_TWO_RANKS if ranks == 2 else NCCL_BYTES_PER_GROUP


@dataclass(frozen=True)
class Batch:
    """Rows of one pass through the model on one data-parallel rank.

    Attributes:
        rows: rows of a micro-batch.
        length: tokens of a row, prompt and response.
        targets: tokens of a row that are scored.
        count: micro-batches of an optimizer step.
        chunk_tokens: targets whose logits exist at the same time; 0 is all.
    """

    rows: int
    length: int
    targets: int
    count: int = 1
    chunk_tokens: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a call.

    Attributes:
        parameters: the weights.
        gradients: the gradient buffers.
        optimizer: float32 copies of weights, and the optimizer's state, without what stays in host memory.
        activations: what layers save for the backward pass, and what exists while one layer runs.
        logits: logits and what is computed from them.
        cache: keys and values of generation.
        nccl: buffers of NCCL, a guess.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0
    nccl: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(getattr(self, field.name) for field in fields(self))


class PlannedRole:
    """A model on a layout, and the memory of its calls on a rank of each pipeline stage.

    Args:
        model: the model.
        parallel: its axes.
        world_size: number of ranks.
        optim: its optimizer; None if the model is not trained.
        ddp: other fields of Megatron's DistributedDataParallelConfig.
        value_head: whether the model ends in a value head.
        fused: whether the layers are Transformer Engine's.
        compiled: whether log-probabilities are compiled, as on every GPU with Triton; None: as ``fused``.

    Raises:
        LayoutError: the axes do not divide the world size.
        ConfigError: the memory of the model or the optimizer cannot be estimated; the error names the field.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        world_size: int,
        optim: OptimConfig | None = None,
        *,
        ddp: Mapping[str, Any] | None = None,
        value_head: bool = False,
        fused: bool = False,
        compiled: bool | None = None,
    ) -> None:
        self.model, self.parallel = model, parallel
        self.compiled = fused if compiled is None else compiled
        self.layout: ParallelLayout = parallel.layout(world_size)
        self.optim = None if optim is None else optim.resolved(self.layout.dp * self.layout.cp, on_gpu=True)
        self.shape = Shape(model, parallel)
        self.ddp = dict(ddp or {})
        self.value_head, self.fused = value_head, fused
        self.size = _SIZES[model.dtype]

    def idle(self, pp_rank: int) -> Memory:
        """Return the memory of weights, gradients and optimizer on a stage."""
        count = count_parameters(self.model, self.parallel, pp_rank, value_head=self.value_head)
        total = count.dense + count.expert
        if self.optim is None:
            return Memory(parameters=self.size * total, nccl=self.nccl())
        trained = self.trained(pp_rank)
        state, on_host = self.optimizer_state(pp_rank)
        in_float = (DDP_DEFAULTS | self.ddp)["grad_reduce_in_fp32"]
        return Memory(
            parameters=self.size * total,
            gradients=(_FLOAT if in_float else self.size) * (trained.dense + trained.expert),
            optimizer=state - on_host,
            nccl=self.nccl(),
        )

    def trained(self, pp_rank: int) -> Parameters:
        """Return the numbers of trained parameters on a stage, which have gradients and optimizer state."""
        return count_parameters(self.model, self.parallel, pp_rank, value_head=self.value_head, trained=True)

    def optimizer_state(self, pp_rank: int) -> tuple[int, int]:
        """Return the bytes of a rank's optimizer on a stage, and how many of them stay in host memory.

        Raises:
            ConfigError: the state of the optimizer is not known, or a field of ``optim.megatron`` cannot be used.
        """
        layout, optim, count = self.layout, self.optim, self.trained(pp_rank)
        if optim is None:
            return 0, 0
        if optim.optimizer not in _STATES:
            raise ConfigError(
                f"memory cannot be estimated with optim.optimizer={optim.optimizer!r}; expected one of "
                f"{', '.join(_STATES)}",
                key="optim.optimizer",
                value=optim.optimizer,
            )
        given = checked_fields(OptimizerConfig, optim.megatron, "optim.megatron", OPTIMIZER_SET_ELSEWHERE)
        defaults: dict[str, Any] = {field.name: field.default for field in fields(OptimizerConfig)}
        settings = defaults | given
        per_parameter = sum(settings[state].itemsize for state in _STATES[optim.optimizer])
        if self.model.dtype != "float32":  # the optimizer updates a copy of the weights in float32
            per_parameter += settings["main_params_dtype"].itemsize
        if settings["use_precision_aware_optimizer"] and settings["store_param_remainders"]:
            per_parameter -= self.size if self.model.dtype == "bfloat16" else 0
        sharded = optim.distributed_optimizer
        dense = count.dense / (layout.dp * layout.cp if sharded else 1)
        expert = count.expert / (layout.sizes["edp"] if sharded else 1)
        on_host = settings["optimizer_offload_fraction"] if settings["optimizer_cpu_offload"] else 0.0
        whole = math.ceil(per_parameter * (dense + expert))
        return whole, math.floor(on_host * whole)

    def nccl(self) -> int:
        """Return the guess for NCCL's buffers: one communicator for each group that an update uses.

        Megatron makes a group for each set of axes, also of the same ranks. The gradient norm has a separate group: of
        tp x pp, or of all ranks with the distributed optimizer.
        """
        layout = self.layout
        distributed = self.optim is not None and self.optim.distributed_optimizer
        norm = layout.world_size if distributed else layout.tp * layout.pp
        sizes = [layout.world_size, layout.tp, layout.pp, layout.cp, layout.dp, layout.dp * layout.cp, norm]
        if self.model.num_moe_experts:
            expert = layout.sizes
            sizes += [expert["ep"], expert["etp"] * expert["ep"], expert["edp"]]
        return sum(map(communicator_bytes, sizes))

    def train(self, pp_rank: int, batch: Batch) -> Memory:
        """Return the peak of an update."""
        tokens, shape, parallel = self._tokens(batch), self.shape, self.parallel
        chunks = layers_of_chunks(self.model, parallel, pp_rank)
        layers = [with_experts for chunk in chunks for with_experts in chunk]
        boundary = tokens.size * tokens.local * shape.hidden
        saved = [layer_saved(shape, tokens, with_experts) for with_experts in layers]
        passing = max((layer_gradients(shape, tokens, layer) for layer in layers), default=0)
        if recomputes_all(shape):
            every = max(1, shape.config.recompute_num_layers or 1)
            again = sum(sorted(saved, reverse=True)[:every])  # the layers that are computed again at the same time
            of_micro_batch: float = boundary * math.ceil(len(layers) / every)
            if shape.config.recompute_method == "block":
                kept = sum(sorted(saved, reverse=True)[every * len(chunks) :])
                of_micro_batch, again = boundary * min(every * len(chunks), len(layers)) + kept, max(saved, default=0)
            passing += again
        else:
            of_micro_batch = sum(saved)
            whole = [layer_saved(shape, tokens, with_experts, everything=True) for with_experts in layers]
            passing += max((one - kept for one, kept in zip(whole, saved, strict=True)), default=0)
        flying = in_flight(batch.count, parallel.pp, pp_rank, parallel.vpp)
        if parallel.vpp is not None:  # what is sent and received at once in both directions
            passing += 4 * boundary
        ends, logits = self._last_stage(pp_rank, batch, tokens, backward=True)
        # The logits are gone when the backward pass reaches the layers; the final norm's tensors are not needed either.
        head = ends + logits
        activations = math.ceil(flying / len(chunks) * of_micro_batch)
        moment = max(head, passing)
        return _with(self.idle(pp_rank), activations + moment - min(logits, moment), min(logits, moment))

    def score(self, pp_rank: int, batch: Batch) -> Memory:
        """Return the peak of a pass without gradients."""
        tokens = self._tokens(batch)
        passing = self._exchanged(pp_rank, tokens) + max(
            (layer_passing(self.shape, tokens, layer) for layer in self._layers(pp_rank)),
            default=0,
        )
        ends, logits = self._last_stage(pp_rank, batch, tokens, backward=False)
        moment = max(ends + logits, passing)
        return _with(self.idle(pp_rank), moment - min(logits, moment), min(logits, moment))

    def generate(self, pp_rank: int, rows: int, prompt: int, response: int) -> Memory:
        """Return the peak of generation of ``rows`` responses at once on a data-parallel rank.

        Args:
            pp_rank: the stage.
            rows: responses that are generated at once.
            prompt: tokens of the longest prompt.
            response: tokens of the longest response.
        """
        shape, layers = self.shape, self._layers(pp_rank)
        cache = len(layers) * rows * (prompt + response) * shape.cached * self.size
        tokens = Tokens(
            rows * prompt, rows * prompt, self.size, self.fused
        )  # the first step, without sequence parallel
        mask = rows * prompt * prompt  # for prompts of unequal length
        # With vpp, other stages follow the first chunks of the last one.
        is_end = pp_rank == self.parallel.pp - 1 and not self.parallel.vpp
        sent = 0 if is_end else tokens.size * tokens.local * shape.hidden
        passing = (
            sent
            + mask
            + max(
                (layer_passing(shape, tokens, layer, (1 + self.size) * mask, decoding=True) for layer in layers),
                default=0,
            )
        )
        logits = 4 * _FLOAT * rows * shape.vocabulary * self.parallel.tp if pp_rank == self.parallel.pp - 1 else 0
        moment = max(logits, passing)
        peak = _with(self.idle(pp_rank), moment - min(logits, moment), min(logits, moment))
        return replace(peak, cache=cache)

    def _layers(self, pp_rank: int) -> list[bool]:
        """For every layer of the stage, whether it has experts."""
        return [layer for chunk in layers_of_chunks(self.model, self.parallel, pp_rank) for layer in chunk]

    def _tokens(self, batch: Batch) -> Tokens:
        parallel = self.parallel
        multiple = length_multiple_of(self.model, parallel)
        count = batch.rows * (math.ceil(batch.length / multiple) * multiple) // parallel.cp
        local = count // parallel.tp if parallel.sequence_parallel else count
        return Tokens(count, local, self.size, self.fused)

    def _exchanged(self, pp_rank: int, tokens: Tokens) -> int:
        """Hidden states outside of the layers: the ones sent, or on the last stage the inputs of other chunks."""
        others = (self.parallel.vpp or 0) if pp_rank == self.parallel.pp - 1 else 1
        return tokens.size * tokens.local * self.shape.hidden * others

    def _targets_of_rank(self, batch: Batch) -> int:
        """The most targets of a row on one context-parallel rank: they are the last tokens, in zigzag order."""
        cp = self.parallel.cp
        piece = math.ceil(batch.length / (2 * cp))
        by_piece = [min(max(batch.targets - (2 * cp - 1 - index) * piece, 0), piece) for index in range(2 * cp)]
        return max(by_piece[rank] + by_piece[2 * cp - 1 - rank] for rank in range(cp))

    def _last_stage(self, pp_rank: int, batch: Batch, tokens: Tokens, *, backward: bool) -> tuple[int, int]:
        """Bytes of the final norm and of the hidden states at the targets, and of the logits, on the last stage."""
        if pp_rank != self.parallel.pp - 1:
            return 0, 0
        shape = self.shape
        norm = self.size * tokens.local * shape.hidden
        gathered = self.size * tokens.count * shape.hidden if self.parallel.sequence_parallel else 0
        if self.value_head:
            return norm + gathered + 2 * _FLOAT * tokens.local * shape.hidden, 0
        targets = batch.rows * self._targets_of_rank(batch)
        at_once = min(targets, batch.chunk_tokens or targets)
        chosen = self.size * targets * shape.hidden
        chunks = (self.parallel.vpp or 0) + 1  # whose inputs the stage holds, and the next one's
        received = tokens.size * tokens.local * shape.hidden * chunks if self.parallel.pp > 1 and not backward else 0
        logits = 3 * _FLOAT * at_once * shape.vocabulary
        if self.compiled:
            logits = self.size * at_once * shape.vocabulary * (2 if backward else 1)
            if backward:  # gradients of the output layer's weight, of one chunk and of those before it
                logits += self.size * shape.vocabulary * shape.hidden * (2 if at_once < targets else 1)
        return norm + received + gathered + chosen, logits


def _with(idle: Memory, activations: int, logits: int) -> Memory:
    return replace(idle, activations=activations, logits=logits)


_GATHERED = 20
"""[bytes] For each weight of a rank, at a save for any layout: three values in float32, and one twice on its way."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory of a rank on the stage that needs the most.

    Attributes:
        offloaded: weights and optimizer while other roles use the GPU; page-locked.
        saved: the rank's part of a checkpoint, copied from the GPU and again for the process that writes it.
        gathered: what a save for any layout needs in addition, of a distributed optimizer.
    """

    offloaded: int
    saved: int
    gathered: int


def host_memory(
    config: ActorConfig | CriticConfig | RewardConfig, world_size: int, *, trained: bool, models: int
) -> HostMemory:
    """Return the host memory of the process of a rank.

    Args:
        config: of the role.
        world_size: number of ranks.
        trained: whether it has an optimizer, and is saved.
        models: copies of the weights: 2 for an actor with its reference.

    Raises:
        LayoutError: the axes do not divide the world size.
        ConfigError: the memory of the model or the optimizer cannot be estimated.
    """
    optim = config.optim if trained and not isinstance(config, RewardConfig) else None
    value_head = not isinstance(config, ActorConfig)
    role = PlannedRole(config.model, config.parallel, world_size, optim, value_head=value_head)
    stage = max(range(config.parallel.pp), key=lambda stage: role.idle(stage).total)
    idle, changing, (optimizer, _) = role.idle(stage), role.trained(stage), role.optimizer_state(stage)
    replicas = role.layout.dp * role.layout.cp
    sharded = role.optim is not None and role.optim.distributed_optimizer
    weights = models * idle.parameters
    if config.model.lora is not None:  # a checkpoint has what training changes
        weights = role.size * (changing.dense + changing.expert)
    part = weights // replicas + (optimizer if sharded else optimizer // replicas)
    return HostMemory(
        offloaded=models * idle.parameters + optimizer,
        saved=2 * part if trained else 0,
        gathered=_GATHERED * (changing.dense + changing.expert) if sharded and replicas > 1 else 0,
    )
