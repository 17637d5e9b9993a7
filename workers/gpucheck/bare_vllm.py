"""Generate with vLLM alone, and print the tokens per second of the best of three.

It runs with the interpreter of engines, and imports nothing of this project. Standard input is JSON: ``engine``
(arguments of ``vllm.LLM``), ``sampling``, and ``prompts`` (token ids).
"""

import json
import sys
import time

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    given = json.load(sys.stdin)
    engine, sampling = LLM(**given["engine"]), SamplingParams(**given["sampling"])
    prompts = [{"prompt_token_ids": prompt} for prompt in given["prompts"]]
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(tokens / (time.perf_counter() - started))
        engine.reset_prefix_cache()
    sys.stdout.write(f"\n{max(rates)}\n")
