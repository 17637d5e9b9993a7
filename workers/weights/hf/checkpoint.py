"""Check the files of a checkpoint before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcontroller.errors import DataError
from workers.weights.hf.config import family_at
from workers.weights.hf.files import WeightFiles, has_weights


def check_checkpoint_files(model: Any) -> None:
    """Check that the files at ``model.hf_path`` are whole, and that an output layer is tied as ``config.json`` says.

    The headers of all files are read, and a few rows of the output layer. Nothing is checked if this node does not have
    the directory or weights in it, or it is of no registered family; of a model of another provider, the headers alone
    are.

    Args:
        model: a ``ModelConfig``.

    Raises:
        DataError: files are missing or damaged, or the output layer differs from the embedding that it is tied to.
    """
    if model.hf_path is None or not Path(model.hf_path).is_dir() or not has_weights(Path(model.hf_path)):
        return
    family = family_at(model.hf_path)
    if family is None and model.provider == "native":
        return
    files = WeightFiles(Path(model.hf_path))
    files.check()
    if family is None:
        return
    names = [family.names.get(name, ("",))[0] for name in ("embedding.word_embeddings.weight", "output_layer.weight")]
    if not getattr(model, "tie_embeddings", False) or not files.names.issuperset(names):
        return
    row = files.first_different_row(*names)
    if row is not None:
        raise DataError(
            f"{model.hf_path}: config.json has tie_word_embeddings=true, but row {row} of {names[1]} differs from "
            f"{names[0]}: set tie_word_embeddings to false, or remove the tensor from the files",
            tensor=names[1],
        )
