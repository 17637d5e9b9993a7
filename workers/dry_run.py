"""The calls of a role of a run, with its own worker class and losses, on a rank whose device has no memory."""

from __future__ import annotations

import gc
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

from mcontroller.data.batch import DataProto
from parallel_state.dry_run import transformer_engine
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.errors import DryRunError
from parallel_state.dry_run.memory import storage_of
from parallel_state.dry_run.outcome import Outcome, Use
from parallel_state.dry_run.run import dry_run_of
from parallel_state.dry_run.training import begin, free, initialize_state, used
from workers.columns import ROUTED_EXPERTS
from workers.config import ModelConfig, OptimConfig
from workers.config.fit import needs_engine
from workers.config.roles import MicroBatchSize
from workers.model.gpu_defaults import defaults_with
from workers.model.transformer_config import checked_fields
from workers.router_replay.routers import ModelRouters
from workers.verify.roles import ModelRole, rows_of_role
from workers.verify.sizes import one_layer_a_stage
from workers.weights.offload import Sleepable
from workers.weights.whole_tensors import PolicyWeights, Receivers

_PRECISION = (
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""What only Transformer Engine's Adam can do, and the types of its state."""
_IN_HOST_MEMORY = ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")


@dataclass(frozen=True)
class RoleCall:
    """A call of a role, with rows of full length.

    Attributes:
        role: the role.
        method: the call; ``rollout_weights`` sends the weights to an engine beside the worker.
        prompt: tokens of a prompt.
        response: tokens of a response.
        micro_batches: of a data-parallel rank; None: no more than change the peak.
        row_count: rows of a micro-batch; None: of the configuration.
        receivers: the ranks that put whole weights together for engines.
    """

    role: ModelRole
    method: str
    prompt: int
    response: int
    micro_batches: int | None = None
    row_count: int | None = None
    receivers: Receivers = "all"

    def small(self) -> RoleCall | None:
        """Return the call with one layer on each stage, short rows, and as few micro-batches as the layout allows.

        None if layers are written as a pattern of stages, or named by their numbers.
        """
        model, layout = self.role.config.model, self.role.variant.layout
        if model.hybrid_layer_pattern is not None or model.names_layers:
            return None
        config = replace(self.role.config, model=one_layer_a_stage(model, layout))
        micro_batches, tokens = layout.pp if layout.vpp else 1, 8 * layout.tp * layout.cp
        prompt, response = min(self.prompt, tokens), min(self.response, tokens)
        role = replace(self.role, config=config)
        return replace(self, role=role, micro_batches=micro_batches, prompt=prompt, response=response, row_count=1)

    @property
    def needs_every_rank(self) -> bool:
        """Whether parts of the weights that one rank sends are on ranks that are in no pipeline with it."""
        layout = self.role.variant.layout
        return self.method == "rollout_weights" and (layout.tp > 1 or layout.etp not in (None, 1))

    def outcome(self, **chosen: Any) -> Outcome:
        """Make the call as ``dry_run_of`` does, with its arguments; on all ranks, a small one of the role's first call.

        A forward pass to score is part of an update.
        """
        is_first = [self.method] == [*self.role.updates, *self.role.scores][:1]
        return dry_run_of(self, self.role.variant, small=self.small() if is_first else None, **chosen)

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of a micro-batch, and the number of micro-batches."""
        config, layout, is_update = self.role.config, self.role.variant.layout, self.method in self.role.updates
        size: MicroBatchSize = config.update_size if is_update else config.scoring_size
        rows = max(1, size.tokens // (self.prompt + self.response)) if size.tokens else max(size.rows, 1)
        rows = self.row_count or rows
        if self.micro_batches is not None:
            return rows, self.micro_batches
        # one more than a stage has in flight; without a backward pass, one that is sent while the next is computed
        count = layout.pp + 1 if is_update else 2
        if is_update and (mini_batch := self._mini_batch) is not None:
            count = min(count, math.ceil(mini_batch / layout.dp / rows))
        if layout.vpp:
            count = math.ceil(count / layout.pp) * layout.pp
        return rows, count

    @property
    def _mini_batch(self) -> int | None:
        """Rows of a mini-batch over all ranks; None if a critic, which does not know ``n``, counts it in prompts."""
        config = self.role.config
        if not config.ppo_mini_batch_prompts:
            return int(config.ppo_mini_batch_size)
        return config.ppo_mini_batch_prompts * config.rollout.n if hasattr(config, "rollout") else None

    def __call__(self, mode: CountingMode) -> Use:
        """Build the worker of this rank, make the call, and return what was used."""
        config, layout = self.role.config, self.role.variant.layout
        mode.memory.kind = "parameters"
        rows, count = self.rows
        mode.transformer_engine = config.model.transformer_impl != "local"
        fields: dict[str, Any] = {"gradient_accumulation_fusion": False}
        if mode.transformer_engine:
            fields = defaults_with(config.model, with_engine=True)
        transformer = fields | config.model.transformer
        transformer_engine.check_counted(transformer)
        model = replace(config.model, transformer_impl="local", hf_path=None, transformer=transformer)
        if mode.transformer_engine:
            _check_counted(model)
        changes: dict[str, Any] = {"model": model}
        on_host = unsaved = 0.0
        if hasattr(config, "optim"):
            optim, on_host = _on_device(config.optim.resolved(layout.dp * layout.cp, on_gpu=True))
            unsaved = _unsaved(config.optim)
            changes |= {"optim": optim, "ppo_epochs": 1}
        if hasattr(config, "rollout"):
            lengths = {"prompt_length": self.prompt, "response_length": self.response}
            changes["rollout"] = replace(config.rollout, **lengths)
        worker = self.role.worker(rows * count * layout.dp, **changes)
        with worker.call_context("init_model"):
            worker.init_model()
        _classify(mode, worker)
        kept = transformer_engine.workspace(worker.state.model) if mode.transformer_engine else []
        batch = rows_of_role(0, config, rows * count, self.prompt, self.response)
        if hasattr(config, "rollout") and worker.router_replay.routers is not None:
            batch = _with_experts(batch, worker.router_replay.routers)
        if self.method == "generate_sequences":
            columns = {name: batch.tensors()[name][:, : self.prompt] for name in ("input_ids", "attention_mask")}
            batch = DataProto.from_dict(columns, meta_info={"n": 1, "eos_token_id": [], "pad_token_id": 0})
        gc.collect()
        unneeded = _unneeded(worker, self.method, on_host)
        idle = begin(mode)
        with worker.call_context(self.method):
            if self.method == "rollout_weights":
                _send(worker.rollout_weights(), self.receivers)
            else:
                getattr(worker, self.method)(batch)
        del kept
        models = [*worker.state.model, *getattr(worker, "reference", ())]
        use = used(mode, idle, models)
        free(models)
        use = replace(_without_host_memory(use, unsaved), on_host=0)
        return replace(_without_host_memory(use, on_host), unneeded=unneeded)


def _check_counted(model: ModelConfig) -> None:
    """Raise DryRunError if Transformer Engine's layers compute something that their counterparts here do not count."""
    for key, value in needs_engine(model, on_gpu=False).items():
        if key.rpartition(".")[2] not in transformer_engine.counted_fields():
            raise DryRunError(
                f"{key}={value!r}: a dry run does not count what layers of Transformer Engine store for it; leave it "
                "out to count the rest",
                field=key,
                value=value,
            )


def _send(weights: PolicyWeights, receivers: Receivers) -> None:
    """Read all weights as engines do: two buckets exist at a time."""
    buckets = deque[torch.Tensor](maxlen=2)

    def memory(nbytes: int) -> torch.Tensor:
        buckets.append(torch.empty(nbytes, dtype=torch.uint8, device=torch.cuda.current_device()))
        return buckets[-1]

    for _ in weights.buckets(memory, receivers):
        pass


def _with_experts(batch: DataProto, routers: ModelRouters) -> DataProto:
    """Return the batch with equal shares of experts for the routers to choose."""
    shape = *batch.tensors()["input_ids"].shape, routers.topk
    experts = (torch.arange(math.prod(shape)) % routers.experts).view(shape).to(routers.dtype)
    return batch.with_tensors({ROUTED_EXPERTS: experts[:, :, None].expand(-1, -1, routers.layers, -1).contiguous()})


def _on_device(optim: OptimConfig) -> tuple[OptimConfig, float]:
    """Return the optimizer with all its state on the device, and the share of it that is in host memory.

    Megatron's optimizer for both allocates the host's part, which may be larger than the memory of this machine.
    """
    megatron = {name: value for name, value in optim.megatron.items() if name not in _IN_HOST_MEMORY + _PRECISION}
    share = optim.megatron.get("optimizer_offload_fraction", 0.0) if optim.megatron.get("optimizer_cpu_offload") else 0
    return replace(optim, megatron=megatron), float(share)


def _unsaved(optim: OptimConfig) -> float:
    """Return the share of the optimizer's state that does not exist in the precision of Transformer Engine's Adam."""
    given = checked_fields(OptimizerConfig, optim.megatron, "optim.megatron")
    if not given.get("use_precision_aware_optimizer"):
        return 0.0
    sizes = [given.get(name, torch.float32).itemsize for name in _PRECISION[2:]]
    remainders = torch.bfloat16.itemsize if given.get("store_param_remainders", True) else 0  # beside the weights
    return 1 - (sum(sizes) - remainders) / (len(sizes) * torch.float32.itemsize)


def _without_host_memory(use: Use, share: float) -> Use:
    """Return what was used without a share of the optimizer's state, all of which exists during the whole call."""
    on_host = int(share * use.idle.get("optimizer", 0))
    idle, by_kind = dict(use.idle), dict(use.by_kind)
    for kinds in (idle, by_kind) if on_host else ():
        kinds["optimizer"] -= on_host
    return replace(use, idle=idle, by_kind=by_kind, peak=use.peak - on_host, on_host=on_host)


def _unneeded(worker: Any, method: str, on_host: float) -> int:
    """Return the bytes of the parts of a worker that a method does not compute with.

    Args:
        worker: the worker.
        method: the method.
        on_host: the share of the optimizer's state that is in host memory anyway.
    """
    parts, counted, unneeded = worker.offloader.parts(), set[int](), 0.0
    needed = worker.offloader.needs.get(method, parts)
    for part, tensors in parts.items():
        for tensor in () if isinstance(tensors, Sleepable) else tensors:
            storage = storage_of(tensor)
            if storage is None or id(storage) in counted:
                continue
            counted.add(id(storage))
            if part not in needed:
                unneeded += storage.size * (1 - on_host if part == "optimizer" else 1)
    return int(unneeded)


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
