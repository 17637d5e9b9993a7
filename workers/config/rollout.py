"""RolloutConfig: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from mcontroller.config.checks import check_at_least, check_one_of
from mcontroller.config.fields import strict_fields, unused_if
from workers.config.sampling import OF_BATCHES, check_setting
from workers.config.vllm import VllmConfig


@strict_fields
@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How responses are sampled. The ``meta_info`` of a batch can set any of the sampling fields for one call."""

    prompt_length: int = 512
    """[tokens] Longest prompt."""
    response_length: int = 512
    """[tokens] Longest response; every response is padded to it."""
    temperature: float = 1.0
    """Divisor of the logits, in sampling and in all log-probabilities, also of greedy responses; above 0."""
    top_p: float = unused_if(1.0, do_sample=False)
    """Sample from the most likely tokens whose probabilities add up to this, above 0, at most 1. 1: from all."""
    top_k: int = unused_if(0, do_sample=False)
    """[tokens] Sample from this many of the most likely tokens. 0: from all."""
    min_p: float = unused_if(0.0, do_sample=False)
    """Sample from tokens with at least this share of the highest probability, 0 to 1. 0: from all."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens of the prompt and of the response so far by this, multiply negative ones. 1: no.

    The policy is scored without the penalty: its log-probabilities differ from the distribution that was sampled.
    """
    do_sample: bool = True
    """Sample; False takes the most likely token."""
    n: int = 1
    """[responses] Responses to each prompt; they are neighbors in the batch."""
    seed: int = 0
    """Seed of sampling; the same on every layout."""
    max_rows: int = 256
    """[rows] Most rows that a data-parallel rank, or an engine of vLLM, generates at once."""
    engine: str = "megatron"
    """Engine that generates: megatron, vllm, or one registered in ``workers.ROLLOUT_ENGINES``."""
    vllm: VllmConfig = unused_if(VllmConfig, engine="megatron")
    """Settings of the engine vllm."""
    verify_weights: str = "auto"
    """Compare the engine's weights with the policy's after every update: auto, fingerprints or never.

    fingerprints: compare one number per tensor, and reject an engine that cannot report them. auto: fingerprints if the
    engine reports them, or else a warning.
    """

    def __post_init__(self) -> None:
        for name in ("prompt_length", "max_rows"):
            check_at_least(f"rollout.{name}", getattr(self, name), 1)
        for name in OF_BATCHES:
            check_setting(f"rollout.{name}", name, getattr(self, name))
        check_one_of("rollout.verify_weights", self.verify_weights, ("auto", "fingerprints", "never"))
