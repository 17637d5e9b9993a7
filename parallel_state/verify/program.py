"""What a team gives to ``verify``: its model, its batches and its loss, as functions that Megatron's training calls."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from parallel_state import cpu
from parallel_state.errors import MControllerError
from parallel_state.hangs.lines import raising_line
from parallel_state.requirements import naming_extras


class VerifyError(MControllerError, ValueError):
    """A program that cannot be verified; the message says what to change."""


@dataclass(frozen=True)
class Program:
    """A training program, as ``verify`` runs it.

    Attributes:
        config: returns the TransformerConfig. Its keyword arguments are fields of the config that follow from a layout,
            such as ``tensor_model_parallel_size``: pass them on, ``TransformerConfig(num_layers=4, ..., **parallel)``.
        model_provider: returns one stage of the model: ``model_provider(config, pre_process, post_process, vp_stage)``.
        forward_step: Megatron's: ``forward_step(data_iterator, model)`` returns the output and the function of its
            loss, which returns ``loss, num_tokens, report`` or ``loss, report``.
        batch: returns the micro-batch of a global index, as this rank gets it: a context-parallel rank its part of
            the sequence.
        seq_length: tokens in a row, over all ranks.
        micro_batches: micro-batches of one step, over all data-parallel ranks.
        micro_batch_size: rows of a micro-batch.
        merge: returns several micro-batches as one, for ``mbs=N``; None joins the tensors of dicts along their rows.
        positions: returns the positions in the sequence, of the tokens of the micro-batch of a global index, that this
            context-parallel rank has, in its order; None for a piece of each end. Differences are located with it.
        trained_by: the subclass of ``Training`` that trains a rank; None for Megatron's schedule.
        seeded: whether the initial weights are the same in every layout.
        scale: of reported values; the error of smaller ones is measured against it.
    """

    trained_by: ClassVar[Any] = None
    seeded: ClassVar[bool] = False
    scale: ClassVar[float] = 0.0

    config: Callable[..., Any]
    model_provider: Callable[..., Any]
    forward_step: Callable[..., Any]
    batch: Callable[[int], Any]
    seq_length: int
    micro_batches: int = 4
    micro_batch_size: int = 1
    merge: Callable[[Sequence[Any]], Any] | None = None
    positions: Callable[[int], torch.Tensor] | None = None

    def check_inputs(self, rows: int, context_parallel: int, inputs: Mapping[str, Any]) -> None:
        """Check the shapes of what a model gets: ``[rows, seq_length / context_parallel]``.

        Args:
            rows: the rows of a micro-batch.
            context_parallel: the ranks over which the sequence is divided.
            inputs: arguments of the model by name; those that are no tensors of two dims are not checked.

        Raises:
            VerifyError: a shape differs.
        """
        expected = rows, self.seq_length // context_parallel
        for name, value in inputs.items():
            if not isinstance(value, torch.Tensor) or value.dim() != 2 or tuple(value.shape) == expected:
                continue
            if value.shape[0] != rows and name != "position_ids":
                reason = f"a micro-batch has {rows} rows: return them, or set micro_batch_size of the Program"
            elif value.shape[1] == expected[1]:
                continue  # positions of one row, for all rows
            elif context_parallel > 1:
                reason = (
                    f"with cp={context_parallel} a rank has {expected[1]} of the {self.seq_length} tokens: return this "
                    "rank's part from batch, by parallel_state.get_context_parallel_rank()"
                )
            else:
                reason = f"a row has {self.seq_length} tokens: return them, or set seq_length of the Program"
            text = f"{name} of the model has the shape {list(value.shape)}, and {reason}"
            raise VerifyError(text, input=name, shape=tuple(value.shape), expected=expected)

    def smaller(self, *, micro_batches: int | None = None, **fields: Any) -> Program:
        """Return the program with fewer micro-batches, and other values of fields of its config.

        Args:
            micro_batches: micro-batches of one step; None for those of the program.
            fields: such as ``num_layers=2``. They are set after the config has derived other fields from its own.
        """

        def config(**parallel: Any) -> Any:
            made = self.config(**parallel)
            for name, value in fields.items():
                setattr(made, name, value)
            return made

        return replace(self, config=config, micro_batches=micro_batches or self.micro_batches)

    def recorded(self) -> Program:
        """Return the program whose modules are compared one by one, to find where the program differs."""
        return self

    def merged_batch(self, indices: Sequence[int]) -> Any:
        """Return several micro-batches as one.

        Raises:
            VerifyError: ``batch`` returns no dict.
        """
        batches = [self.batch(index) for index in indices]
        if len(batches) == 1:
            return batches[0]
        if self.merge is not None:
            return self.merge(batches)
        if not all(isinstance(batch, dict) for batch in batches):
            raise VerifyError(
                f"mbs={len(batches)} merges micro-batches that are dicts of tensors, and batch returns a "
                f"{type(batches[0]).__name__}; return a dict, give the program merge, or leave mbs out"
            )
        return {name: _joined([batch[name] for batch in batches], self.micro_batch_size) for name in batches[0]}


def _joined(values: list[Any], rows: int) -> Any:
    first = values[0]
    return torch.cat(values) if isinstance(first, torch.Tensor) and first.dim() and len(first) == rows else first


def load_program(reference: str) -> Program:
    """Return the program that ``my_model.py:program`` or ``my_package.model:program`` names.

    Raises:
        VerifyError: there is no such file, module or name, its import raises, or it is no Program.
    """
    source, separator, name = reference.rpartition(":")
    if not separator or not source or not name:
        raise VerifyError(f"expected FILE.py:NAME or MODULE:NAME, got {reference!r}", reference=reference)
    with running_file(source):
        module = _imported_file(Path(source)) if source.endswith(".py") else _imported(source)
    program = getattr(module, name, None)
    if not isinstance(program, Program):
        have = [variable for variable, value in vars(module).items() if isinstance(value, Program)]
        hint = f"its programs are {', '.join(have)}" if have else "it has no parallel_state.verify.Program"
        raise VerifyError(f"{source} has no program {name!r}; {hint}", reference=reference)
    return program


@contextlib.contextmanager
def running_file(path: str) -> Iterator[None]:
    """Raise VerifyError with the line for what a user's file raises in the block."""
    try:
        with naming_extras():
            yield
    except MControllerError:
        raise
    except Exception as error:
        where = "" if isinstance(error, SyntaxError) else f", at {raising_line(error)}"  # a syntax error names it
        raise VerifyError(f"{path} fails: {type(error).__name__}: {error}{where}", path=path) from error


def _imported_file(path: Path) -> Any:
    if not path.is_file():
        raise VerifyError(f"there is no file {path}", path=str(path))
    cpu.install(packages=[path.stem])
    sys.path.insert(0, str(path.resolve().parent))
    return importlib.import_module(path.stem)


def _imported(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise VerifyError(f"there is no module {name}", module=name)
    cpu.install(packages=[name])
    return importlib.import_module(name)
