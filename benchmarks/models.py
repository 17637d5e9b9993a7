"""Print what every model family computes in every layout, beside transformers, as a Markdown table.

python benchmarks/models.py [NAME ...]                     all families, or those of these names
python benchmarks/models.py --lora                         with adapters
.venv-newest/bin/python benchmarks/models.py --bridge      models of Megatron-Bridge
.venv-newest/bin/python benchmarks/models.py --lora        the same with adapters
"""

from __future__ import annotations

import argparse
import importlib.util
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

HEAD = """Beside transformers: megatron-core {megatron}, transformers {transformers}, torch {torch}, simulated ranks,
float32, {rows} rows, in the layouts {layouts}. A cell has the worst layout.
"""
ADAPTERS = """\
| model | built by | layout | log-probs | reference | gradients | gradient norm |
|---|---|---|---|---|---|---|
"""
BRIDGE_HEAD = """Through Megatron-Bridge {bridge}: megatron-core {megatron}, transformers {transformers}.
"""
BRIDGE_COLUMNS = ("load", "export", "log-probs", "gradients", "generation")
COLUMNS = ("load", "export", "log-probs", "gradients", "packed log-probs", "packed gradients", "generation")


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
    """Return the table of Megatron-Bridge; Megatron-Core decides at its import which layers it has."""
    lines = ["| model | layers | layout | " + " | ".join(BRIDGE_COLUMNS) + " |"]
    lines.append("|---|---|---|" + "---|" * len(BRIDGE_COLUMNS))
    for kind in ("local", "stand-in"):
        command = [sys.executable, __file__, "--bridge-rows", kind]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        lines += [line for line in printed.splitlines() if line.startswith("| ") and f" | {kind} | " in line]
    versions = {"bridge": version("megatron-bridge"), "megatron": version("megatron-core")}
    return BRIDGE_HEAD.format(transformers=version("transformers"), **versions) + "\n" + "\n".join(lines) + "\n"


def adapter_rows() -> list[str]:
    """Return the rows on adapters of the models that this environment builds."""
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
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", choices=[[], *MODELS], metavar="NAME", help="names in tests/workers/weights/hf_models.py"
    )
    parser.add_argument("--bridge", action="store_true", help="only the part on Megatron-Bridge, which needs it")
    parser.add_argument("--bridge-rows", choices=["local", "stand-in"], help=argparse.SUPPRESS)
    parser.add_argument("--lora", action="store_true", help="only the rows on adapters of this environment")
    parser.add_argument("--stand-in", action="store_true", help="with --lora: Bridge's own layers on the stand-in")
    arguments = parser.parse_args()
    if arguments.bridge_rows:
        print("\n".join(bridge_rows(arguments.bridge_rows)))
        return 0
    if arguments.lora:
        print(ADAPTERS + "\n".join(adapter_rows()))
    else:
        print(bridge_part() if arguments.bridge else native_part(arguments.names or [*MODELS]))
    return 0


def native_part(names: list[str]) -> str:
    """Return the table of native families."""
    lines = ["| model | layouts | " + " | ".join(COLUMNS) + " |", "|---|---:|" + "---|" * len(COLUMNS)]
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            reference = Reference(name, Path(directory))
            rows = []
            for layout in LAYOUTS:
                rows.append(row(reference, layout))
                print(f"| {name} | {layout} | " + " | ".join(rows[-1]) + " |", file=sys.stderr)
            lines.append(f"| {name} | " + " | ".join(worst(rows)) + " |")
    versions = {name: version(name) for name in ("transformers", "torch")} | {"megatron": version("megatron-core")}
    versions["torch"] = versions["torch"].split("+")[0]
    return HEAD.format(rows=ROWS, layouts=", ".join(LAYOUTS), **versions) + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
