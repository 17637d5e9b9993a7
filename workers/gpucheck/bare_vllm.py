"""Generate with vLLM alone, ``python bare_vllm.py ARGUMENTS.json``; print the tokens per second of the best of three.

It runs with the interpreter of engines, and imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Read ``engine`` (arguments of ``vllm.LLM``), ``sampling`` and ``prompts`` (token ids), and generate."""
    from vllm import LLM, SamplingParams

    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    engine, sampling = LLM(**given["engine"]), SamplingParams(**given["sampling"])
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in given["prompts"]]
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(tokens / (time.perf_counter() - started))
        engine.reset_prefix_cache()
    sys.stdout.write(f"\ntokens_per_s {max(rates)}\n")


if __name__ == "__main__":
    main()
