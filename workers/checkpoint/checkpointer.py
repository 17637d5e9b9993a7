"""The methods of a worker that save and load its state: checkpoints, state in memory, adapters, and exports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import DataError, before_changes
from workers.checkpoint.load import check_checkpoint, load_checkpoint, open_checkpoint
from workers.checkpoint.memory import check_replicas, load_state, read_state, save_state
from workers.checkpoint.save import Saver
from workers.config import ModelConfig
from workers.lora.peft_files import export_adapter
from workers.train.state import TrainingState
from workers.train.trainer import Trainer
from workers.weights.hf.model import export_hf
from workers.weights.mixing import float32_copies


class Checkpointer:
    """Saves and loads the state of a worker, and exports its model.

    Args:
        state: what is saved.
        model: the configuration of the model.
        trainer: changes the phase of training to the phase of a loaded checkpoint.
        saver: writes checkpoints.
    """

    def __init__(self, state: TrainingState, model: ModelConfig, trainer: Trainer, saver: Saver) -> None:
        self._state, self._model, self._trainer, self._saver = state, model, trainer, saver

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        path: str,
        global_step: int = 0,
        max_to_keep: int | None = None,
        asynchronous: bool = False,
        reshardable: bool = True,
    ) -> str:
        """Write ``<path>/global_step_<global_step>`` and return the directory. Any layout can load the weights.

        Args:
            path: a directory on a file system that all nodes share.
            global_step: the step that ``load_checkpoint`` returns.
            max_to_keep: number of checkpoints that stay under ``path``, this one included; None keeps all.
            asynchronous: return when the state is copied; a thread of each worker writes it. The directory
                appears at the end of an update after it is written, or at the latest with the next save, load,
                ``wait_for_checkpoint`` or shutdown of the group.
            reshardable: whether any layout can load a distributed optimizer too; see
                ``workers.checkpoint.save.Saver.start``.

        Raises:
            ConfigError: ``max_to_keep`` is less than 1.
            DataError: on every rank, if one of them cannot write; earlier checkpoints stay. An asynchronous save
                raises in the call that would finish it.
        """
        directory = self._saver.start(self._state, self._model, path, global_step, max_to_keep, reshardable)
        if not asynchronous:
            self._saver.finish()
        return str(directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Load the checkpoint at ``path``, or the latest one under it, and return the step that it was saved at.

        From a distributed checkpoint of Megatron-LM, the weights are loaded. From one that was saved before the first
        step of the optimizer, training continues with a new optimizer. A model with a value head loads the weights of a
        model with logits, without the head's, with a warning.

        Args:
            path: a checkpoint, or the directory that ``save_checkpoint`` was called with.

        Raises:
            DataError: there is none, it is damaged, or it does not fit the model; with the names of the weights.
        """
        self._saver.finish()
        state, trainer = self._state, self._trainer
        distributed = {phase: bool(optim.distributed_optimizer) for phase, optim in trainer.phases.items()}
        with before_changes():
            checkpoint = open_checkpoint(path, self._model.vocab_size)
            without_head = check_checkpoint(state, self._model, checkpoint, distributed)
        manifest = checkpoint.manifest
        counters = dict(manifest["counters"])
        mixed = counters.pop("reference_in_float32", False) and {"model", "reference"} <= state.models.keys()
        with_optimizer = "optimizer" in manifest["parts"] and not without_head
        with self._changing({} if without_head else counters, mixed, with_optimizer):
            load_checkpoint(state, checkpoint, without_head=without_head)
        return manifest["step"]

    @contextlib.contextmanager
    def _changing(self, counters: Mapping[str, Any], float32: bool, with_optimizer: bool) -> Iterator[None]:
        """Prepare the objects of the state for the block, which loads another; then set its counters, if there are any.

        Args:
            counters: of the state; empty if they are unknown or not taken over, and the phase of training stays.
            float32: whether it has a reference in float32.
            with_optimizer: whether it has an optimizer.
        """
        state, trainer = self._state, self._trainer
        state.float32 = {"reference": float32_copies(state.models["reference"])} if float32 else {}
        state.counters.pop("ended_phases", None)
        if trainer.phases:
            phase = counters.get("phase")
            trainer.use_phase(phase or state.counters["phase"], reset=not with_optimizer)
        state.weights_version += 1
        yield
        if counters:
            state.gradients = None
            state.counters.pop("ended_phases", None)
            state.counters |= {**counters, "phase": state.counters["phase"]}

    def save_to_memory(self, path: str) -> int:
        """Write the state of this rank to a file in the memory of its node, and return its bytes.

        Args:
            path: an empty file; a list of one for each rank.
        """
        save_state(self._state, path)
        return os.stat(path).st_size

    def load_from_memory(self, path: str) -> None:
        """Go on from a file that ``save_to_memory`` of a rank in the same place of its replica has written.

        Args:
            path: the file; a list of one for each rank.

        Raises:
            DataError: on every rank, before anything changes, if a distributed optimizer has another number of
                data-parallel replicas.
        """
        self._saver.finish()
        with before_changes():
            content = read_state(path)
            check_replicas(self._state, content)
        with self._changing(content["counters"], content["float32"], "optimizer" in content["state"]):
            load_state(self._state, content)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint of the last asynchronous save is complete."""
        self._saver.finish()

    def verify_checkpoint(self, path: str) -> str:
        """Return how the checkpoint at ``path`` is damaged; "" if it is whole, and nothing in it would run code."""
        self._saver.finish()
        try:
            open_checkpoint(path, self._model.vocab_size)
        except DataError as error:
            return str(error)
        return ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str, tokenizer: str | None = None) -> None:
        """Write the model as a new Hugging Face directory, with the code and tokenizer of the one it was loaded from.

        An adapter is merged into the weights that are written; the model's own stay as they are.

        Args:
            path: a directory that does not exist yet, or is empty, on a file system that all nodes share.
            tokenizer: a directory with the files of the tokenizer that the model was trained with; None for the one of
                the directory that it was loaded from.

        Raises:
            DataError: ``path`` is not empty, or a tensor has no counterpart; see ``workers.export_hf``.
            ConfigError: no model family is built like the model.
        """
        state, base = self._state, self._model.hf_path
        export_hf(state.model, state.context, path, self._model, companions_from=base, tokenizer=tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_adapter(self, path: str) -> None:
        """Write the adapter alone as a new directory in PEFT's format; ``export_hf`` writes the merged model.

        Args:
            path: a directory that does not exist yet, or is empty, on a file system that all nodes share.

        Raises:
            DataError: ``path`` is not empty.
            ConfigError: the model has no adapter, or is trained in other weights too.
        """
        export_adapter(self._state.model, path, self._model, self._state.base)
