"""Run a training step of the real model in its real layout without a GPU: its memory, its FLOPs, and what would hang.

examples: mcontroller dry-run my_model.py:program --layouts tp=8,pp=8,cp=4,ep=32,etp=1,sp,distopt --ranks 256
          mcontroller dry-run run.yaml actor_rollout_ref.parallel.tp=4 --gpu H200
          mcontroller dry-run -- pretrain_gpt.py --tensor-model-parallel-size 2 ...

Tensors have shapes and no values. One rank of each pipeline stage runs, then another one at other coordinates, which
must do the same; then, of a program or script, all ranks with one layer a stage. --all runs every rank whole.
docs/verify.md describes the report and its limits. The exit status is 1 if a rank does not fit the GPU, a collective
does not match, or the step cannot run.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_state.dry_run.outcome import Outcome, gpu_bytes
from parallel_state.dry_run.run import dry_run, layout_for
from parallel_state.verify.program import load_program

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
    parser.add_argument("--all", action="store_true", help="run every rank, not one of each stage")
    parser.add_argument("--once", action="store_true", help="run one pipeline only, and check no other ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to this file")


def run(arguments: argparse.Namespace) -> int:
    """Print a report for each layout or role, and return 1 if one of them fails or does not fit."""
    gpu = gpu_bytes(arguments.gpu)
    outcomes = _reported(_parts(arguments), gpu)
    if arguments.json:
        content = {name: outcome.as_json(gpu) for name, outcome in outcomes.items()}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(outcome.fits(gpu) for outcome in outcomes.values()) else 1


def report_roles(config: RunConfig, gpu_memory: float | None) -> int:
    """Print a report for each call of the roles of a run, as ``run`` does.

    Args:
        config: the configuration of the run.
        gpu_memory: of a GPU, in units of 2**30 bytes; None for 80.
    """
    from trainer.run.dry_run_roles import role_calls  # as in ``_parts``

    gpu = gpu_bytes(str(80 if gpu_memory is None else gpu_memory))
    outcomes = _reported(role_calls(config).items(), gpu)
    return 0 if all(outcome.fits(gpu) for outcome in outcomes.values()) else 1


def _reported(parts: Iterable[tuple[str, Callable[[], Outcome]]], gpu: int) -> dict[str, Outcome]:
    """Run each part, print its report, and return the outcomes by name."""
    for module in ("megatron", "torch", r"parallel_state\.simulated\.trace"):
        warnings.filterwarnings("ignore", module=module)
    outcomes: dict[str, Outcome] = {}
    for name, make in parts:
        sys.stderr.write(f"dry run of {name} ...\n")
        outcomes[name] = outcome = make()
        sys.stdout.write("\n".join([name, *outcome.lines(gpu), "", ""]))
        sys.stdout.flush()
    return outcomes


def _parts(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Yield the name of each layout, or of each call of a role, and what runs it."""
    chosen = {"routing": arguments.routing, "every_rank": arguments.all, "second": not arguments.once}
    if arguments.program.endswith((".yaml", ".yml")):
        from trainer.run.config import read_run_config  # Ray and omegaconf, which a Program does not need
        from trainer.run.dry_run_roles import role_calls

        config = read_run_config(arguments.program, arguments.rest)
        for name, call in role_calls(config).items():
            yield name, lambda call=call: call(**chosen)  # type: ignore[misc]
        return
    if arguments.program.endswith(".py"):
        from workers.verify.megatron_script import script_program

        program, variant = script_program(arguments.program, arguments.rest, shrinks=False)
        layouts = arguments.layouts or [variant.text]
    else:
        program, layouts = load_program(arguments.program), arguments.layouts or [""]
    for text in layouts:
        variant = layout_for(text, arguments.ranks)
        yield (
            variant.text or "one rank",
            lambda variant=variant: dry_run(  # type: ignore[misc]
                program, variant, micro_batches=arguments.micro_batches, **chosen
            ),
        )
