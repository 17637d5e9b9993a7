"""Rollouts that generate with Megatron: with the model that is trained, or with a copy in another layout."""

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
from workers.generate.prompt_exchange import PromptExchange, consecutive, even_shares
from workers.generate.rollout_protocol import Generated, HeldWeights, PolicyWeights, Prompts
from workers.generate.row_limit import RowLimit, row_bytes
from workers.generate.sampling import Sampling
from workers.router_replay.routers import ModelRouters
from workers.train.pipeline import releasing_inputs, scoring
from workers.weights.fingerprints import shard_fingerprints
from workers.weights.offload import Offload, buffer_tensors, model_tensors
from workers.weights.resharding import Resharding, ReshardingReport
from workers.weights.shards import model_shards


class MegatronRollout:
    """Generates with a model in the layout of that model; each data-parallel rank generates for its own prompts.

    Args:
        chunks: this rank's model chunks, wrapped in DistributedDataParallel or not.
        context: their layout, with cp=1.
        vocab_size: ids from this one on are padding of the vocabulary.
        max_rows: the most rows that are generated at once; 0 means as many as fit into memory.
        memory_fraction: of the free memory that the rows of a pass may take, if ``max_rows`` is 0.
        processes_on_node: processes that share the memory of the host.
        routers: the routers of the chunks, whose choices are returned with the responses. None: no choices are
            returned.
    """

    holds_weights = False

    @classmethod
    def of(
        cls, config: ActorConfig, chunks: Sequence[nn.Module], context: MegatronContext, processes_on_node: int
    ) -> MegatronRollout:
        """Return a rollout with the settings of a policy; the other arguments are passed to the class."""
        return cls(
            chunks,
            context,
            config.model.vocab_size,
            config.rollout.max_rows,
            memory_fraction=config.rollout.memory_fraction,
            processes_on_node=processes_on_node,
            routers=ModelRouters(chunks, context.pg) if config.router_replay == "rollout" else None,
        )

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        context: MegatronContext,
        vocab_size: int,
        max_rows: int = 0,
        *,
        memory_fraction: float = 0.8,
        processes_on_node: int = 1,
        routers: ModelRouters | None = None,
    ) -> None:
        self.chunks = chunks
        self.context = context
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.routers = routers
        self.device = torch.device(torch.cuda.current_device())
        self._fitting = RowLimit(context.pg, self.device, fraction=memory_fraction, processes_on_node=processes_on_node)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """Return this rank's responses; None on all stages but the last."""
        generated = self.responses(prompts.samples(), sampling)
        stages = self.context.pg.pp
        return generated if stages.rank() == stages.size() - 1 else None

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Do nothing and report nothing: the rollout uses the weights of the model."""
        return {}

    def fingerprints(self) -> HeldWeights:
        """Return the fingerprints of the model that generates."""
        return HeldWeights("megatron", shard_fingerprints(model_shards(self.chunks, self.context)))

    def sleep(self) -> int:
        """Free nothing: the memory belongs to the model."""
        return 0

    def wake_up(self) -> None:
        """Do nothing: the memory belongs to the model."""

    def responses(self, samples: Prompts, sampling: Sampling) -> Generated:
        """Generate one response for every row, in passes of as many rows as ``max_rows`` or the memory allows.

        Args:
            samples: at least one row, with one seed per row.
            sampling: how to generate the batch.

        Returns:
            The responses, on every rank; the log-probabilities are 0 on all stages but the last.
        """
        pg = self.context.pg
        chunks = [unwrap_model(chunk) for chunk in self.chunks]
        parts = []
        with self.context.activate(), scoring(chunks), releasing_inputs(chunks), _without_fp8(chunks):
            for rows in even_shares(len(samples.ids), self._passes(samples, sampling)):
                some = _rows_or_first(samples, rows)
                generated = generate(chunks, pg, some, sampling, self.vocab_size, self.device, self.routers)
                parts.append([column[: len(rows)] for column in generated.columns()])
        return Generated.of_columns([torch.cat(column) for column in zip(*parts, strict=True)])

    def _passes(self, samples: Prompts, sampling: Sampling) -> int:
        """The number of passes, the same on all ranks that exchange tokens of experts."""
        rows, most = len(samples.ids), self.max_rows
        if most == 0:
            width = int(samples.attention_mask.sum(1).max())
            one = row_bytes(self.chunks, width, sampling.response_length, self.vocab_size)
            most = self._fitting.of(one, rows)
        passes = torch.tensor(-(-rows // most), device=self.device)
        with_experts = get_model_config(self.chunks[0]).num_moe_experts is not None
        if with_experts and self.context.pg.tp_ep.size() > 1:
            dist.all_reduce(passes, op=dist.ReduceOp.MAX, group=self.context.pg.tp_ep)
        return int(passes)


class ReshardedRollout:
    """Generates with a copy of the weights in another layout, in the same processes.

    The prompts of all data-parallel ranks of training are divided evenly over the data-parallel ranks of this layout,
    for any two numbers of ranks. Each rank of training's last stage gets its own rows back.

    Args:
        rollout: generates with the copy, whose weights are undefined until the first ``update_weights``.
        training: the layout that the prompts come from and the responses return to.

    Attributes:
        last_resharding: cost of the last ``update_weights``; None before the first.
    """

    holds_weights = True

    def __init__(self, rollout: MegatronRollout, training: MegatronContext) -> None:
        self.rollout = rollout
        self.last_resharding: ReshardingReport | None = None
        self._exchange = PromptExchange(training.pg, rollout.context.pg)
        self._resharding: Resharding | None = None
        self._offload = Offload()

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """Return this rank's responses; None on all stages of training but the last."""
        everything, lengths = self._exchange.gather(prompts, sampling.pad_token_id)
        samples = everything.samples()
        data_parallel = self.rollout.context.pg.dp
        shares = even_shares(len(samples.ids), data_parallel.size())
        generated = self.rollout.responses(_rows_or_first(samples, shares[data_parallel.rank()]), sampling)
        shards = consecutive([length * prompts.seeds.size(1) for length in lengths])
        returned = self._exchange.return_responses(generated, shares, shards)
        if returned is None or returned.routed_experts is None:
            return returned
        wider = everything.ids.size(1) - prompts.ids.size(1)
        return returned._replace(routed_experts=returned.routed_experts[:, wider:])

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Update the copy: slices of tensors go directly from the ranks that have them to the ranks that need them.

        Returns:
            ``resharding_seconds``, ``resharding_bytes_sent``, and ``resharding_least_bytes``: the least that could be
            sent.
        """
        if self._resharding is None:
            self._resharding = Resharding(weights.chunks, weights.context, self.rollout.chunks, self.rollout.context)
        report = self.last_resharding = self._resharding.run()
        return {
            "resharding_seconds": report.seconds,
            "resharding_bytes_sent": float(report.bytes_sent),
            "resharding_least_bytes": float(report.least_bytes),
        }

    def fingerprints(self) -> HeldWeights:
        """Return the fingerprints of the copy."""
        return self.rollout.fingerprints()

    def sleep(self) -> int:
        """Free the device memory of the copy, and return how many bytes; the weights are discarded."""
        chunks = self.rollout.chunks
        parts = {"weights": model_tensors(chunks), "buffers": buffer_tensors(chunks)}
        return self._offload.offload(parts, tuple(parts), discard=["weights"])

    def wake_up(self) -> None:
        """Allocate the device memory again; the weights are undefined until the next ``update_weights``."""
        self._offload.reload()


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


def _rows_or_first(samples: Prompts, rows: range) -> Prompts:
    """The ``rows``, or the first row if there are none, since every rank must take part in a collective."""
    index = slice(rows.start, rows.stop) if rows else slice(0, 1)
    return Prompts(*(column[index] for column in samples))
