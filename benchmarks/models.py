"""Print what every model family computes in every layout, beside transformers, as a Markdown table.

python benchmarks/models.py [--write docs/models.md]
.venv-newest/bin/python benchmarks/models.py --bridge [--write docs/models.md]    the part on Megatron-Bridge alone
python benchmarks/models.py --lora [--write docs/models.md]                       the rows on adapters alone
.venv-newest/bin/python benchmarks/models.py --lora [--write docs/models.md]      those of Megatron-Bridge's models
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if sys.argv[1:] == ["--bridge-rows", "stand-in"] or "--stand-in" in sys.argv:  # before megatron-core is imported
    import tests.bridge.with_transformer_engine  # noqa: F401
from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.workers.lora.test_peft import add_adapter, computed, differences
from tests.workers.weights.hf_models import LAYOUTS, MODELS, ROWS, Reference, save_model, world_size

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

gpt-oss and others are built [through Megatron-Bridge](#through-megatron-bridge), any other model in `build_model`
([own-megatron.md](own-megatron.md)).

- A key of `config.json` is computed, or changes nothing and is kept on export, or is rejected.
- After a load and an export, `model.verify_load` compares every layer with transformers on the CPU, from the files:
  `auto` for files of up to 1 GiB, `layers` for every model, with one layer in memory. The first that differs is an
  error. Limits: 1e-5 of a token's length, or ten times transformers' own rounding; in 16 bits 2^-7, and up to a quarter
  of the tokens may differ in layers with experts, since rounding sends them to other experts.
- Multi-latent attention trains with tp only under sequence parallelism. Generation caches keys and values of every
  head, not the compressed ones.
- With Transformer Engine, windows and cp need `model.transformer.cp_comm_type: a2a` or `all_gather`, which has not been
  run.
- The bias of a router that chooses experts is loaded, exported, sent to engines and kept as it is, unless you set
  `model.transformer.moe_router_bias_update_rate`.

## HybridModel

Megatron-LM adds no features to GPTModel any more. With megatron-core 0.19 and later, `model.hybrid_layer_pattern`,
such as `"*-*-*E*E"`, builds its HybridModel: two letters for each of `model.num_layers`, attention `*` (`+` if
multi-latent), then an MLP `-` or experts `E`. Stages follow from `parallel.pp`; a `|` in the pattern is ignored.
Scores, values, gradients, steps and generated tokens are those of the GPTModel of the same weights, to the bit, in
the layouts of [parity.md](parity.md). So are the names of the weights: each reads the other's checkpoints, adapters
and exports. Without a pattern, a GPTModel is built. Patterns with `M`, `G`, `D` or `/` are rejected, with what they
need.

## Beside transformers

Random models of 4 layers, saved by transformers, {rows} rows of unequal length, in the layouts
{layouts}.
A cell has the worst layout. "Load" compares weights as they are sent to an engine, "export" the files that are written;
"equal" means bit by bit. "Log-probs" and "gradients" are the largest absolute differences from transformers' own;
"packed" is the same with rows that are one sequence. "Generation" compares greedy tokens, without cp. Dense models
reject EP2, and models with experts TP2 without SP. Tests assert 1e-5 for
{tested}.
"""
ADAPTERS_TITLE = "## Adapters"
ADAPTERS = (
    ADAPTERS_TITLE
    + """

The same models with a random [adapter](lora.md) on every linear layer but `k_proj`, beside transformers with the
adapter merged; the reference is the model with the adapter off. Gradients are relative to the largest, and their norm
to itself. Experts of Mixtral and gpt-oss have no adapters, nor have the linear attention and the gated `linear_qkv` of
Qwen3-Next and Qwen3.5, which were not tried.

| model | built by | layout | log-probs | reference | gradients | gradient norm |
|---|---|---|---|---|---|---|
"""
)
BRIDGE_TITLE = "## Through Megatron-Bridge"
BRIDGE_HEAD = (
    BRIDGE_TITLE
    + """

`model.provider: bridge` builds the models of text of Megatron-Bridge from `model.hf_path`; megatron-bridge {bridge},
megatron-core {megatron}, transformers {transformers} below. All sizes are in `config.json`, `model.transformer` changes
fields of Bridge's provider, and Bridge converts the weights. On GPUs install `mcontroller[bridge]` with Python 3.12; on
a CPU, where its dependencies do not compile:

```bash
pip install "mcontroller[cpu,hf]" && pip install --no-deps megatron-bridge einops
```

Where Bridge and Transformer Engine are installed, `model.provider: auto`, the default, is Bridge for a model that is as
its `config.json` says, also for the families above: native mappings are then what to compare with. On a GPU Bridge has
not been run. On a CPU, only plain GPT models can be built: other layers need Transformer Engine.

Bridge computes some models wrongly without an error, so `model.verify_load` compares every load with transformers,
however large the files are, and keys of `config.json` that Bridge does not read are printed. These are errors of the
load: layers of Gemma 3 with windows in another pattern than 5:1, and its norms after layers if `rms_norm_eps` is not
1e-5; DeepSeek-V3's latent norms if it is not 1e-6.

- Adapters and value heads are those of native models. A gated `linear_qkv`, as Qwen3-Next's, is to be excluded from
  adapters.
- Models with images are rejected. Megatron's generation rejects gpt-oss, Gemma 3, Qwen3-Next and Qwen3.5: use
  `rollout.engine=vllm`.
- A transfer to another group keeps one more copy of the weights, divided over the ranks.
- Layers that predict more tokens are left out, and losses that balance experts are off.
- Qwen3-Next and Qwen3.5 need flash-linear-attention, or `model.transformer.deterministic_mode: true`, which does not
  compute packed rows.
- Memory estimates are rough for these two, and for models with dense layers beside experts, or shared experts.

"Layers" are local ones, or Bridge's own on the tests' stand-in for Transformer Engine; the other columns are as above.
Tests assert 5e-5 for all rows, of the largest gradient for gradients: that is 24 for Qwen3.5.
"""
)
BRIDGE_COLUMNS = ("load", "export", "log-probs", "gradients", "generation")
COLUMNS = ("load", "export", "log-probs", "gradients", "packed log-probs", "packed gradients", "generation")
TESTED = ("one process", "PP2 with VPP2", "TP2 x PP2 x CP2 with SP", "TP2 x PP2 x EP2 with SP")


def row(reference: Reference, layout: str) -> list[str]:
    """Return the cells of one layout."""
    axes = LAYOUTS[layout]
    try:
        errors, packed = (reference.differences(axes, is_packed) for is_packed in (False, True))
    except ConfigError as error:
        reason = str(error).partition(": ")[0] if len(str(error)) > 80 else str(error)
        return [f"rejected: {reason}", *[""] * (len(COLUMNS) - 1)]
    errors |= {f"packed {name}": packed[name] for name in ("log-probs", "gradients")}
    cells = ["equal" if errors.get(name) == 0 else f"{errors.get(name, 0):.1e}" for name in COLUMNS[:-1]]
    tokens = errors.get("generation")
    return [*cells, "not with cp" if tokens is None else "same tokens" if tokens == 0 else "other tokens"]


def worst(rows: list[list[str]]) -> list[str]:
    """Return the number of layouts that are not rejected, and the cells of the worst of them."""
    accepted = [cells for cells in rows if not cells[0].startswith("rejected")]
    columns = [[cell for cell in column if cell != "not with cp"] for column in zip(*accepted, strict=True)]
    numbers = [max((cell for cell in column if cell != "equal"), key=float, default="equal") for column in columns[:-1]]
    return [str(len(accepted)), *numbers, max(columns[-1], key=lambda cell: cell == "other tokens")]


def bridge_rows(kind: str) -> list[str]:
    """Return the rows of Bridge's models with ``local`` layers, or with those of the ``stand-in``."""
    from tests.bridge.models import LAYOUTS, MATRIX, layouts_of

    rows = []
    for name, model in MATRIX.items():
        with tempfile.TemporaryDirectory() as directory:
            reference = Reference(model, Path(directory))
            for layout in layouts_of(name):
                errors = reference.differences(LAYOUTS[layout], packed=False)
                cells = ["equal" if errors[column] == 0 else f"{errors[column]:.1e}" for column in BRIDGE_COLUMNS[:-1]]
                tokens = errors.get("generation")
                cells.append("rejected" if tokens is None else "same tokens" if tokens == 0 else "other tokens")
                rows.append(f"| {name} | {kind} | {layout} | " + " | ".join(cells) + " |")
    return rows


def bridge_part() -> str:
    """Return the part of the page on Megatron-Bridge; Megatron-Core decides at its import which layers it has."""
    lines = ["| model | layers | layout | " + " | ".join(BRIDGE_COLUMNS) + " |"]
    lines.append("|---|---|---|" + "---|" * len(BRIDGE_COLUMNS))
    for kind in ("local", "stand-in"):
        command = [sys.executable, __file__, "--bridge-rows", kind]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        lines += [line for line in printed.splitlines() if line.startswith("| ") and f" | {kind} | " in line]
    versions = {"bridge": version("megatron-bridge"), "megatron": version("megatron-core")}
    return BRIDGE_HEAD.format(transformers=version("transformers"), **versions) + "\n" + "\n".join(lines) + "\n"


def adapter_rows() -> tuple[str, list[str]]:
    """Return what builds the models in this environment, and their rows on adapters."""
    models, built_by, rows = MODELS, "native", list[str]()
    if importlib.util.find_spec("megatron.bridge"):
        from tests.bridge.models import ADAPTED, WITH_ENGINE

        models, built_by = ADAPTED, "Bridge, stand-in" if WITH_ENGINE else "Bridge, local"
    for name, model in models.items():
        layout = "TP2 x PP2 x EP2 with SP"
        if not any("experts" in field for field in model.fields):
            layout = "TP2 x PP2 x CP2 with SP" if built_by == "native" else "TP2 x PP2 with SP"
        axes = LAYOUTS.get(layout, {"tp": 2, "pp": 2, "sequence_parallel": True})
        with tempfile.TemporaryDirectory() as directory:
            path = save_model(model, Path(directory) / "model")
            add_adapter(path, experts=name not in ("mixtral", "gpt_oss"))
            errors = differences(path, run_ranks(computed, world_size(axes), path, axes, {"model": model.settings}))
        cells = [f"{errors[column]:.1e}" for column in ("log-probs", "reference", "gradients", "norm")]
        rows.append(f"| {name} | {built_by} | {layout} | " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    return built_by, rows


def adapters_part(page: str, built_by: str, rows: list[str]) -> str:
    """Return the part of the page on adapters: these rows, and the page's of the other environments."""
    before = [line for line in page.partition(ADAPTERS_TITLE)[2].partition("\n## ")[0].splitlines() if "| TP2" in line]
    both = rows + [line for line in before if f"| {built_by} |" not in line]
    both.sort(key=lambda line: line.split(" | ")[1] != "native")
    return ADAPTERS + "\n".join(both) + "\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the page to this file")
    parser.add_argument("--bridge", action="store_true", help="only the part on Megatron-Bridge, which needs it")
    parser.add_argument("--bridge-rows", choices=["local", "stand-in"], help=argparse.SUPPRESS)
    parser.add_argument("--lora", action="store_true", help="only the rows on adapters of this environment")
    parser.add_argument("--stand-in", action="store_true", help="with --lora: Bridge's own layers on the stand-in")
    arguments = parser.parse_args()
    if arguments.bridge_rows:
        print("\n".join(bridge_rows(arguments.bridge_rows)))
        return 0
    if arguments.lora:
        built_by, rows = adapter_rows()
    else:
        written = bridge_part() if arguments.bridge else native_part() + "\n"
        print(written)
    if arguments.write is not None:
        page = arguments.write.read_text()
        arguments.write.write_text(with_part(page, adapters_part(page, built_by, rows) if arguments.lora else written))
    return 0


def with_part(page: str, written: str) -> str:
    """Return the page with one of its parts replaced; a part begins with its title."""
    parts = re.split(r"(?m)^(?=## (?:Adapters|Through Megatron-Bridge)$)", page)
    title = written.partition("\n")[0]
    return "".join(written if part.partition("\n")[0] == title else part for part in parts)


def native_part() -> str:
    """Return the page without the part on Megatron-Bridge."""
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
    return HEAD.format(rows=ROWS, **layouts, **versions) + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
