"""``dry_run``: one training step of a program in a layout, on ranks whose device has no memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from parallel_state import cpu
from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.errors import DryRunError
from parallel_state.dry_run.outcome import GIB, Outcome, Use
from parallel_state.dry_run.ranks import CallLog, peers_of, pipeline_of, run_without_data
from parallel_state.dry_run.routing import routed, routing_of
from parallel_state.dry_run.training import one_layer_a_stage, train
from parallel_state.dry_run.transformer_engine import engine_kernels
from parallel_state.dry_run.values import BRANCH, UnknownValue
from parallel_state.errors import MControllerError
from parallel_state.hangs.lines import members_text, raising_line
from parallel_state.layout import ParallelLayout
from parallel_state.simulated.errors import SimulationError
from parallel_state.verify.layouts import Variant, check_divisible, parse_layout
from parallel_state.verify.program import Program

_SAME = 0.01  # two pipelines whose peaks differ by less are alike: their parts of the optimizer's state differ

Show = Callable[[str, int, int], object]
"""Called with what runs, the number of ranks that have ended, and that of all."""


def layout_for(text: str, ranks: int | None) -> Variant:
    """Return the layout of a text on a number of ranks: dp is the quotient.

    Args:
        text: such as ``"tp=8,pp=4,sp,distopt"``.
        ranks: the number of ranks; None for the fewest that the axes allow.

    Raises:
        VerifyError: an unknown axis or flag, or a layout that Megatron cannot have.
        DryRunError: the axes do not divide the ranks.
    """
    variant = parse_layout(text)
    if ranks is None or ranks == variant.layout.world_size:
        return variant
    layout = variant.layout
    stages = layout.tp * layout.pp * layout.cp
    if "dp=" in text or ranks < 1 or ranks % stages:
        raise DryRunError(
            f"layout {text!r} has {layout.world_size} ranks, and {ranks} are given; leave dp out, and give a multiple "
            f"of tp x pp x cp = {stages}",
            layout=text,
            ranks=ranks,
        )
    return replace(parse_layout(f"{text},dp={ranks // stages}"), text=text)


def dry_run(
    program: Program,
    layout: str | Variant,
    *,
    ranks: int | None = None,
    micro_batches: int | None = None,
    routing: str = "balanced",
    dtype: torch.dtype = torch.bfloat16,
    layers: str = "transformer_engine",
    every_rank: bool = False,
    second: bool = True,
    show: Show = lambda what, ended, ranks: None,
) -> Outcome:
    """Make one training step of a program in a layout, with shapes and without data.

    Each stage runs on the first of its ranks; the others are assumed to do the same. A second pipeline, the last on all
    other axes, then checks that, and all ranks run with one layer on each stage, which finds faults on the others.

    Args:
        program: the program.
        layout: a layout or its text, such as ``"tp=8,pp=4,sp,distopt"``.
        ranks: the number of ranks; None for the fewest that the axes allow.
        micro_batches: of one data-parallel rank; None for the program's.
        routing: how tokens choose experts: ``"balanced"``, ``"skewed"``, or a file of recorded counts.
        dtype: of the weights: bfloat16 or float32.
        layers: ``"transformer_engine"``: the layers of ``workers.model.local_spec`` save and keep what those of
            Transformer Engine do; ``"local"``: all layers are counted as they are.
        every_rank: whether every rank runs.
        second: whether a second pipeline, and all ranks with one layer on each stage, check the first pipeline.
        show: is called as ranks start and end.

    Returns:
        What each rank used, what the ranks communicate, and the failure if there was one.

    Raises:
        VerifyError: the layout does not fit the program.
        DryRunError: the program needs data that a dry run does not have.
    """
    variant = layout_for(layout, ranks) if isinstance(layout, str) else layout
    if micro_batches is not None:
        if micro_batches < 1:
            raise DryRunError(f"micro_batches is {micro_batches}; expected at least 1", micro_batches=micro_batches)
        program = program.smaller(micro_batches=micro_batches * variant.layout.dp * variant.merged)
    _install()
    with engine_kernels():  # the config of a program may ask for kernels
        check_divisible(program, variant)
    programs = program, one_layer_a_stage(program, variant)
    step, small_step = (partial(train, one, variant, dtype, layers) for one in programs)
    return dry_run_of(step, variant, routing, every_rank=every_rank, second=second, small=small_step, show=show)


def dry_run_of(
    function: Callable[[CountingMode], Use],
    variant: Variant,
    routing: str = "balanced",
    *,
    every_rank: bool = False,
    second: bool = True,
    small: Callable[[CountingMode], Use] | None = None,
    show: Show = lambda what, ended, ranks: None,
) -> Outcome:
    """Run a function on the ranks of a layout, as ``dry_run`` runs a step.

    Args:
        function: builds what a rank needs, runs it, and returns what was used.
        variant: the layout.
        routing: how tokens choose experts.
        every_rank: whether every rank runs.
        second: whether a second pipeline runs, and all ranks with ``small``.
        small: the function with one layer on each stage; None to run no ranks but those of the pipelines.
        show: is called as ranks start and end.
    """
    began = time.perf_counter()
    _install()
    layout, log = variant.layout, CallLog()
    outcome = Outcome(variant.text, layout)
    with routed(routing_of(routing)), engine_kernels():
        first = list(range(layout.world_size)) if every_rank else pipeline_of(layout)
        show("all ranks" if every_rank else "one pipeline", 0, len(first))
        _run(function, first, log, outcome)
        outcome.calls = log.most()
        if not outcome.failure:
            outcome.warnings += log.unfinished()
        branches = {line for use in outcome.uses.values() for line, what in use.read if what == BRANCH}
        outcome.warnings += [f"a value that nobody knows decides a branch: {line}" for line in sorted(branches)]
        if second and not every_rank and not outcome.failure and layout.world_size > layout.pp:
            last, again = pipeline_of(layout, last=True), CallLog(log.broadcasts)
            show("a second pipeline", 0, len(last))
            _run(function, last, again, outcome)
            for ranks in zip(first, last, strict=True) if not outcome.failure else ():
                _compare(outcome, ranks, (log, again), is_balanced=routing == "balanced")
            if small is not None and not outcome.failure and layout.world_size > len(first) + len(last):
                _check_all_ranks(small, outcome, CallLog(log.broadcasts), show)
    outcome.seconds = time.perf_counter() - began
    return outcome


def _install() -> None:
    if not cpu.install():
        raise DryRunError(
            "this process sees a GPU, which Megatron would use: start it with the environment variable "
            "CUDA_VISIBLE_DEVICES empty"
        )


def _check_all_ranks(function: Callable[[CountingMode], Use], outcome: Outcome, log: CallLog, show: Show) -> None:
    """Run a function on every rank; add what failed, and warn of ranks that call other collectives than their peers.

    The ranks run one by one. If the calls of some do not match, or are others than those of the same stage, these run
    together with their peers.
    """
    layout = outcome.layout
    try:
        others = _differing_ranks(function, layout, log, show)
        suspects = log.unmatched().union(*others.values()) if others is not None else range(layout.world_size)
        if suspects:
            together = peers_of(layout, suspects)
            show("ranks that differ, together", 0, len(together))
            run_without_data(layout, together, function, CallLog(log.broadcasts))
    except SimulationError as error:
        outcome.failure = f"all ranks with one layer on each stage: {type(error).__name__}: {error}"
        return
    except Exception as error:  # a program may need more than one layer
        what = f"{type(error).__name__}: {error}"
        if not isinstance(error, MControllerError):
            what = f"{what} at {raising_line(error)}"
        outcome.warnings.append(f"all ranks cannot run with one layer on each stage: {what}; run every rank with --all")
        return
    outcome.warnings += [line for line in log.unfinished() if line not in outcome.warnings] + [
        f"ranks {members_text(ranks)} do not make the calls of rank {first}, which has the same stage; run every rank "
        "with --all"
        for first, ranks in (others or {}).items()
    ]


def _differing_ranks(
    function: Callable[[CountingMode], Use], layout: ParallelLayout, log: CallLog, show: Show
) -> dict[int, list[int]] | None:
    """Run a function on one rank after the other; return those that call others than the first rank of their stage.

    None if a rank fails, which may be because the others do not do what it does.
    """
    what, size = "all ranks with one layer on each stage", layout.world_size
    show(what, 0, size)
    try:
        run_without_data(
            layout, range(size), function, log, together=False, ended=lambda count: show(what, count, size)
        )
    except Exception as error:
        if isinstance(error, MControllerError) and not isinstance(error, SimulationError):
            raise
        return None  # all ranks raise it together, or none
    differing = {}
    for first, *others in zip(*layout.groups("pp"), strict=True):
        digest = log.digest(first, shapes=False)
        if different := [rank for rank in others if log.digest(rank, shapes=False) != digest]:
            differing[first] = different
    return differing


def _run(function: Callable[[CountingMode], Use], running: Sequence[int], log: CallLog, outcome: Outcome) -> None:
    """Run a function on some ranks, and add what they used, or what failed."""
    try:
        outcome.uses |= run_without_data(outcome.layout, running, function, log)
    except UnknownValue as error:
        raise DryRunError(f"{error}\nat {raising_line(error)}") from error
    except NotImplementedError as error:
        text = str(error).partition("\n")[0]
        raise DryRunError(f"an operation computes no shapes without data: {text}\nat {raising_line(error)}") from error
    except SimulationError as error:
        outcome.failure = f"{type(error).__name__}: {error}"
    except MControllerError:
        raise
    except Exception as error:  # whatever the program raises: the report has it
        if any(text in str(error) for text in ("not compiled with CUDA", "no NVIDIA driver")):
            raise DryRunError(
                "a tensor is moved to a CUDA device, which a dry run does not have: name none, as in tensor.cuda(), or "
                f"torch.cuda.current_device()\nat {raising_line(error)}"
            ) from error
        notes = "\n".join(getattr(error, "__notes__", ()))
        outcome.failure = f"{type(error).__name__}: {error}\nat {raising_line(error)}\n{notes}"


def _compare(outcome: Outcome, ranks: tuple[int, int], logs: tuple[CallLog, CallLog], *, is_balanced: bool) -> None:
    """Warn if two ranks of a stage, in different pipelines, do not do the same."""
    # Experts may get one token more than others, and a rank of cp more targets.
    same_shapes = is_balanced and outcome.layout.ep == outcome.layout.cp == 1
    digests = {log.digest(rank, shapes=same_shapes) for rank, log in zip(ranks, logs, strict=True)}
    peaks = [outcome.uses[rank].peak for rank in ranks]
    where = f"ranks {ranks[0]} and {ranks[1]} of one stage"
    if len(digests) > 1:
        outcome.warnings.append(f"{where} do not make the same calls; run every rank with --all")
    if is_balanced and max(peaks) > min(peaks) * (1 + _SAME):
        sizes = " and ".join(f"{peak / GIB:.2f}" for peak in peaks)
        outcome.warnings.append(f"{where} have peaks of {sizes} GiB; run every rank with --all")
