"""Run a training step of the real model in its real layout without a GPU: its memory, its FLOPs, and what would hang.

examples: mcontroller dry-run my_model.py:program --layouts tp=8,pp=8,cp=4,ep=32,etp=1,sp,distopt --ranks 256
          mcontroller dry-run run.yaml actor_rollout_ref.parallel.tp=4 --gpu H200
          mcontroller dry-run -- pretrain_gpt.py --tensor-model-parallel-size 2 ...

Tensors have shapes and no values. One rank of each pipeline stage runs, then another one at other coordinates, which
must do the same; then all ranks with one layer a stage. --all runs every rank whole.
docs/verify.md describes the report and its limits. The exit status is 1 if a rank does not fit the GPU, a collective
does not match, or the step cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcontroller.output import output_file, progress_bar
from parallel_state.dry_run.errors import DryRunError
from parallel_state.dry_run.outcome import Outcome, gpu_bytes
from parallel_state.dry_run.run import Show, dry_run, layout_for
from parallel_state.verify.program import load_program
from workers.planning import planning

if TYPE_CHECKING:
    from trainer.run.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("program", help="FILE.py:NAME or MODULE:NAME of a Program, a run's YAML, or a Megatron script")
    parser.add_argument("rest", nargs="*", help="key=value for the YAML, or, after --, the command line of the script")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="of a Program, such as tp=8,pp=4,sp,distopt")
    parser.add_argument("--ranks", type=int, help="of a Program or script; default: the fewest that the axes allow")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="of a data-parallel rank of a Program or script")
    parser.add_argument("--gpu", default="H100", help="a name, such as H200, or GiB of memory; default: H100")
    parser.add_argument(
        "--routing",
        default="balanced",
        metavar="HOW",
        help="of tokens to experts: balanced, skewed, or a file of counts",
    )
    parser.add_argument(
        "--layers",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="whose memory is counted, of a Program or script; of a run, model.transformer_impl decides",
    )
    parser.add_argument("--all", action="store_true", help="run every rank, not one of each stage")
    parser.add_argument("--once", action="store_true", help="run one pipeline only, and check no other ranks")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the outcomes to this file")


def run(arguments: argparse.Namespace) -> int:
    """Print a report for each layout or role, and return 1 if one of them fails or does not fit."""
    gpu = gpu_bytes(arguments.gpu)
    _check_arguments(arguments)
    chosen = {"routing": arguments.routing, "every_rank": arguments.all, "second": not arguments.once}
    if arguments.program.endswith((".yaml", ".yml")):
        from trainer.run.config import read_run_config  # Ray and omegaconf, which a Program does not need

        with planning():  # without weights and engines, as check
            return report_roles(read_run_config(arguments.program, arguments.rest), gpu, arguments.json, **chosen)
    outcomes = _reported(_layouts(arguments, chosen), gpu)
    return _ended(arguments.json, outcomes, gpu, fits=all(outcome.fits(gpu) for outcome in outcomes.values()))


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raise DryRunError for arguments that this kind of program does not have."""
    name = arguments.program
    if name.endswith((".yaml", ".yml")):
        given = [option for option in ("layouts", "ranks", "micro_batches") if getattr(arguments, option) is not None]
        if given:
            options = ", ".join(f"--{option.replace('_', '-')}" for option in given)
            raise DryRunError(f"{name} sets its layouts and rows: leave {options} out, and give key=value", given=given)
    elif arguments.rest and not name.endswith(".py"):
        raise DryRunError(f"{name} is a Program, and takes no {' '.join(arguments.rest)}", given=arguments.rest)


def report_roles(config: RunConfig, gpu: int, file: Path | None = None, **chosen: Any) -> int:
    """Print a report for each call of the roles of a run, and what the roles of a GPU need together.

    Args:
        config: the configuration of the run.
        gpu: bytes of a GPU.
        file: where the outcomes are written; None for nowhere.
        chosen: arguments of ``dry_run_of``.

    Returns:
        1 if a call fails, or the roles of a GPU do not fit.
    """
    from trainer.run.model_roles import role_calls  # as in ``run``
    from trainer.run.shared_gpus import shared_gpus_of_run

    calls = role_calls(config).items()
    left_out = [name for name, call in calls if call.needs_every_rank and not chosen.get("every_rank")]
    possible = [(name, partial(call.outcome, **chosen)) for name, call in calls if name not in left_out]
    outcomes = _reported(possible, gpu)
    if any(outcome.failure for outcome in outcomes.values()):
        return _ended(file, outcomes, gpu, fits=False)
    shared = shared_gpus_of_run(config, outcomes)
    lines = [*shared.lines(gpu), *(f"{name} needs every rank, and is left out: run it with --all" for name in left_out)]
    sys.stdout.write("\n".join([*lines, ""]))
    return _ended(file, outcomes, gpu, fits=shared.peak(config.trainer.offload) <= gpu, gpus=shared.as_json())


def _ended(file: Path | None, outcomes: Mapping[str, Outcome], gpu: int, *, fits: bool, **more: Any) -> int:
    """Write what ``--json`` asks for, and return the exit status."""
    if file is not None:
        content = {"fits": fits, "outcomes": {name: one.as_json(gpu) for name, one in outcomes.items()}, **more}
        file.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if fits else 1


def _reported(parts: Iterable[tuple[str, Callable[..., Outcome]]], gpu: int) -> dict[str, Outcome]:
    """Run each part, print its report, and return the outcomes by name."""
    for module in ("megatron", "torch", r"parallel_state\.simulated\.trace"):
        warnings.filterwarnings("ignore", module=module)
    outcomes, report = dict[str, Outcome](), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # for what programs and Megatron print
        for name, make in parts:
            with _progress(name) as show:
                outcomes[name] = outcome = make(show=show)
            head = [] if name == outcome.text else [name]
            report.write("\n".join([*head, *outcome.lines(gpu), "", ""]))
            report.flush()
    return outcomes


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Show]:
    """Show how many ranks have run: a bar if standard error is a terminal, otherwise a line at the start."""
    if not sys.stderr.isatty():
        sys.stderr.write(f"dry run of {name} ...\n")
        yield lambda what, ended, ranks: None
        return
    with progress_bar(name) as update:
        yield lambda what, ended, ranks: update(description=f"{name}: {what}", completed=ended, total=ranks)


def _layouts(arguments: argparse.Namespace, chosen: dict[str, Any]) -> Iterator[tuple[str, Callable[..., Outcome]]]:
    """Yield the name of each layout of a program or script, and what runs it."""
    if arguments.program.endswith(".py"):
        from workers.verify.megatron_script import script_program

        program, variant = script_program(arguments.program, arguments.rest, shrinks=False)
        axes = [axis for axis in variant.text.split(",") if arguments.ranks is None or not axis.startswith("dp=")]
        layouts = arguments.layouts or [",".join(axes)]
    else:
        program, layouts = load_program(arguments.program), arguments.layouts or [""]
    for text in layouts:
        variant = layout_for(text, arguments.ranks)
        yield (
            variant.text or "one rank",
            partial(
                dry_run, program, variant, micro_batches=arguments.micro_batches, layers=arguments.layers, **chosen
            ),
        )
