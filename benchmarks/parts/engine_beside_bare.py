"""The engine of ``asynchronous.py --engine``: that of a rollout, which can also be called as programs call vLLM's.

``python engine_beside_bare.py DESCRIPTOR FOLDER...``, as ``serve_engine.py``, in an environment with vLLM.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_IN_ENGINE = Path(__file__).parents[2] / "workers" / "generate" / "vllm" / "in_engine"
_POLL_S = 0.0005


def _program() -> Any:
    """Return ``serve_engine.py``, which other programs do not import."""
    sys.path[:0] = [str(_IN_ENGINE), *sys.argv[2:]]
    import serve_engine

    class BesideBare(serve_engine.Engine):  # type: ignore[misc]
        """An engine with methods that measure."""

        def __init__(self, arguments: dict[str, Any]) -> None:
            super().__init__(arguments)
            self.tokens_made, self.steps_made, self.last_token_s = 0, 0, 0.0
            process = self._llm.output_processor.process_outputs

            def counted(outputs: Sequence[Any], *others: Any, **options: Any) -> Any:
                if outputs:
                    self.steps_made += 1
                    self.tokens_made += sum(len(output.new_token_ids) for output in outputs)
                    self.last_token_s = time.perf_counter()
                return process(outputs, *others, **options)

            self._llm.output_processor.process_outputs = counted

        async def bare(
            self,
            prompts: Sequence[Sequence[int]],
            parameters: Sequence[dict[str, Any]],
            replies: Sequence[Sequence[int]],
        ) -> tuple[int, float]:
            """Return the tokens of the responses of ``AsyncLLM``, whole as they end, and the seconds.

            Args:
                prompts: token ids.
                parameters: of every turn.
                replies: token ids of a tool after each turn but the last.
            """
            began = time.perf_counter()
            counts = await asyncio.gather(
                *(self._tokens(number, [*prompt], parameters, replies) for number, prompt in enumerate(prompts))
            )
            return sum(counts), time.perf_counter() - began

        async def _tokens(
            self, number: int, context: list[int], parameters: dict[str, Any], replies: Sequence[Sequence[int]]
        ) -> int:
            from vllm import SamplingParams
            from vllm.sampling_params import RequestOutputKind

            kind = RequestOutputKind.FINAL_ONLY
            sampling = SamplingParams(**parameters, logprobs=0, detokenize=False, ignore_eos=True, output_kind=kind)
            tokens = 0
            for turn, reply in enumerate((*replies, ())):
                request = {"prompt_token_ids": list(context)}
                async for output in self._llm.generate(request, sampling, f"bare-{number}-{turn}"):
                    made = output.outputs[0].token_ids
                    tokens += len(made)
                    context += made
                context += reply
            return tokens

        async def spent(self) -> tuple[int, float, float]:
            """Return the steps of the engine so far, and the CPU time of this process, and of those that it started."""
            ticks = os.sysconf("SC_CLK_TCK")
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            of_children = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in children]
            return (
                self.steps_made,
                time.process_time(),
                sum((int(stat[11]) + int(stat[12])) / ticks for stat in of_children),
            )

        async def stop(self, tokens: int) -> dict[str, float]:
            """Return the seconds of an update of the weights without weights, when so many tokens were made.

            Returns:
                Of ``pause``, of ``resume``, from there to the next token, and from the last token to the next one.
            """
            made = self.tokens_made + tokens
            while self.tokens_made < made:
                await asyncio.sleep(_POLL_S)
            began = time.perf_counter()
            await self.pause()
            paused, last, made = time.perf_counter(), self.last_token_s, self.tokens_made
            await self.resume(self.version + 1)
            resumed = time.perf_counter()
            while self.tokens_made == made:
                await asyncio.sleep(_POLL_S)
            first = time.perf_counter()
            return {"pause": paused - began, "resume": resumed - paused, "first": first - resumed, "stop": first - last}

    serve_engine.Engine = BesideBare
    return serve_engine


if __name__ == "__main__":
    asyncio.run(_program().serve_engine())
