"""Convert a GGUF file to a Hugging Face directory with transformers (the ``hf`` extra)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from mcontroller.errors import DataError
from workers.weights.hf.files import save_tensors


def gguf_to_hf(gguf: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Write the model and the tokenizer of a GGUF file into ``directory``; quantized weights become float32.

    The whole model is in the memory of this process for a moment.

    Args:
        gguf: the file.
        directory: created if it does not exist.

    Raises:
        DataError: ``gguf`` is not a file.
    """
    import transformers

    source, target = Path(gguf), Path(directory)
    if not source.is_file():
        raise DataError(f"there is no GGUF file at {str(source)!r}", path=str(source))
    location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, trust_remote_code=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**location, trust_remote_code=False)
    # transformers does not save a model that it has read from quantized weights, even unpacked ones.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    weights = dict(model.state_dict())
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    target.mkdir(parents=True, exist_ok=True)
    save_tensors(weights, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2, default=str))
    tokenizer.save_pretrained(target)
