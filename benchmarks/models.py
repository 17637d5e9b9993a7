"""Print what every model family computes in every layout, beside transformers, as a Markdown table.

python benchmarks/models.py [--write docs/models.md]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mcontroller.errors import ConfigError
from tests.workers.weights.hf_models import LAYOUTS, MODELS, ROWS, Reference

HEAD = """# Model families

Written by `python benchmarks/models.py --write docs/models.md`; megatron-core {megatron}, transformers {transformers},
torch {torch}, simulated ranks on a CPU, float32.

`model.hf_path` reads checkpoints of these families, by `model_type` of `config.json`:

| `model_type` | models | limits |
|---|---|---|
| `llama` | Llama 2, 3 to 3.3, SmolLM2 | scaling of positions: none or `llama3` |
| `qwen2` | Qwen2, Qwen2.5 | no sliding windows |
| `qwen3`, `qwen3_moe` | Qwen3 | no sliding windows |
| `mistral` | Mistral 7B, Nemo, Small | windows in all layers or in none; 4096 tokens without the key |
| `mixtral` | Mixtral 8x7B, 8x22B | |
| `glm4_moe` | GLM-4.5, 4.5-Air, 4.6 | layers that predict more tokens are left out |
| `deepseek_v3`, `kimi_k2` | DeepSeek-V3, R1, Moonlight, Kimi-K2 | as below |

DeepSeek-V3 and Kimi-K2 have plain or YaRN positions, and `topk_group` is half of `num_experts_per_tok`, or all groups.
FP8 in the files is read as `model.dtype`, and an export has none. Layers that predict more tokens are left out.

gpt-oss is not read: its sinks, windows in every second layer, biases of experts, clamped activation and MXFP4 files
need other layers. Any model can be built in `build_model` ([own-megatron.md](own-megatron.md)).

- A key of `config.json` is computed, or changes nothing and is kept on export, or is rejected:
  `tests/workers/weights/test_hf_mutations.py` changes and removes each key of every family.
- After a load, `model.verify_load` compares every layer with transformers on the CPU, from the same files: `auto` for
  files of up to 1 GiB, `layers` for every model, with one layer in memory at a time. The first layer that differs is an
  error. Limits: 1e-5 of a token's length, or ten times transformers' own rounding; in 16 bits 2^-7, and up to a quarter
  of the tokens may differ in layers with experts, since rounding sends them to other experts.
- Multi-latent attention trains with tp only under sequence parallelism. Generation caches its keys and values of every
  head, not the compressed ones.
- With Transformer Engine, windows and cp need `model.transformer.cp_comm_type: a2a` or `all_gather`, which has not been
  run.
- The bias of a router that chooses experts is loaded, exported, sent to engines and kept as it is, unless you set
  `model.transformer.moe_router_bias_update_rate`.

## Beside transformers

Random models of 4 layers, saved by transformers, {rows} rows of unequal length, in the layouts
{layouts}.
A cell has the worst layout. "Load" compares every weight as it is streamed to an engine, under its Hugging Face name,
"export" the files that are written; "equal" means bit by bit. "Log-probs" and "gradients" (of the mean log-probability,
every weight) are the largest absolute differences from transformers' own; "packed" is the same with rows that are one
sequence. "Generation" compares greedy tokens, without cp. Dense models reject EP2, and models with experts TP2 without
SP. vLLM was not tried
with Mistral, Mixtral, GLM-4.5, DeepSeek-V3 and Kimi-K2. The log has each layout; tests assert 1e-5 for
{tested}.
"""
COLUMNS = ("load", "export", "log-probs", "gradients", "packed log-probs", "packed gradients", "generation")
TESTED = ("one process", "PP2 with VPP2", "TP2 x PP2 x CP2 with SP", "TP2 x PP2 x EP2 with SP")


def row(reference: Reference, layout: str) -> list[str]:
    """Return the cells of one layout."""
    axes = LAYOUTS[layout]
    try:
        found, packed = (reference.differences(axes, each) for each in (False, True))
    except ConfigError as error:
        reason = str(error).partition(": ")[0] if len(str(error)) > 80 else str(error)
        return [f"rejected: {reason}", *[""] * (len(COLUMNS) - 1)]
    found |= {f"packed {name}": packed[name] for name in ("log-probs", "gradients")}
    cells = ["equal" if found.get(name) == 0 else f"{found.get(name, 0):.1e}" for name in COLUMNS[:-1]]
    tokens = found.get("generation")
    return [*cells, "not with cp" if tokens is None else "same tokens" if tokens == 0 else "other tokens"]


def worst(rows: list[list[str]]) -> list[str]:
    """Return the number of layouts that are not rejected, and the cells of the worst of them."""
    accepted = [cells for cells in rows if not cells[0].startswith("rejected")]
    columns = [[cell for cell in column if cell != "not with cp"] for column in zip(*accepted, strict=True)]
    numbers = [max((cell for cell in column if cell != "equal"), key=float, default="equal") for column in columns[:-1]]
    return [str(len(accepted)), *numbers, max(columns[-1], key=lambda cell: cell == "other tokens")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the page to this file")
    arguments = parser.parse_args()
    lines = ["| model | layouts | " + " | ".join(COLUMNS) + " |", "|---|---:|" + "---|" * len(COLUMNS)]
    for name in MODELS:
        with tempfile.TemporaryDirectory() as directory:
            reference = Reference(name, Path(directory))
            rows = []
            for layout in LAYOUTS:
                rows.append(row(reference, layout))
                print(f"| {name} | {layout} | " + " | ".join(rows[-1]) + " |", file=sys.stderr)
            lines.append(f"| {name} | " + " | ".join(worst(rows)) + " |")
    versions = {name: version(name) for name in ("transformers", "torch")} | {"megatron": version("megatron-core")}
    versions["torch"] = versions["torch"].split("+")[0]
    layouts = {"layouts": ", ".join(LAYOUTS), "tested": ", ".join(TESTED)}
    document = HEAD.format(rows=ROWS, **layouts, **versions) + "\n" + "\n".join(lines) + "\n"
    print(document)
    if arguments.write is not None:
        arguments.write.write_text(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
