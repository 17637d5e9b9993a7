"""A GGUF file as a directory in Hugging Face's format, through transformers (the ``hf`` extra)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["gguf_to_hf"]


def gguf_to_hf(gguf: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Write the model and the tokenizer of a GGUF file into ``directory``; quantised weights become float32.

    The whole model is in this process's memory for a moment: for models that one machine holds.

    Raises:
        FileNotFoundError: there is no such file.
    """
    import transformers

    source, target = Path(gguf), Path(directory)
    if not source.is_file():
        raise FileNotFoundError(f"there is no GGUF file at {str(source)!r}")
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    # By hand: transformers does not save a model that it has read from quantised weights, unpacked or not.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2, default=str))
    tokenizer.save_pretrained(target)
