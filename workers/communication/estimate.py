"""Bytes that the ranks of a layout communicate in a training step, from its configuration. Nothing runs.

The step is ``update_sft``: the gradients of the micro-batches, one optimizer step, the metrics. Counted is what ranks
pass to the operations, as ``parallel_state.simulated.CommunicationTrace`` counts it, in groups of several ranks. The
formulas follow megatron-core: ``tensor_parallel/layers.py`` and ``mappings.py``, ``finalize_model_grads.py``,
``param_and_grad_buffer.py``, ``token_dispatcher.py``, and Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", for sequence parallelism.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcontroller.errors import ConfigError
from parallel_state.topology import Topology
from workers.config import ActorConfig
from workers.config.fit import length_multiple_of
from workers.config.optim import DDP_DEFAULTS
from workers.memory.parameters import Shape, count_parameters, layers_of_chunks

_FLOAT, _INT, _DOUBLE = 4, 8, 8
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_METRICS = 4  # numbers of a report of update_sft: loss, entropy, tokens, count of the loss
_ROWS = 3  # three counts of each shard's rows: with loss, in no mini-batch, in the only mini-batch
_AGREEMENT = (8, 4)  # bytes of a pickled None and of its length, see parallel_state.agreement

# What a configuration adds to the communication that is not counted, and the values without an effect.
_NOT_COUNTED: dict[str, tuple[Any, ...]] = {
    "recompute_granularity": (None,),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "moe_z_loss_coeff": (None, 0),
    "cp_comm_type": (None,),
    "fp8": (None,),
}


@dataclass(frozen=True)
class StepRows:
    """The rows of a training step.

    Attributes:
        rows: rows of all data-parallel ranks.
        length: tokens of each row.
        targets: tokens of each row that are trained on.
    """

    rows: int
    length: int
    targets: int


@dataclass(frozen=True)
class Traffic:
    """The bytes that all ranks pass to one operation on one kind of group.

    Attributes:
        axis: the axes that the members of the group differ on, such as ``"tp"`` or ``"cp-dp"``.
        operation: its name in torch.distributed.
        group: Megatron's name of the group.
        nbytes: the bytes of all ranks.
    """

    axis: str
    operation: str
    group: str
    nbytes: int


def communication_of_step(config: ActorConfig, world_size: int, step: StepRows) -> list[Traffic]:
    """Return the bytes of a training step by axis, operation and group, the most bytes first.

    Args:
        config: the model, its axes and its optimizer.
        world_size: number of ranks.
        step: the rows.

    Raises:
        LayoutError: the axes do not divide the world size.
        ConfigError: the rows do not fill equal micro-batches, or a setting has communication that is not counted; the
            error names it.
    """
    counted = _Step(config, world_size, step)
    for pp_rank in range(config.parallel.pp):
        counted.add_stage(pp_rank)
    counted.add_whole_step()
    items = sorted(counted.totals.items(), key=lambda item: (-item[1], item[0]))
    return [Traffic(*key, nbytes) for key, nbytes in items]


class _Step:
    """The sums of a step; sizes are of one rank and one micro-batch."""

    def __init__(self, config: ActorConfig, world_size: int, step: StepRows) -> None:
        parallel = self.parallel = config.parallel
        self.layout = parallel.layout(world_size)
        optim = config.optim.resolved(self.layout.dp * self.layout.cp, on_gpu=True)
        config = replace(config, optim=optim)
        self.config, self.world_size = config, world_size
        self.topology = Topology.from_layout(self.layout)
        self.shape = Shape(config.model, parallel)
        _check(config, self.shape)
        self.totals: Counter[tuple[str, str, str]] = Counter()
        micro = config.ppo_micro_batch_size
        rows, rest = divmod(step.rows, self.layout.dp)
        self.count, left = divmod(rows, micro)
        if rest or left or not self.count or (parallel.vpp and self.count % parallel.pp):
            raise ConfigError(
                f"{step.rows} rows on {self.layout.dp} data-parallel ranks; expected the same number of full "
                f"micro-batches of {micro} rows on each"
                + (f", a multiple of {parallel.pp} under the interleaved schedule" if parallel.vpp else ""),
                key="ppo_micro_batch_size",
                value=micro,
            )
        multiple = length_multiple_of(config.model, parallel)
        length = -(-step.length // multiple) * multiple
        self.targets = micro * step.targets
        self.tokens = micro * length // parallel.cp
        self.split = parallel.tp if parallel.sequence_parallel else 1
        self.size = _SIZES[config.model.dtype]
        self.whole = self.tokens * self.shape.hidden * self.size
        self.part = self.whole // self.split
        self.gradient = _FLOAT if (DDP_DEFAULTS | config.ddp)["grad_reduce_in_fp32"] else self.size

    def add(self, axes: Sequence[str], operation: str, group: str, nbytes: float, ranks: int) -> None:
        """Add the bytes of each of some ranks; nothing for groups of one rank."""
        sizes = self.topology.sizes
        expert = group.startswith("EXPERT")
        grid = self.topology.expert_axes if expert else self.topology.dense_axes
        axis = "-".join(each for each in grid if each in axes and sizes[each] > 1)
        if axis and nbytes:
            self.totals[axis, operation, group] += round(nbytes * ranks)

    def add_stage(self, pp_rank: int) -> None:
        """Add what the ranks of one pipeline stage communicate."""
        ranks, passes = self.world_size // self.parallel.pp, self.count * self.world_size // self.parallel.pp
        chunks = layers_of_chunks(self.config.model, self.parallel, pp_rank)
        layers = [with_experts for chunk in chunks for with_experts in chunk]
        blocks = 2 * len(layers) - sum(layers)  # attention and MLPs; experts are not divided over tp
        self._add_tensor_parallel(pp_rank, blocks, passes)
        self._add_context_parallel(len(layers), passes)
        self._add_experts(sum(layers), passes)
        self._add_gradients(pp_rank, layers, ranks)

    def _add_tensor_parallel(self, pp_rank: int, blocks: int, passes: int) -> None:
        first, last = pp_rank == 0, pp_rank == self.parallel.pp - 1
        name = "TENSOR_MODEL_PARALLEL_GROUP"
        if self.parallel.sequence_parallel:
            # forward: gather, scatter; backward: gather the gradient and, for the weights' gradient, the input; scatter
            self.add(["tp"], "all_gather_into_tensor", name, (3 * blocks + first + last) * self.part, passes)
            self.add(["tp"], "reduce_scatter_tensor", name, (2 * blocks + first) * self.whole, passes)
        else:
            self.add(["tp"], "all_reduce", name, (2 * blocks + first) * self.whole, passes)
        if last:  # of each target: a maximum and three sums, and the gradient of its hidden state
            target = 4 * _FLOAT + self.shape.hidden * self.size
            self.add(["tp"], "all_reduce", name, target * self.targets / self.parallel.cp, passes)

    def _add_context_parallel(self, layers: int, passes: int) -> None:
        """Keys and values are gathered, and the gradients of all are scattered."""
        keys, name = self.tokens * self.shape.keys * self.size, "CONTEXT_PARALLEL_GROUP"
        self.add(["cp"], "all_gather_into_tensor", name, 2 * layers * keys, passes)
        self.add(["cp"], "reduce_scatter_tensor", name, 2 * layers * keys * self.parallel.cp, passes)

    def _add_experts(self, layers: int, passes: int) -> None:
        """Tokens go to their experts and back, and their gradients too; the probabilities go one way."""
        config = self.shape.config
        if layers:
            counts = config.num_moe_experts * _INT
            name = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
            self.add(["etp", "ep"], "all_gather_into_tensor", name, layers * counts, passes)
            sent = self.tokens // self.split * config.moe_router_topk
            token = 2 * self.shape.hidden * self.size + _FLOAT
            self.add(["ep"], "all_to_all_single", "EXPERT_MODEL_PARALLEL_GROUP", 2 * layers * sent * token, passes)

    def _add_gradients(self, pp_rank: int, layers: Sequence[bool], ranks: int) -> None:
        model, shape = self.config.model, self.shape
        count = count_parameters(model, self.parallel, pp_rank, trained=True)
        self._add_buffer(["dp", "cp"], "DATA_PARALLEL_GROUP_WITH_CP", count.dense, self._padding(layers), ranks)
        self._add_buffer(["edp"], "EXPERT_DATA_PARALLEL_GROUP", count.expert, 0, ranks)
        if model.lora is not None:
            return
        if self.parallel.sequence_parallel:  # parameters that every tp rank applies to its part of the sequence
            last = pp_rank == self.parallel.pp - 1
            norms = (2 * len(layers) + last) * (2 if shape.config.normalization == "LayerNorm" else 1) * shape.hidden
            routers = sum(layers) * shape.hidden * (shape.config.num_moe_experts or 0)
            self.add(["tp"], "all_reduce", "TENSOR_MODEL_PARALLEL_GROUP", (norms + routers) * self.gradient, ranks)
        if model.tie_embeddings and pp_rank in (0, self.parallel.pp - 1):
            embedding = shape.vocabulary * shape.hidden * self.gradient
            self.add(["pp"], "all_reduce", "EMBEDDING_GROUP", embedding, ranks)

    def _padding(self, layers: Sequence[bool]) -> int:
        """Elements that align each parameter to 64, in a buffer of the distributed optimizer."""
        experts = self.shape.config.num_moe_experts or 0
        norms = (2 * len(layers) + 1) * (-self.shape.hidden % 64)
        return norms + sum(layers) * (-(experts * self.shape.hidden) % 64)

    def _add_buffer(self, axes: Sequence[str], group: str, parameters: int, padding: int, ranks: int) -> None:
        if not self.config.optim.distributed_optimizer:
            self.add(axes, "all_reduce", group, parameters * self.gradient, ranks)
            return
        members = math.prod(self.topology.sizes[axis] for axis in axes)
        unit = math.lcm(members, 128)
        padded = -(-(parameters + padding) // unit) * unit if parameters else 0
        optimizers = 2 if self.shape.config.num_moe_experts else 1  # each gathers the weights of all buffers
        self.add(axes, "reduce_scatter_tensor", group, padded * self.gradient, ranks)
        self.add(axes, "all_gather_into_tensor", group, padded / members * self.size * optimizers, ranks)

    def add_whole_step(self) -> None:
        """Add the transfers between stages, and what all ranks communicate once."""
        self._add_transfers()
        every, dense = self.world_size, self.topology.dense_axes
        data = "DATA_PARALLEL_GROUP_WITH_CP"
        self.add(["pp"], "broadcast", "PIPELINE_MODEL_PARALLEL_GROUP", _DOUBLE, every)  # the count of the loss
        self.add(["pp"], "broadcast", "PIPELINE_MODEL_PARALLEL_GROUP", 2 * _METRICS * _DOUBLE, every)
        self.add(["dp", "cp"], "all_reduce", data, _DOUBLE + 2 * _METRICS * _DOUBLE, every)
        self.add(["dp"], "all_reduce", "DATA_PARALLEL_GROUP", self.layout.dp * _ROWS * _INT, every)
        self.add(["dp"], "all_gather", "DATA_PARALLEL_GROUP", sum(_AGREEMENT), every)
        if self.config.optim.distributed_optimizer:  # the norm of the gradients
            self.add(dense, "all_reduce", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", _FLOAT, every)
            return
        self.add(["tp", "pp"], "all_reduce", "MODEL_PARALLEL_GROUP", _FLOAT, every)
        if self.shape.config.num_moe_experts:
            name = "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
            self.add(["etp", "ep", "pp"], "all_reduce", name, _FLOAT, every)

    def _add_transfers(self) -> None:
        """Hidden states go over each boundary of chunks, and their gradients back."""
        parallel, name = self.parallel, "PIPELINE_MODEL_PARALLEL_GROUP"
        boundaries = parallel.pp * (parallel.vpp or 1) - 1
        nbytes = 2 * boundaries * self.count * self.part
        pipelines = self.world_size // parallel.pp
        if parallel.vpp and parallel.pp == 2:  # one direction has a separate group, of all ranks
            for operation in ("send", "recv"):
                self.add(["pp"], operation, name, nbytes / 2, pipelines)
                self.add(self.topology.dense_axes, operation, "default_pg", nbytes / 2, pipelines)
            return
        for operation in ("send", "recv"):
            self.add(["pp"], operation, name, nbytes, pipelines)


def _check(config: ActorConfig, shape: Shape) -> None:
    """Raise ConfigError for a setting whose communication is not counted."""
    parallel, transformer = config.parallel, shape.config
    for name, neutral in _NOT_COUNTED.items():
        if getattr(transformer, name, neutral[0]) not in neutral:
            raise _not_counted(f"model.transformer.{name}", getattr(transformer, name), f"{neutral[0]!r}")
    balancing = transformer.moe_router_load_balancing_type
    if transformer.num_moe_experts and balancing != "none" and transformer.moe_aux_loss_coeff:
        raise _not_counted("model.transformer.moe_router_load_balancing_type", balancing, "'none'")
    if transformer.num_moe_experts and (parallel.tp if parallel.etp is None else parallel.etp) > 1:
        raise _not_counted("parallel.etp", parallel.etp, "1")
    if config.ppo_max_tokens_per_micro_batch:
        raise _not_counted("ppo_max_tokens_per_micro_batch", config.ppo_max_tokens_per_micro_batch, "0")
    extra = transformer.add_bias_linear or transformer.add_qkv_bias or transformer.qk_layernorm
    if extra and (parallel.sequence_parallel or config.optim.distributed_optimizer):
        raise _not_counted("model.transformer", "biases or norms of queries", "none of them")
    if config.optim.optimizer != "adam" or config.optim.megatron:
        raise _not_counted("optim.optimizer", config.optim.optimizer, "'adam' without optim.megatron")
    if config.model.dtype not in ("float32", "bfloat16"):
        raise _not_counted("model.dtype", config.model.dtype, "'float32' or 'bfloat16'")


def _not_counted(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"the communication of {key}={value!r} is not counted; expected {expected}", key=key, value=value
    )
