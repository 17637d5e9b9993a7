"""Megatron's own generation as a rollout: with the model that is trained, or with a copy in a layout of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from parallel_state.megatron import MegatronContext
from workers.generate.decoding import generate
from workers.generate.rollout import Generated, PolicyWeights, Prompts
from workers.generate.row_exchange import RowExchange, consecutive, even_shares
from workers.generate.sampling import Sampling
from workers.train.pipeline import scoring
from workers.weights.offload import Offload, model_tensors
from workers.weights.refit import Refit, RefitReport

__all__ = ["MegatronRollout", "RefitRollout"]


class MegatronRollout:
    """Generates with the given model where it is: every data-parallel rank for its own prompts.

    Args:
        chunks, context: this rank's model chunks, wrapped or not, and their layout, with cp=1.
        vocab_size: ids from here up are padding of the vocabulary.
        max_rows: the most rows that are generated at once; 0 is all.
    """

    holds_weights = False

    def __init__(self, chunks: Sequence[Any], context: MegatronContext, vocab_size: int, max_rows: int = 0) -> None:
        self.chunks = chunks
        self.context = context
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.device = torch.device(torch.cuda.current_device())

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """This rank's responses; None off the last stage."""
        made = self.responses(prompts.samples(), sampling)
        stages = self.context.pg.pp
        return made if stages.rank() == stages.size() - 1 else None

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Nothing to do: they are those of the model."""
        return {}

    def sleep(self) -> int:
        return 0

    def wake_up(self) -> None:
        pass

    def responses(self, samples: Prompts, sampling: Sampling) -> Generated:
        """One response to every row of ``samples``, at least one, in passes of at most ``max_rows``."""
        pg = self.context.pg
        chunks = [unwrap_model(chunk) for chunk in self.chunks]
        parts = []
        with self.context.activate(), scoring(chunks), _without_fp8(chunks):
            for rows in even_shares(len(samples.ids), self._passes(len(samples.ids))):
                some = some_rows(samples, rows)
                on_device = Prompts(*(column.to(self.device) for column in some))
                made = generate(chunks, pg, on_device, sampling, self.vocab_size)
                parts.append([column[: len(rows)] for column in made])
        return Generated(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _passes(self, rows: int) -> int:
        """How many: as many on every rank that the experts' exchange waits for."""
        passes = torch.tensor(-(-rows // (self.max_rows or rows)), device=self.device)
        with_experts = get_model_config(self.chunks[0]).num_moe_experts is not None
        if with_experts and self.context.pg.tp_ep.size() > 1:
            dist.all_reduce(passes, op=dist.ReduceOp.MAX, group=self.context.pg.tp_ep)
        return int(passes)


class RefitRollout:
    """Generates with a copy of the weights in a layout of its own, in the same processes.

    The prompts of all data-parallel ranks of training are shared out evenly over those of this layout, whatever their
    numbers, and each rank of training's last stage is given its own rows back.

    Args:
        rollout: the copy; its weights are those of the first ``update_weights``.
        training: the layout that prompts come in, and responses return to.

    Attributes:
        last_refit: what the last ``update_weights`` cost.
    """

    holds_weights = True

    def __init__(self, rollout: MegatronRollout, training: MegatronContext) -> None:
        self.rollout = rollout
        self.last_refit: RefitReport | None = None
        self._exchange = RowExchange(training.pg, rollout.context.pg)
        self._refit: Refit | None = None
        self._offload = Offload()

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generated | None:
        """This rank's responses; None off the last stage of training."""
        everything, lengths = self._exchange.gather(prompts, sampling.pad_token_id)
        samples = everything.samples()
        data_parallel = self.rollout.context.pg.dp
        shares = even_shares(len(samples.ids), data_parallel.size())
        made = self.rollout.responses(some_rows(samples, shares[data_parallel.rank()]), sampling)
        asked = consecutive([length * prompts.seeds.size(1) for length in lengths])
        return self._exchange.hand_back(made, shares, asked)

    def update_weights(self, weights: PolicyWeights) -> Mapping[str, float]:
        """Refit the copy: slices go straight from the ranks that have them to those that need them."""
        if self._refit is None:
            self._refit = Refit(weights.chunks, weights.context, self.rollout.chunks, self.rollout.context)
        report = self.last_refit = self._refit.run()
        return {
            "refit_seconds": report.seconds,
            "refit_bytes_sent": float(report.bytes_sent),
            "refit_least_bytes": float(report.least_bytes),
        }

    def sleep(self) -> int:
        return self._offload.offload({"weights": model_tensors(self.rollout.chunks)}, ["weights"], discard=["weights"])

    def wake_up(self) -> None:
        self._offload.reload()


@contextlib.contextmanager
def _without_fp8(chunks: Sequence[Any]) -> Iterator[None]:
    """fp8 multiplies blocks of tokens, and one new token a row is none: generation computes in the model's dtype."""
    kept = [(chunk.config, chunk.config.fp8) for chunk in chunks]
    for config, _ in kept:
        config.fp8 = None
    try:
        yield
    finally:
        for config, fp8 in kept:
            config.fp8 = fp8


def some_rows(samples: Prompts, rows: range) -> Prompts:
    """The ``rows``; the first row where there are none, since every rank takes part in a collective computation."""
    index = slice(rows.start, rows.stop) if rows else slice(0, 1)
    return Prompts(*(column[index] for column in samples))
