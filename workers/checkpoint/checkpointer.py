"""Save and load the checkpoints of a worker."""

from __future__ import annotations

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import DataError, before_changes
from workers.checkpoint.load import check_checkpoint, load_checkpoint, open_checkpoint
from workers.checkpoint.save import save_checkpoint
from workers.checkpoint.writer import BackgroundSaves
from workers.config import ModelConfig
from workers.train.state import TrainingState
from workers.train.trainer import Trainer
from workers.weights.hf.model import export_hf
from workers.weights.mixing import float32_copies

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves and loads the state of a worker, and exports its model.

    Args:
        state: what is saved.
        model: the configuration of the model.
        trainer: changes the phase of training to that of a loaded checkpoint.
        saves: the checkpoint that is being written.
    """

    def __init__(self, state: TrainingState, model: ModelConfig, trainer: Trainer, saves: BackgroundSaves) -> None:
        self._state, self._model, self._trainer, self._saves = state, model, trainer, saves

    def save(self, path: str, step: int, max_to_keep: int | None, asynchronous: bool, reshardable: bool) -> str:
        """Write a checkpoint, and return its directory; see ``ModelWorker.save_checkpoint``."""
        self._saves.finish()
        background = self._saves if asynchronous else None
        return str(save_checkpoint(self._state, path, step, max_to_keep, background, reshardable))

    def load(self, path: str) -> int:
        """Load a checkpoint, and return the step that it was saved at; see ``ModelWorker.load_checkpoint``."""
        self._saves.finish()
        state, trainer = self._state, self._trainer
        distributed = {phase: bool(optim.distributed_optimizer) for phase, optim in trainer.phases.items()}
        with before_changes():
            checkpoint, manifest = open_checkpoint(path, self._model.vocab_size)
            without_head = check_checkpoint(state, checkpoint, manifest, distributed)
        counters = dict(manifest["counters"])
        mixed = counters.pop("reference_in_float32", False) and {"model", "reference"} <= state.models.keys()
        state.float32 = {"reference": float32_copies(state.models["reference"])} if mixed else {}
        state.counters.pop("ended_phases", None)
        if trainer.phases:
            current = state.counters["phase"]
            phase = current if without_head else counters.get("phase") or current
            trainer.use_phase(phase, reset=without_head or "optimizer" not in manifest["parts"])
        state.weights_version += 1
        load_checkpoint(state, checkpoint, manifest, without_head=without_head)
        if counters and not without_head:
            state.gradients = None
            state.counters.pop("ended_phases", None)
            state.counters |= counters | {"phase": state.counters["phase"]}
        return manifest["step"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint of the last asynchronous save is complete."""
        self._saves.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def verify_checkpoint(self, path: str) -> str:
        """Return how the checkpoint at ``path`` is damaged; "" if it is whole, and nothing in it would run code."""
        self._saves.finish()
        try:
            open_checkpoint(path, self._model.vocab_size)
        except DataError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the model as a new Hugging Face directory, with the tokenizer of the one that it was loaded from.

        Args:
            path: a directory that does not exist yet, or is empty, on a file system that all nodes share.

        Raises:
            DataError: ``path`` is not empty, or a tensor has no counterpart; see ``workers.export_hf``.
            ConfigError: no model family is built like the model.
        """
        export_hf(self._state.model, self._state.context, path, self._model, companions_from=self._model.hf_path)
