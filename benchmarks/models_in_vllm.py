"""Print what vLLM computes with a small checkpoint of every model family, beside transformers, as a Markdown table.

.venv-vllm/bin/python benchmarks/models_in_vllm.py [--write docs/models.md]

Sizes are the least that vLLM's kernels of a CPU accept. Exports and refits have transformers' names and values bit by
bit (benchmarks/models.py), so this is what an engine computes with the weights of a policy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import with_part
from tests.bridge.models import ENGINE
from tests.workers.weights.hf_models import MODELS, Model, save_model, transformers
from workers.config.from_hf import model_config_from_hf
from workers.weights.hf.config import hf_config_of

HEAD = """## In vLLM

What vLLM {vllm} with transformers {transformers} computes on a CPU in float32 with a checkpoint of 4 layers, whose
sizes are the least that its kernels accept: the largest difference of the log-probabilities of 2 x {new} greedy tokens
from those of transformers. A refit has the same names and values. Written by `benchmarks/models_in_vllm.py`.

| model | difference |
|---|---|
"""
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
TOKENS, NEW = 24, 8
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def families() -> dict[str, Model]:
    """Return the models of the tests, once for each family."""
    models = {name: model for name, model in MODELS.items() if "," not in name}
    for name in ("gemma3", "gpt_oss"):  # smaller weights: Gemma's probabilities would be 1
        models[name] = ENGINE[name]._replace(fields=ENGINE[name].fields | {"initializer_range": 0.05})
    return models


def widened(model: Model) -> Model:
    """Return the model with sizes for vLLM."""
    own = {key: value for key, value in SIZES.items() if key in model.fields or key == "head_dim"}
    latent = {key: value for key, value in LATENT.items() if key in model.fields or key == "head_dim"}
    return model._replace(fields=model.fields | own | (latent if "kv_lora_rank" in model.fields else {}))


def in_vllm(path: str) -> dict[str, list[list[float]]]:
    """Return greedy tokens and their log-probabilities of a checkpoint, from an engine in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=path,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=64 << 20,
    )
    ids = torch.randint(3, 61, (2, TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling)
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    found = [
        [step[token].logprob for step, token in zip(each.outputs[0].logprobs, each.outputs[0].token_ids, strict=True)]
        for each in outputs
    ]
    return {"ids": ids, "tokens": tokens, "log_probs": found}


def difference(path: Path, found: dict[str, list[list[float]]]) -> float:
    """Return the largest difference of the log-probabilities from those of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    whole = torch.tensor([row + new for row, new in zip(found["ids"], found["tokens"], strict=True)])
    with torch.no_grad():
        log_probs = model(whole).logits[:, TOKENS - 1 : -1].log_softmax(-1)
    expected = log_probs.gather(2, whole[:, TOKENS:, None])[..., 0]
    return float((expected - torch.tensor(found["log_probs"])).abs().max())


def cell(model: Model, directory: Path) -> str:
    """Return the difference, or why there is none."""
    path = save_model(widened(model), directory)
    if not model.settings:  # a native family: the config.json that an engine gets
        (path / "config.json").write_text(json.dumps(hf_config_of(model_config_from_hf(path))))
    done = subprocess.run(
        [sys.executable, __file__, "--engine", str(path)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(done.stderr[-3000:], file=sys.stderr)
        last = [line for line in done.stderr.splitlines() if "Error" in line][-1]
        return f"fails: {last.strip():.100}"
    return f"{difference(path, json.loads(done.stdout.splitlines()[-1])):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the table to this page")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(in_vllm(arguments.engine)))
        return 0
    cells = {}
    for name, model in families().items():
        with tempfile.TemporaryDirectory() as directory:
            cells[name] = cell(model, Path(directory))
        print(name, cells[name], flush=True)
    rows = "".join(f"| {name} | {found} |\n" for name, found in cells.items())
    versions = {name: version(packages_distributions()[name][0]).partition("+")[0] for name in ("vllm", "transformers")}
    if arguments.write is not None:
        written = HEAD.format(new=NEW, **versions) + rows + "\n"
        arguments.write.write_text(with_part(arguments.write.read_text(), written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
