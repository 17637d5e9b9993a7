"""Generate canaries with an engine, and score them with the policy, after every update of the engine's weights."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mcontroller.data.protocol import DataProto
from parallel_state.agreement import all_gather_values
from parallel_state.megatron import MegatronContext
from workers.config import ActorConfig
from workers.generate.canaries import CanaryScores, CanaryVerdict, judge
from workers.generate.rollout_protocol import Generated, Prompts, Rollout
from workers.generate.sampling import Sampling
from workers.weights.not_arrived import CanariesNotFollowed

__all__ = ["CanaryCheck"]

logger = logging.getLogger(__name__)

_PROMPT_LENGTH, _RESPONSE_LENGTH = 160, 16  # a prompt has more than one block of vLLM's prefix cache, on a CPU too
_SEED = 19
_ENOUGH = 0.25  # share of the tokens that must be comparable to keep an earlier reference

_Scores = Callable[[DataProto, str], Tensor | None]


class CanaryCheck:
    """The comparison of an engine's change with the policy's on fixed prompts, after every update.

    The prompts are random tokens, sampled with fixed seeds at temperature 1 by the engine's ``generate``, the same way
    as any batch. So it needs nothing else of an engine, and a prefix cache is read as it is for any prompt. Each
    data-parallel shard, whose engine may be a process of its own, is judged by itself.

    Args:
        config: of the policy and its rollout.
        context: the layout of the policy.
        scores: returns the policy's log-probabilities and entropies ``[2, rows, response]`` for a batch as
            ``compute_log_prob`` gets and the name of the method that needs them; None off the last stage. It is called
            on every rank.
    """

    def __init__(self, config: ActorConfig, context: MegatronContext, scores: _Scores) -> None:
        rollout, vocab_size = config.rollout, config.model.vocab_size
        generator = torch.Generator().manual_seed(_SEED)
        length = min(rollout.prompt_length, _PROMPT_LENGTH)
        ids = torch.randint(0, vocab_size, (rollout.canary_prompts, length), generator=generator)
        seeds = torch.randint(1 << 62, (rollout.canary_prompts, 1), generator=generator)
        self._prompts = Prompts(ids, torch.ones_like(ids), seeds)
        self._length = min(rollout.response_length, _RESPONSE_LENGTH)
        self._context = context
        self._policy_scores = scores
        self._last: CanaryScores | None = None
        self._reference: CanaryScores | None = None  # an earlier one, if changes since then could not be judged

    def read_prompts(self, rollout: Rollout) -> None:
        """Let the engine read the prompts before an update, so that its prefix cache has their old keys and values."""
        rollout.generate(self._prompts, self._sampling(1))

    def verify(self, rollout: Rollout, update: int) -> Mapping[str, float]:
        """Compare the changes since the last update, and since the last one that was judged (a collective).

        Args:
            rollout: the engine, after ``update_weights``.
            update: the number of the update, for the error.

        Returns:
            ``canary_judged``: 1 if the weights are known to have arrived, 0 if the change was too small to say;
            ``canary_lost``, ``canary_error`` and ``canary_mismatch``: see ``CanaryVerdict``; those of the shard that is
            known least. ``verify_seconds``: of the slowest rank.

        Raises:
            CanariesNotFollowed: on every rank.
        """
        start = time.perf_counter()
        scores = self._scores(rollout)
        verdict = None if scores is None else self._verdict(scores)
        gathered = all_gather_values((self._context.pg.dp.rank(), verdict, time.perf_counter() - start))
        verdicts = {shard: found for shard, found, _ in gathered if found is not None}
        _raise_if_lost(update, verdicts)
        self._last = scores
        if scores is not None and self._is_next_reference(scores, verdict):
            self._reference = scores
        worst = max(verdicts.values(), key=lambda found: found.error)
        judged = all(found.arrived for found in verdicts.values())
        if not judged:
            logger.info("update %d: the policy changed too little to judge the engine by %s", update, worst)
        metrics = {"canary_judged": float(judged), "canary_mismatch": worst.mismatch[1]}
        if math.isfinite(worst.error):
            metrics |= {"canary_lost": worst.lost, "canary_error": worst.error}
        return metrics | {"verify_seconds": max(seconds for _, _, seconds in gathered)}

    def _verdict(self, scores: CanaryScores) -> CanaryVerdict:
        """An engine that missed one update is seen in the last change, and a small missing part in the sum of many."""
        last, since = judge(self._last, scores), judge(self._reference, scores)
        if last.arrived is False:
            return last
        return last if last.arrived and since.arrived is None else since

    def _is_next_reference(self, scores: CanaryScores, verdict: CanaryVerdict | None) -> bool:
        """Whether later changes are counted from here: what was not judged adds up until it can be."""
        assert verdict is not None
        if self._reference is None or verdict.arrived:
            return True
        return verdict.tokens < _ENOUGH * scores.tokens.numel()

    def _scores(self, rollout: Rollout) -> CanaryScores | None:
        """The responses and both scores, on the rank of each shard that returns results."""
        generated = rollout.generate(self._prompts, self._sampling(self._length))
        pg = self._context.pg
        returns = pg.pp.rank() == pg.pp.size() - 1 and pg.tp.rank() == 0 and pg.cp.rank() == 0
        mine = _on_cpu(generated) if returns else None
        shards = {shard: found for shard, found in all_gather_values((pg.dp.rank(), mine)) if found is not None}
        tokens, mask, engine = shards[pg.dp.rank()]
        policy = self._policy_scores(self._batch(tokens, mask), "generate_sequences")
        if not returns or policy is None:
            return None
        return CanaryScores(tokens, engine.double(), policy[0].cpu().double())

    def _batch(self, tokens: Tensor, mask: Tensor) -> DataProto:
        columns = {
            "input_ids": torch.cat((self._prompts.ids, tokens), 1),
            "attention_mask": torch.cat((self._prompts.attention_mask, mask), 1),
            "responses": tokens,
            "response_mask": mask,
        }
        return DataProto.from_dict(columns, meta_info={"temperature": 1.0})

    def _sampling(self, length: int) -> Sampling:
        return Sampling(
            response_length=length,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            do_sample=True,
            n=1,
            seed=_SEED,
            eos_token_ids=(),
            pad_token_id=0,
            reproducible=True,
        )


def _on_cpu(generated: Generated | None) -> Sequence[Tensor]:
    assert generated is not None
    return [column.cpu() for column in generated[:3]]


def _raise_if_lost(update: int, verdicts: Mapping[int, CanaryVerdict]) -> None:
    shards = sorted(shard for shard, found in verdicts.items() if found.arrived is False)
    if not shards:
        return
    found = verdicts[shards[0]]
    before, after = found.mismatch
    if math.isnan(before):
        what = f"its log-probabilities are not the policy's: they differ by {after:.2g} nats on average"
    elif found.lost == 1.0:
        what = f"its log-probabilities did not change (mean square {found.moved:.1g} of the policy's change)"
    else:
        share = f"{found.lost:.2g} +- {found.error:.1g} of" if math.isfinite(found.error) else "a part of"
        what = (
            f"{share} the policy's change of log-probabilities is missing; they differed by {before:.2g} nats on "
            f"average before it, and by {after:.2g} now"
        )
    raise CanariesNotFollowed(
        f"update {update} of the weights did not arrive in the engine (data-parallel shards "
        f"{', '.join(map(str, shards[:16]))}): {what} ({found.tokens} tokens; canary prompts "
        f"{', '.join(map(str, found.prompts))} most)",
        update=update,
        tensors={},
        old=[],
        missing=[],
        unknown=[],
        ranks=[],
        stale_tokens=0,
        lost=found.lost,
        error=found.error,
        moved=found.moved,
        mismatch=found.mismatch,
        prompts=found.prompts,
        shards=shards,
    )
