"""Megatron's generation: the reference engine, with the model that is trained, in the layout of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model
from torch import nn

from parallel_state.megatron import MegatronContext
from workers.config import ActorConfig
from workers.generate.decoding import generate
from workers.generate.rollout_protocol import Generated, Prompts, Rollout
from workers.generate.sampling import Sampling
from workers.router_replay.routers import ModelRouters
from workers.schedule import releasing_inputs, scoring
from workers.weights.whole_tensors import PolicyWeights


class MegatronRollout(Rollout):
    """Generates with the model of a policy; each data-parallel rank generates for its own prompts.

    Args:
        config: of the actor.
        chunks: this rank's model chunks, wrapped in DistributedDataParallel or not.
        context: their layout, with cp=1.
    """

    holds_weights = False

    def __init__(self, config: ActorConfig, chunks: Sequence[nn.Module], context: MegatronContext) -> None:
        self.chunks, self.context = chunks, context
        self._vocab_size, self._max_rows = config.model.vocab_size, config.rollout.max_rows
        self._routers = ModelRouters(chunks, context.pg) if config.router_replay == "rollout" else None
        self._device = torch.device(torch.cuda.current_device())

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """Return this rank's responses, which are generated ``max_rows`` at a time; None on all stages but the last."""
        pg, samples = self.context.pg, prompts.samples()
        chunks = [unwrap_model(chunk) for chunk in self.chunks]
        index = torch.arange(len(samples.ids))
        passes = []
        with self.context.activate(), scoring(chunks), releasing_inputs(chunks), _without_fp8(chunks):
            for rows in index.tensor_split(self._passes(len(index))):
                # A rank without rows in a pass generates one, which is dropped: it takes part in the collectives.
                some = Prompts(*(column[rows if len(rows) else index[:1]] for column in samples))
                generated = generate(chunks, pg, some, sampling, self._vocab_size, self._device, self._routers)
                passes.append([column[: len(rows)] for column in generated.columns()])
        if pg.pp.rank() != pg.pp.size() - 1:
            return None
        return Generated.of_columns([torch.cat(column) for column in zip(*passes, strict=True)])

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Do nothing and report nothing: the rollout uses the weights of the model."""
        return {}

    def _passes(self, rows: int) -> int:
        """Return the number of passes, the same on all ranks that exchange tokens of experts."""
        passes = torch.tensor(-(-rows // self._max_rows), device=self._device)
        with_experts = get_model_config(self.chunks[0]).num_moe_experts is not None
        if with_experts and self.context.pg.tp_ep.size() > 1:
            dist.all_reduce(passes, op=dist.ReduceOp.MAX, group=self.context.pg.tp_ep)
        return int(passes)


@contextlib.contextmanager
def _without_fp8(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute in the model's dtype: fp8 multiplies blocks of tokens, which one new token per row does not fill."""
    kept = [(config, config.fp8) for config in map(get_model_config, chunks)]
    for config, _ in kept:
        config.fp8 = None
    try:
        yield
    finally:
        for config, fp8 in kept:
            config.fp8 = fp8
