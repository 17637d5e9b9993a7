"""Compare generation with ``transformers.generate``: the same random model and prompts, one process, one thread.

    python benchmarks/generation.py [--rows 64] [--prompt 32] [--tokens 64] [--long 160] [--rounds 3]

Both decode with a key-value cache and without a stop token: greedily, where they must generate the same tokens, and
by sampling with top-k and top-p. Ours is all of ``ActorRolloutRefWorker.generate_sequences``, including
log-probabilities. The two sides run alternately, so that other load on the machine slows both. The second table
compares positions: the time of a token among the first ones and among the last ones of a longer generation. Its growth
comes from attention, and should not be larger than transformers'.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from mcontroller.data.batch import DataProto
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, RolloutConfig
from workers.config.from_hf import model_config_from_hf

VOCAB = 8192
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, hidden 64": ("Llama", {"hidden_size": 64, "intermediate_size": 168, "num_hidden_layers": 2}),
    "Llama, hidden 256": ("Llama", {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}),
    "Qwen2, hidden 512": ("Qwen2", {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4}),
}
SECONDS = 8.0  # minimum for both sides together
EDGE = 32  # tokens at either end of the longer generation
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.9}
CASES = {"greedy": (False, GREEDY), "greedy, left-padded": (True, GREEDY), "sampled": (False, SAMPLED)}
Generate = Callable[[torch.Tensor, torch.Tensor, int, dict[str, Any]], torch.Tensor]


class Timed:
    """A side of the comparison, which records when the model finishes each of its passes."""

    def __init__(self, generate: Generate, model: torch.nn.Module) -> None:
        self.generate = generate
        self.ends: list[float] = []
        model.register_forward_hook(lambda *_: self.ends.append(time.perf_counter()))

    def run(
        self, ids: torch.Tensor, mask: torch.Tensor, tokens: int, how: dict[str, Any]
    ) -> tuple[float, list[float], torch.Tensor]:
        """Return the seconds in all, the seconds of every token but the first, and the tokens."""
        self.ends.clear()
        start = time.perf_counter()
        responses = self.generate(ids, mask, tokens, how)
        total = time.perf_counter() - start
        return total, [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)], responses


def both_sides(name: str, longest: int, directory: str) -> tuple[Timed, Timed]:
    """Return ours and transformers', with one random model with few key-value heads."""
    family, sizes = MODELS[name]
    config_class = getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    config = config_class(
        **sizes,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=2 * longest,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    theirs.save_pretrained(directory)
    model = model_config_from_hf(directory, dtype="float32")
    worker = ActorRolloutRefWorker(
        ActorConfig(model, rollout=RolloutConfig(prompt_length=longest, response_length=longest)), "rollout"
    )
    with worker.call_context("init_model"):
        worker.init_model()

    def ours(ids: torch.Tensor, mask: torch.Tensor, tokens: int, how: dict[str, Any]) -> torch.Tensor:
        meta_info = {"eos_token_id": -1, "pad_token_id": 0, "response_length": tokens} | how
        batch = DataProto.from_dict({"input_ids": ids, "attention_mask": mask}, meta_info=meta_info)
        with worker.call_context("generate_sequences"):
            generated = worker.generate_sequences(batch)
        assert generated is not None and generated.batch is not None
        return generated.batch["responses"]

    def of_transformers(ids: torch.Tensor, mask: torch.Tensor, tokens: int, how: dict[str, Any]) -> torch.Tensor:
        sequences = theirs.generate(
            ids,
            attention_mask=mask,
            **how,
            use_cache=True,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return sequences[:, ids.size(1) :]

    return Timed(ours, worker.model[0]), Timed(of_transformers, theirs)


def prompts(rows: int, width: int, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (rows, width), generator=generator)
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=generator) if padded else width
    mask = (torch.arange(width) >= width - lengths).long().expand(rows, -1).contiguous()
    return ids * mask, mask


def measured(
    sides: Sequence[Timed], ids: torch.Tensor, mask: torch.Tensor, tokens: int, how: dict[str, Any], rounds: int
) -> tuple[list[list[float]], list[list[list[float]]], float]:
    """Measure both sides, after one round to warm up.

    Short rounds are repeated for ``SECONDS``, since other load on the machine may last as long as some of them.

    Returns:
        By side and round, total seconds and the seconds of each token; and the fraction of rows that are the same.
    """
    totals: list[list[float]] = [[] for _ in sides]
    steps: list[list[list[float]]] = [[] for _ in sides]
    responses = []
    for number in itertools.count():
        if number > rounds and sum(map(sum, totals)) > SECONDS:
            break
        for index, side in enumerate(sides):
            total, by_token, tokens_out = side.run(ids, mask, tokens, how)
            responses.append(tokens_out)
            if number:
                totals[index].append(total)
                steps[index].append(by_token)
    return totals, steps, float((responses[0] == responses[1]).all(1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a row")
    parser.add_argument("--long", type=int, default=160, help="new tokens in the comparison of positions")
    parser.add_argument("--rounds", type=int, default=3, help="minimum rounds of each side, after one to warm up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console(width=140)
    console.print(f"torch {torch.__version__}, transformers {transformers.__version__}, 1 thread, {options.rows} rows")
    speed = Table(
        title=f"{options.prompt} + {options.tokens} tokens; target ratio: at least 1.00x", title_justify="left"
    )
    growth = Table(title=f"{options.prompt} + {options.long} tokens, ms per token", title_justify="left")
    for head in ("model", "decoding", "ours tokens/s", "transformers tokens/s", "ratio", "worst round", "same rows"):
        speed.add_column(head, justify="right")
    for head in ("model", "", f"tokens 2-{EDGE + 1}", f"last {EDGE}", "difference", "growth"):
        growth.add_column(head, justify="right")
    for model in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            sides = both_sides(model, options.prompt + options.long, directory)
        for case, (padded, how) in CASES.items():
            ids, mask = prompts(options.rows, options.prompt, padded)
            totals, _, same = measured(sides, ids, mask, options.tokens, how, options.rounds)
            rates = [options.rows * options.tokens / statistics.median(seconds) for seconds in totals]
            worst = min(theirs / ours for ours, theirs in zip(*totals, strict=True))
            cells = [f"{rate:,.0f}" for rate in rates] + [f"{rates[0] / rates[1]:.2f}x", f"{worst:.2f}x"]
            speed.add_row(model, case, *cells, "" if how["do_sample"] else f"{same:.0%}")
        ids, mask = prompts(options.rows, options.prompt, False)
        _, steps, _ = measured(sides, ids, mask, options.long, GREEDY, max(1, options.rounds // 2))
        for name, by_round in zip(("ours", "transformers"), steps, strict=True):
            first, last = (
                1e3 * statistics.median(second for seconds in by_round for second in seconds[edge])
                for edge in (slice(0, EDGE), slice(-EDGE, None))
            )
            growth.add_row(model, name, f"{first:.2f}", f"{last:.2f}", f"{last - first:.2f}", f"{last / first:.2f}x")
    console.print(speed)
    console.print(growth)


if __name__ == "__main__":
    main()
