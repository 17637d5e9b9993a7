"""Checks of device memory: bytes freed by offload, and the peak of generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from workers.gpucheck.policy import PROMPT, RESPONSE, ROWS, VOCABULARY, Policy, actor_config, ppo_columns
from workers.gpucheck.rows import Result, Row, at_most, compared
from workers.gpucheck.session import CHECKS, Session
from workers.gpucheck.tolerances import largest_difference

__all__ = ["cache_bytes", "generation_row", "large_policy", "offload_rows"]

_MIB = 1 << 20


def large_policy(session: Session, *, prompt: int, response: int, role: str, vocabulary: int = VOCABULARY) -> Policy:
    """Return a policy in bfloat16 with 0.8 to 0.9 billion parameters, or a small one if the session asks for it.

    Args:
        session: whose ``small`` is read.
        prompt: longest prompt.
        response: longest response.
        role: of ActorRolloutRefWorker.
        vocabulary: number of token ids; at least ``VOCABULARY``.
    """
    implementation = session.implementations[-1]
    model: dict[str, Any] = {"dtype": "bfloat16", "transformer_impl": implementation}
    lengths = {"prompt_length": PROMPT, "response_length": RESPONSE}
    if not session.small:
        lengths = {"prompt_length": prompt, "response_length": response}
        model |= {
            "vocab_size": vocabulary,
            "max_sequence_length": prompt + response,
            "num_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_query_groups": 4,
            "ffn_hidden_size": 6144,
            "init_method_std": 0.02,
        }
    options = {"rollout": lengths, "ppo_mini_batch_size": 16, "ppo_micro_batch_size": 4}
    return Policy(actor_config(model, options), role)


@CHECKS.register("offload")
def offload(session: Session) -> Iterator[Row]:
    """Compare the bytes that ``offload`` reports with those that the allocator and the driver get back."""
    if not session.on_gpu:
        yield Row("offload", "", result=Result.SKIPPED, note="host memory is not freed for another device")
        return
    with large_policy(session, prompt=512, response=512, role="actor") as policy:
        batch = ppo_columns()
        policy.update(batch)
        before = policy.scores(batch)
        free, held = _free_and_held()
        with policy.worker.call_context("offload"):
            reported = policy.worker.offload()
        free_after, held_after = _free_and_held()
        yield from offload_rows(reported, held - held_after, free_after - free)
        after = policy.scores(batch)
        assert before is not None and after is not None
        difference = largest_difference(after, before)
        help_text = "weights changed on their way to the host and back: report this with the machine's rows"
        yield at_most("offload: scores after reload", difference, 0.0, reference="before", note=help_text)


def _free_and_held() -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()


def offload_rows(reported: int, allocated: int, free: int) -> Iterator[Row]:
    """Yield the rows of bytes freed.

    Args:
        reported: by ``offload``.
        allocated: by how much the allocator's bytes fell; it rounds every tensor up to 512 bytes.
        free: by how much the driver's free bytes rose; blocks of 2 MiB that still hold a tensor stay.
    """
    yield compared(
        "offload: allocator",
        reported > 0 and abs(allocated - reported) <= max(0.02 * reported, 2 * _MIB),
        f"{allocated / _MIB:.1f} MiB",
        f"{reported / _MIB:.1f} MiB",
        "2%",
        note="tensors of the role stay on the device: compare with the list of placement",
    )
    yield compared(
        "offload: driver",
        free >= 0.95 * reported - 64 * _MIB,
        f"{free / _MIB:.1f} MiB",
        f"{reported / _MIB:.1f} MiB",
        "5% + 64 MiB",
        note="the allocator keeps blocks: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


@CHECKS.register("generation")
def generation(session: Session) -> Iterator[Row]:
    """Measure memory and speed of generation for prompts of unequal length."""
    rows, prompt, response = (ROWS, PROMPT, RESPONSE) if session.small else (64, 512, 128)
    with large_policy(session, prompt=prompt, response=response, role="rollout") as policy:
        batch = ppo_columns(rows, prompt, response)
        policy.generate(batch, do_sample=False)
        if session.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            policy.generate(batch)
            peak = torch.cuda.max_memory_allocated() - held
            yield generation_row(peak, cache_bytes(policy, rows), working_bytes(policy, rows))
        seconds = session.seconds(lambda: policy.generate(batch))
    most = rows * response / seconds
    yield Row("generation: tokens/s", f"{most:.0f}", f"{rows} rows x {response} tokens")


def cache_bytes(policy: Policy, rows: int) -> int:
    """Return the bytes of keys and values of all tokens: 2 x layers x rows x tokens x heads x channels x 2 bytes."""
    model, rollout = policy.config.model, policy.config.rollout
    channels = model.hidden_size // model.num_attention_heads * (model.num_query_groups or model.num_attention_heads)
    return 2 * model.num_layers * rows * (rollout.prompt_length + rollout.response_length) * channels * 2


def working_bytes(policy: Policy, rows: int) -> int:
    """Return the bytes of the activations of one layer for all prompts, and of the logits of one token in float32.

    A layer of a prompt token needs about 8 vectors of hidden size and 4 of the MLP's; logits are sorted for sampling,
    which needs about 6 of their size.
    """
    model, prompt = policy.config.model, policy.config.rollout.prompt_length
    assert model.ffn_hidden_size is not None
    layer = rows * prompt * (8 * model.hidden_size + 4 * model.ffn_hidden_size) * 2
    return layer + 6 * rows * model.vocab_size * 4


def generation_row(peak: int, cache: int, working: int) -> Row:
    """Return the row of the peak of generation, which may be 1.5 times the cache and what one layer works with.

    Masks or attention weights of ``[rows, heads, prompt, prompt]`` exceed that.
    """
    estimate = cache + working
    return compared(
        "generation: peak memory",
        peak <= 1.5 * estimate + 64 * _MIB,
        f"{peak / _MIB:.1f} MiB",
        f"{estimate / _MIB:.1f} MiB (cache {cache / _MIB:.1f})",
        "1.5x + 64",
        note="attention materializes its weights: install Transformer Engine, or set rollout.max_rows",
    )
