"""Verify that a parallel layout trains the model that one process trains, on simulated ranks without a GPU.

examples: mcontroller verify my_model.py:program --layouts tp=2,pp=2 tp=2,ep=2,sp
          mcontroller verify run.yaml actor_rollout_ref.parallel.tp=4
          mcontroller verify --steps 1 -- pretrain_gpt.py --tensor-model-parallel-size 2 ...
          mcontroller verify --commits Megatron-LM core_v0.16.1..main --program my_model.py:program

Of a run, each role is verified in its own layout, with a small model of the same structure; of a script of Megatron-LM,
its model provider and forward step, in the layout of its arguments. A layout is a list of axes
(tp, pp, cp, dp, ep, etp, vpp) and flags: sp (sequence parallelism) and distopt (the distributed optimizer).
docs/verify.md describes the program. The exit status is 0 if all layouts are equal, and 1 if not, or if the program
cannot be verified.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcontroller.output import output_file
from parallel_state.verify.layouts import Variant, parse_layout
from parallel_state.verify.outcome import Outcome
from parallel_state.verify.program import Program, VerifyError, load_program
from parallel_state.verify.verifier import Verifier
from trainer.run import commits_table
from trainer.run.commits_table import positive

_COLUMNS = "{:<32} {:>5}  {:<7} {:>8} {:>7}  {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "program", nargs="?", help="FILE.py:NAME or MODULE:NAME of a Program, a run's YAML, or a Megatron script"
    )
    parser.add_argument("rest", nargs="*", help="key=value for the YAML, or, after --, the command line of the script")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="such as tp=2,pp=2; default: the smallest ones")
    chosen.add_argument("--all", action="store_true", help="every layout of up to --ranks ranks that fits the program")
    parser.add_argument(
        "--ranks",
        type=positive,
        default=8,
        help="the most ranks of a layout of --all or a run; default: 8",
    )
    parser.add_argument("--full-size", action="store_true", help="do not make a run or a script small")
    parser.add_argument("--steps", type=positive, default=2, help="training steps in each layout; default: 2")
    parser.add_argument("--exact", action="store_true", help="compute in float64, to tell faults from rounding")
    parser.add_argument("--save", type=output_file, metavar="FILE", help="write the training of one process to it")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with what --save wrote elsewhere")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the outcomes to this file")
    commits_table.add_arguments(parser)


@dataclass(frozen=True)
class _Part:
    """A program with the layouts that it is verified in: one of several in a run, each with a name.

    Attributes:
        name: the role; empty if there is one program.
        program: the program.
        layouts: its own layouts; empty for the smallest ones.
    """

    name: str
    program: Program
    layouts: Sequence[Variant]

    def file(self, path: Path) -> Path:
        """Return the file of this program."""
        return path.with_stem(f"{path.stem}-{self.name}") if self.name else path


def run(arguments: argparse.Namespace) -> int:
    """Verify the layouts, print a table and what differs, for each cause once, and return 1 if something does."""
    for module in ("megatron", "torch", r"parallel_state\.simulated\.trace"):
        warnings.filterwarnings("ignore", module=module)
    given = [parse_layout(text) for text in arguments.layouts or ()]
    if arguments.commits:
        return commits_table.run_commits(arguments)
    if not arguments.program:
        raise VerifyError("name a program, such as my_model.py:program, or --commits")
    parts, verifiers = _parts(arguments), list[Verifier]()
    began = time.perf_counter()
    outcomes = _verified(parts, verifiers, arguments, given)
    if not outcomes:
        raise VerifyError(f"no layout of up to {arguments.ranks} ranks fits the program; give more --ranks")
    different = [(part, outcome) for part, outcome in outcomes if not outcome.equal]
    causes: dict[tuple[str, ...], list[tuple[_Part, Outcome]]] = {}
    for part, outcome in different:
        causes.setdefault(outcome.cause(), []).append((part, outcome))
    for same in causes.values():
        title = "; ".join(f"{part.name} {outcome.layout}".strip() for part, outcome in same)
        sys.stdout.write(f"\n{title}\n" + "".join(f"  {line}\n" for line in same[0][1].lines()))
    text = "layouts train the model of one process"
    if different:
        text = f"of {len(outcomes)} layouts do not train the model of one process"
    count = len(different) or len(outcomes)
    sys.stdout.write(f"\n{count} {text} in {time.perf_counter() - began:.1f} s\n")
    for part, verifier in zip(parts, verifiers, strict=True):
        of = f" of {part.name}" if part.name else ""
        sys.stdout.write(f"rounding{of}: below {verifier.tolerance:.1e} of the largest value of a tensor\n")
        sys.stdout.write(f"fingerprint of one process{of}: {verifier.fingerprint}\n")
    if arguments.json:
        _write_json(arguments.json, dict(zip((part.name for part in parts), verifiers, strict=True)), outcomes)
    return 1 if different else 0


def _verified(
    parts: Sequence[_Part], verifiers: list[Verifier], arguments: argparse.Namespace, given: Sequence[Variant]
) -> list[tuple[_Part, Outcome]]:
    """Add a verifier for each part, and print and return the outcomes of its layouts."""
    verified: list[tuple[_Part, Outcome]] = []
    for index, part in enumerate(parts):
        verifiers.append(Verifier(part.program, steps=arguments.steps, exact=arguments.exact))
        if not index:
            sys.stdout.write(_COLUMNS.format("layout", "ranks", "equal", "largest", "seconds", "first difference\n"))
        if arguments.save:
            verifiers[-1].save(part.file(arguments.save))
        outcomes = _outcomes(part, verifiers[-1], arguments, given)
        verified += [(part, outcome) for outcome in _printed(part.name, outcomes)]
    return verified


def _parts(arguments: argparse.Namespace) -> list[_Part]:
    """Return the program that is named, the roles of a run, or a script."""
    if arguments.program.endswith(".py"):
        from workers.verify.megatron_script import script_program

        program, layout = script_program(arguments.program, arguments.rest, shrinks=not arguments.full_size)
        return [_Part("", program, [layout])]
    if not arguments.program.endswith((".yaml", ".yml")):
        if arguments.rest:
            text = f"{arguments.program} is a Program, and takes no {' '.join(arguments.rest)}: pass --layouts"
            raise VerifyError(text, given=arguments.rest)
        return [_Part("", load_program(arguments.program), ())]
    from trainer.run.config import read_run_config
    from trainer.run.model_roles import role_programs

    config = read_run_config(arguments.program, arguments.rest)
    programs = role_programs(config, most_ranks=arguments.ranks, shrinks=not arguments.full_size)
    return [_Part(key, program, [program.role.variant]) for key, program in programs.items()]


def _outcomes(
    part: _Part, verifier: Verifier, arguments: argparse.Namespace, given: Sequence[Variant]
) -> Iterator[Outcome]:
    def verify(layout: str | Variant) -> Outcome:
        variant = parse_layout(layout) if isinstance(layout, str) else layout
        try:
            return verifier.verify(variant)
        except VerifyError as error:  # other layouts go on
            return Outcome(variant.text, variant.layout.world_size, failure=f"VerifyError: {error}")

    if arguments.against:
        yield verifier.against(part.file(arguments.against))
    if given or (part.layouts and not arguments.all):
        yield from map(verify, given or part.layouts)
    else:
        variants = verifier.all_layouts(arguments.ranks) if arguments.all else verifier.default_layouts()
        yield from map(verify, variants)


def _printed(name: str, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    for outcome in outcomes:
        figures = outcome.ranks, "yes" if outcome.equal else "NO", f"{outcome.largest:.1e}", f"{outcome.seconds:.1f}"
        sys.stdout.write(_COLUMNS.format(f"{name} {outcome.layout}".strip(), *figures, outcome.first()).rstrip() + "\n")
        sys.stdout.flush()
        yield outcome


def _write_json(path: Path, verifiers: dict[str, Verifier], outcomes: Sequence[tuple[_Part, Outcome]]) -> None:
    programs = {
        name: {
            "tolerance": verifier.tolerance,
            "fingerprint": verifier.fingerprint,
            "layouts": [outcome.as_json() for part, outcome in outcomes if part.name == name],
        }
        for name, verifier in verifiers.items()
    }
    path.write_text(json.dumps(programs.get("", programs), indent=1) + "\n")
