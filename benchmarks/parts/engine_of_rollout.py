"""The engine of vLLM through the router beside bare ``AsyncLLM``, in one process of it, and its stop at an update."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.rollout.requests import Router
from workers import ActorConfig, load_config
from workers.generate.engine_protocol import Sampled
from workers.generate.sampling import Sampling
from workers.generate.vllm.engine_process import EngineProcess
from workers.generate.vllm.start import engine_arguments, engine_environment, policy_folder
from workers.generate.vllm.vllm_engine import VllmAddress, sampling_parameters
from workers.parity.cases import LARGE

PROMPT, EOS, PAD = 64, 2, 0
SMALL = {"vocab_size": 4096, "max_sequence_length": 1024, "num_layers": 4, "hidden_size": 256}
SMALL |= {"num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 512}
TURNS, REPLY = 3, [7] * 16
TOKEN = "benchmark"
PROGRAM = Path(__file__).parent / "engine_beside_bare.py"
# The controller and vLLM's front have a CPU of their own, as beside a GPU: if one of them interrupts a thread of the
# engine's core, all others of it wait.
THREADS = max(1, (os.cpu_count() or 1) - 1)


class Spent(NamedTuple):
    """What a batch of requests cost.

    Attributes:
        tokens: of all responses.
        seconds: of time.
        steps: of the engine that made tokens: more of them if requests arrive late.
        controller, front, core: [s] CPU time of the controller, of vLLM's front and its core.
    """

    tokens: int
    seconds: float
    steps: int
    controller: float
    front: float
    core: float


class MeasuredEngine:
    """An engine of dummy weights, and requests for it.

    Args:
        python: the interpreter that has vLLM.
        requests: of a batch; so many are in flight.
        length: [tokens] of a turn.
        gpu: its name for ``CUDA_VISIBLE_DEVICES``, for a model of 1.7B parameters; None: a small one on CPUs.
    """

    def __init__(self, python: str, requests: int, length: int, gpu: str | None = None) -> None:
        model = SMALL if gpu is None else LARGE | {"dtype": "bfloat16"}
        vllm = {"python": python, "start_timeout_s": 600.0}
        longest = TURNS * length + (TURNS - 1) * len(REPLY)
        rollout = {"engine": "vllm", "prompt_length": PROMPT, "response_length": longest, "max_rows": requests}
        self.config = load_config(ActorConfig, {"model": model, "rollout": {**rollout, "vllm": vllm}})
        draws = random.Random(0)
        vocabulary = model["vocab_size"]
        self.prompts = [[draws.randrange(3, vocabulary) for _ in range(PROMPT)] for _ in range(requests)]
        self.length = length
        share, variables = None, engine_environment([]) | {"OMP_NUM_THREADS": str(THREADS)}
        if gpu is not None:
            share, variables = 0.6, engine_environment([gpu])
        self.process = EngineProcess(
            engine_arguments(self.config, str(policy_folder(self.config)), share),
            variables,
            start_timeout_s=600.0,
            silence_timeout_s=600.0,
            python=python,
            program=PROGRAM,
        )

        settings = {"eos_token_id": EOS, "pad_token_id": PAD, "response_length": length}
        sampling = Sampling.of(self.config.rollout, settings)
        self.parameters = sampling_parameters(sampling, seeded=False)
        port = self.process.call("listen", host="127.0.0.1", token=TOKEN)
        self.address = VllmAddress("127.0.0.1", port, TOKEN, self.config.rollout)

    def bare(self, turns: int = 1) -> Spent:
        """Return what a batch of responses of some turns costs with ``AsyncLLM``, called in its process."""
        before, replies = self._so_far(), [REPLY] * (turns - 1)
        tokens, seconds = self.process.call("bare", prompts=self.prompts, parameters=self.parameters, replies=replies)
        return self._spent(before, tokens, seconds)

    def routed(self, turns: int = 1) -> Spent:
        """Return what a batch of responses of some turns costs through the router."""
        before, began = self._so_far(), time.perf_counter()
        made = asyncio.run(self._responses(turns))
        return self._spent(before, sum(len(turn.tokens) for turn in made), time.perf_counter() - began)

    def stop(self) -> tuple[dict[str, float], int]:
        """Return the seconds of an update without weights, and how many responses go on after it."""
        self.process.send("stop", tokens=len(self.prompts) * self.length // 4)
        responses = asyncio.run(self._responses(1))
        return self.process.result(), sum(len(response.versions) > 1 for response in responses)

    def close(self) -> None:
        """End the process."""
        self.process.close()

    async def _responses(self, turns: int) -> Sequence[Sampled]:
        """Return all turns of the responses."""
        router, made = Router([self.address.connect()]), list[Sampled]()

        async def respond(context: array[int], seed: int) -> None:
            for _ in range(turns):
                settings = {"eos_token_id": EOS, "response_length": self.length, "seed": seed}
                made.append(await router.generate(context, settings))
                context.extend(made[-1].tokens + array("q", REPLY))

        try:
            await asyncio.gather(*(respond(array("q", prompt), seed) for seed, prompt in enumerate(self.prompts)))
        finally:
            await router.close()
        return made

    def _so_far(self) -> tuple[int, float, float, float]:
        steps, front, core = self.process.call("spent")
        return steps, time.process_time(), front, core

    def _spent(self, before: tuple[int, float, float, float], tokens: int, seconds: float) -> Spent:
        steps, *cpu = (after - start for after, start in zip(self._so_far(), before, strict=True))
        return Spent(tokens, seconds, int(steps), *cpu)


def report(python: str, requests: int, length: int, rounds: int, gpu: str | None) -> None:
    """Print the throughput through the router over that of ``AsyncLLM``, and what a stop consists of."""
    engine = MeasuredEngine(python, requests, length, gpu)
    try:
        pairs = {}
        for turns in (1, TURNS):
            engine.routed(turns)  # compiles, and fills caches
            pairs[turns] = [(engine.bare(turns), engine.routed(turns)) for _ in range(rounds)]
        stops = [engine.stop() for _ in range(rounds)]
    finally:
        engine.close()
    print(
        f"{requests} requests of {PROMPT} + {length} tokens at once, and of {TURNS} turns of so many tokens with "
        f"{len(REPLY)} of a tool between them; {rounds} rounds of each in turn; threads of the engine's core: {THREADS}"
    )
    print("| turns | | tokens/s | steps | ms of CPU a request: controller | vLLM's front | its core |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for turns, name, side in ((turns, *row) for turns in pairs for row in (("AsyncLLM", 0), ("router", 1))):
        spent = [pair[side] for pair in pairs[turns]]
        speed = statistics.median(one.tokens / one.seconds for one in spent)
        parts = [statistics.median(getattr(one, part) for one in spent) for part in ("controller", "front", "core")]
        cpu = " | ".join(f"{part / requests / turns * 1e3:.2f}" for part in parts)
        steps = statistics.median(one.steps for one in spent)
        print(f"| {turns} | {name} | {speed:.0f} | {steps:.0f} | {cpu} |")
    ratios = [
        statistics.median(bare.seconds / bare.tokens * routed.tokens / routed.seconds for bare, routed in of_turns)
        for of_turns in pairs.values()
    ]
    shown = " and ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"throughput through the router over AsyncLLM: {shown} (limit: at least 0.95)")
    ms = {name: statistics.median(stop[name] for stop, _ in stops) * 1e3 for name in stops[0][0]}
    count = statistics.median(count for _, count in stops)
    print(
        f"an update without the copy of weights, {count:.0f} requests in flight: the step in flight ended, and the "
        f"engine was paused, after {ms['pause']:.0f} ms. From its tokens to the end of resume "
        f"{ms['stop'] - ms['first']:.0f} ms (limit: 50), of which resume took {ms['resume']:.0f} ms. The next token, "
        f"before which the engine computes all keys and values again, came {ms['first']:.0f} ms later"
    )
