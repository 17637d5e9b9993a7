"""A few optimizer steps of a small model on any layout, with Megatron's own schedule and optimizer.

Tests compare what a layout computes with what one process computes from the same seed and the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from parallel_state.layout import ParallelLayout
from parallel_state.megatron import MegatronContext
from tests.workers.full_state import full_state_dict
from workers.config import ModelConfig, ParallelConfig
from workers.model.build import build_model
from workers.zigzag import zigzag_join, zigzag_slice

ROWS, LENGTH = 8, 16
SMALL_GPT = ModelConfig(
    vocab_size=125,
    max_sequence_length=64,
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=128,
)


def new_context(parallel: ParallelConfig) -> MegatronContext:
    """Return the context of these axes over all ranks of torch.distributed."""
    axes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")}
    return MegatronContext(ParallelLayout(world_size=dist.get_world_size(), **axes))


def device() -> torch.device:
    """Return the device of this rank. Do not call it in the process that forks ranks: CUDA does not survive a fork."""
    return torch.device(torch.cuda.current_device())


def batch(step: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels of one global batch, each [ROWS, LENGTH]."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab_size, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Role:
    """A model with its optimizer on one layout; a critic if ``value_head`` is set."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        value_head: bool = False,
        distributed_optimizer: bool = False,
    ) -> None:
        self.model, self.value_head = model, value_head
        self.context = new_context(parallel)
        self.plain_chunks = build_model(model, parallel, self.context, value_head=value_head)
        self.config: Any = self.plain_chunks[0].config
        self.config.calculate_per_token_loss = True
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, average_in_collective=False
        )
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.1,
            clip_grad=1.0,
            adam_eps=1e-4,  # the default amplifies rounding errors of gradients near 0
            use_distributed_optimizer=distributed_optimizer,
        )
        with self.context.activate():
            self.chunks = [DistributedDataParallel(self.config, ddp, chunk) for chunk in self.plain_chunks]
            self.optimizer = get_megatron_optimizer(optimizer, self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def train_step(self, step: int) -> float:
        """Make one optimizer step on the global batch number ``step``; return the norm of the gradient."""
        with self.context.activate():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._run(self._loss, step, forward_only=False)
            _, norm, _ = self.optimizer.step()
        return float(norm)

    def outputs(self, step: int = 0) -> torch.Tensor | None:
        """Return logits or values of the global batch, [ROWS, LENGTH, width]; None except on the last stage."""

        def unchanged(output: torch.Tensor, labels: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
            return output

        with self.context.activate(), torch.no_grad():
            micro_batches = self._run(unchanged, step, forward_only=True, collect_non_loss_data=True)
        if not micro_batches:
            return None
        mine = torch.cat(micro_batches)
        groups = self.context.pg
        if not self.value_head:
            mine = torch.cat(_gathered(mine, groups.tp), -1)
        return torch.cat(_gathered(zigzag_join(_gathered(mine, groups.cp)), groups.dp))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all weights of the whole model by name."""
        return full_state_dict(self.plain_chunks, self.context)

    def _loss(self, output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        if self.value_head:
            output = (output.squeeze(-1) - labels / self.model.vocab_size).square()
        return output.sum(), torch.tensor(output.numel(), dtype=torch.int, device=output.device), {}

    def _run(self, of_output: Callable[..., Any], step: int, forward_only: bool, **schedule: Any) -> Any:
        def forward(batches: Iterator[Any], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            tokens, labels, positions = next(batches)
            output = chunk(tokens, positions, None, labels=None if forward_only or self.value_head else labels)
            return output, lambda output, **how: of_output(output, labels, **how)

        micro_batches = list(self._micro_batches(step))
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=forward_only,
            **schedule,
        )

    def _micro_batches(self, step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        groups = self.context.pg
        tokens, labels = (part.to(device()) for part in batch(step, self.model.vocab_size))
        positions = torch.arange(LENGTH, device=device()).expand_as(tokens)
        whole = (part.chunk(groups.dp.size())[groups.dp.rank()] for part in (tokens, labels, positions))
        mine = [zigzag_slice(part, groups.cp.size(), groups.cp.rank()) for part in whole]
        return zip(*(part.split(1) for part in mine), strict=True)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Over all tensors, which must be the same by name, the largest absolute difference of an element."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
