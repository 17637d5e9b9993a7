"""How many faults does verify find? Changes every collective and every scale of parallel code, one at a time.

    python -m examples.verify.mutations [--files PART ...] [--list]

A mutation removes a collective or a scale, doubles its result, or moves its statement past a neighbouring one, in the
code of a function while it stays in place. Prints for each whether verify finds it on small layouts of the two
examples: found, equivalent (the training has the same bits), missed, or not reached by any of the layouts; and whether
the named place is that of the changed line. In a forward pass, that is the module that ran it, or the one around it; in
a backward pass, a module whose operation ran it, and that operation; after that, what the line computes: gradients, or
their norm. An error names the function of the line, or that module or operation.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import torch

from parallel_state.cpu.literals import rewrite
from parallel_state.verify import Outcome, Verifier
from parallel_state.verify.program import load_program

HERE = Path(__file__).parent
Operation = torch.autograd.function.BackwardCFunction  # of the graph of autograd: a call of an autograd.Function
DENSE = ("tp=2", "tp=2,sp", "cp=2", "dp=2", "dp=2,distopt", "pp=2", "pp=2,vpp=2")
EXPERTS = ("ep=2", "tp=2,ep=2,etp=1,sp", "tp=2,ep=2,sp", "dp=2", "cp=2")
MODULES = {
    "megatron.core.tensor_parallel.mappings": DENSE[:2] + EXPERTS[:3],
    "megatron.core.tensor_parallel.layers": DENSE[:2],
    "megatron.core.tensor_parallel.cross_entropy": DENSE[:1],
    "megatron.core.distributed.finalize_model_grads": ("tp=2,sp", "pp=2", "dp=2", "cp=2", *EXPERTS[:1]),
    "megatron.core.distributed.param_and_grad_buffer": ("dp=2", "dp=2,distopt", *EXPERTS[:1]),
    "megatron.core.distributed.distributed_data_parallel": ("dp=2", *EXPERTS[:3]),
    "megatron.core.optimizer.clip_grads": ("tp=2", "pp=2", "dp=2,distopt", *EXPERTS[:1]),
    "megatron.core.pipeline_parallel.schedules": ("dp=2", "cp=2", "pp=2", "pp=2,vpp=2"),
    "megatron.core.transformer.moe.router": EXPERTS,
    "megatron.core.transformer.moe.moe_utils": EXPERTS,
    "megatron.core.transformer.moe.token_dispatcher": EXPERTS,
    "megatron.core.models.common.embeddings.rope_utils": ("cp=2",),
    "megatron.core.models.common.embeddings.rotary_pos_embedding": ("cp=2",),
    "megatron.core.models.common.embeddings.language_model_embedding": DENSE[:2],
    "workers.model.local_attention": ("cp=2",),
    "workers.model.local_modules": ("tp=2,sp",),
}
"""Module -> the layouts on which its mutations are tried; those with ``ep`` are of the mixture of experts."""

EQUIVALENT = {
    "double collective torch.distributed.all_reduce(logits_max": "the number that a softmax subtracts first cancels",
}
"""Part of a mutation's text -> why it changes nothing but the rounding."""

COLLECTIVE = re.compile(
    r"_?(all_reduce|reduce_scatter|all_gather|all_to_all|broadcast|dist_(all_gather|reduce_scatter)_func|"
    r"(reduce_from|copy_to|gather_from|scatter_to|reduce_scatter_to|all_gather_last_dim_from|reduce_scatter_last_dim_to)_"
    r"\w+|_reduce|_split_along_\w+|_gather_along_\w+|_reduce_scatter_along_\w+)(_into_tensor|_tensor|_single|_coalesced)?"
)
SCALE = re.compile(r"(world_)?size|num_micro\w*|\w*scal(e|ing)\w*|num_tokens|max_norm|clip_coeff", re.IGNORECASE)


@dataclass(frozen=True)
class Mutation:
    """A change of one place: ``node`` counts the places of a file in the order of ``ast.walk``."""

    module: str
    node: int
    how: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}:{self.line} in {self.function}: {self.how} {self.text}"


class Reached:
    """Where the changed line ran first: the classes of the modules that ran it, the innermost first, and the pass."""

    def __init__(self) -> None:
        self.modules: list[str] | None = None
        self.during, self.operation = "forward", ""

    def __call__(self) -> None:
        if self.modules is None:
            frame, found = sys._getframe(1), modules_of(sys._getframe(1))
            while not found and frame is not None:
                operations = [each for each in frame.f_locals.values() if isinstance(each, Operation)]
                found = next((getattr(each, "called_by", []) for each in operations), [])
                self.operation = next((each.name().removesuffix("Backward") for each in operations), "")
                frame = frame.f_back
            self.modules = found
            self.during = "backward" if self.operation else "forward" if found else "after"


def modules_of(frame: FrameType | None) -> list[str]:
    """Return the classes of the modules that are running."""
    found = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        name = type(owner).__name__
        # DistributedDataParallel also reduces and updates
        if isinstance(owner, torch.nn.Module) and name not in (*found, "DistributedDataParallel"):
            found.append(name)
        frame = frame.f_back
    return found


def remember_caller(module: torch.nn.Module, _: object, output: object) -> None:
    """Write the running modules on the operations of autograd that a module has called: a hook of all modules."""
    values = output if isinstance(output, tuple | list) else [output]
    left = [each.grad_fn for each in values if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    running, seen = modules_of(sys._getframe(1)), set(left)
    while left:
        node = left.pop()
        if isinstance(node, Operation):
            if hasattr(node, "called_by"):
                continue
            node.called_by = running
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        left += new


def places(tree: ast.AST) -> Iterator[tuple[int, ast.expr | ast.stmt, str]]:
    """Yield the number, the node and the kind of every collective and scale."""
    for number, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if COLLECTIVE.fullmatch(name) and node.args:
                yield number, node, "collective"
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div):
            factor = node.right if isinstance(node, ast.BinOp) else node.value
            names = [each.id for each in ast.walk(factor) if isinstance(each, ast.Name)]
            names += [each.attr for each in ast.walk(factor) if isinstance(each, ast.Attribute)]
            if any(SCALE.fullmatch(name) for name in names):
                yield number, node, "scale"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def mutations(module: str) -> Iterator[Mutation]:
    tree = tree_of(module)
    for number, node, kind in places(tree):
        owner = next(((n, f) for n, f in functions(tree) if f.lineno <= node.lineno <= (f.end_lineno or 0)), None)
        if owner is not None:
            moves = ("move",) if neighbours(tree, node) else ()
            for how in ("remove", "double", *moves):
                yield Mutation(module, number, how, node.lineno, owner[0], f"{kind} {ast.unparse(node)[:60]}")


def tree_path(module: str) -> str:
    return inspect.getsourcefile(importlib.import_module(module)) or ""


def tree_of(module: str) -> ast.Module:
    return rewrite(Path(tree_path(module)).read_bytes())


def function_of(mutation: Mutation) -> FunctionType | None:
    """Return the function that has a place; None if it was replaced on a CPU."""
    found: object = sys.modules[mutation.module]
    for name in mutation.function.split("."):
        found = vars(found).get(name)
        found = getattr(found, "__func__", found)
    while not isinstance(found, type) and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found if isinstance(found, FunctionType) and found.__module__ == mutation.module else None


@contextlib.contextmanager
def planted(changes: Mapping[Mutation, Reached]) -> Iterator[None]:
    """Return a context manager in which functions have mutated code; of several mutations, all of one module."""
    before = {}
    for module in {each.module for each in changes}:
        tree = tree_of(module)
        nodes = {number: node for number, node, _ in places(tree)}
        own = [each for each in changes if each.module == module]
        new = {}
        for each in own:
            new |= replacements(tree, nodes[each.node], each.how, f"_reached[{each.node}]")
        code = compile(ast.fix_missing_locations(Replace(new).visit(tree)), tree_path(module), "exec")
        vars(sys.modules[module])["_reached"] = {each.node: changes[each] for each in own}
        for mutation in own:
            function = function_of(mutation)
            if function is not None:
                before.setdefault(function, function.__code__)
                function.__code__ = code_of(code, mutation.function)
    hook = torch.nn.modules.module.register_module_forward_hook(remember_caller)
    try:
        yield
    finally:
        hook.remove()
        for function, code in before.items():
            function.__code__ = code


def code_of(code: CodeType, function: str) -> CodeType:
    for name in function.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    return code


class Replace(ast.NodeTransformer):
    def __init__(self, new: Mapping[ast.AST, ast.AST]) -> None:
        self._new = new

    def visit(self, node: ast.AST) -> ast.AST:
        found = self._new.get(node)
        return self.generic_visit(node) if found is None else ast.copy_location(found, node)


def neighbours(tree: ast.AST, node: ast.AST) -> tuple[ast.stmt, ast.stmt] | None:
    """Return the statement of a place, and one that can change places with it: the next, or else the one before."""
    simple = (ast.Expr, ast.Assign, ast.AugAssign)
    for parent in ast.walk(tree):
        for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            for index, each in enumerate(block if isinstance(block, list) else ()):
                if isinstance(each, simple) and any(part is node for part in ast.walk(each)):
                    beside = [*block[index + 1 : index + 2], *block[max(index - 1, 0) : index]]
                    is_text = (isinstance(getattr(other, "value", None), ast.Constant) for other in beside)
                    found = [o for o, text in zip(beside, is_text, strict=True) if isinstance(o, simple) and not text]
                    return (each, found[0]) if found else None
    return None


def replacements(tree: ast.AST, node: ast.AST, how: str, reached: str) -> dict[ast.AST, ast.AST]:
    """Return what replaces the nodes of a tree."""
    if how != "move":
        return {node: changed(node, how, reached)}
    own, other = neighbours(tree, node)
    noted = ast.If(ast.Constant(True), [*ast.parse(f"{reached}()").body, copy.deepcopy(own)], [])
    return {own: copy.deepcopy(other), other: noted}


def changed(node: ast.AST, how: str, reached: str) -> ast.AST:
    """Return what replaces a place; it notes that it ran. ``how="note"`` changes nothing else."""
    if isinstance(node, ast.AugAssign):
        after = {"remove": "", "double": f"; {ast.unparse(node)}; {ast.unparse(node.target)} *= 2"}
        text = f"{reached}(){after.get(how, f'; {ast.unparse(node)}')}"
        return ast.If(ast.Constant(True), ast.parse(text).body, [])
    if how == "note":
        new = ast.unparse(node)
    elif isinstance(node, ast.BinOp):
        new = ast.unparse(node.left) if how == "remove" else f"({ast.unparse(node)}) * 2"
    else:
        kept = ast.unparse(next(each for each in node.args if "group" not in ast.unparse(each)))
        if how == "remove":
            new = f"_removed({kept})" if in_place(node) else kept
        else:
            doubled = f"_doubled({ast.unparse(node)}, {kept})"
            new = doubled if in_place(node) else f"({ast.unparse(node)}) * 2"
        new = new.replace("_removed", "(lambda tensor: None)")
        twice = "[each.mul_(2) for each in (tensor if isinstance(tensor, list) else [tensor])]"
        waited = "work.wait() if hasattr(work, 'wait') else None"
        new = new.replace("_doubled", f"(lambda work, tensor: ({waited}, {twice}, work)[2])")
    return ast.parse(f"({reached}(), {new})[1]", mode="eval").body


def in_place(node: ast.Call) -> bool:
    """Whether a collective writes into its first argument: those of torch.distributed."""
    return bool(re.match(r"(torch\.distributed|dist)[._]", ast.unparse(node.func)))


def reaching(found: list[Mutation], verifiers: dict[str, Verifier]) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """Return for each place the programs and layouts that run it."""
    cases = dict.fromkeys(case for name in {each.module for each in found} for case in cases_of(name))
    reached = {(each.module, each.node): [] for each in found}
    for kind, text in cases:
        notes = {dataclasses.replace(each, how="note"): Reached() for each in found if each.how == "remove"}
        with planted(notes):
            assert verifiers[kind].verify(text).equal, text
        for each, note in notes.items():
            if note.modules is not None and (kind, text) in cases_of(each.module):
                reached[each.module, each.node].append((kind, text))
    return reached


def cases_of(module: str) -> list[tuple[str, str]]:
    return [("moe" if ".moe." in module or "ep=" in text else "gpt", text) for text in MODULES[module]]


def tried(mutation: Mutation, cases: list[tuple[str, str]], verifiers: dict[str, Verifier]) -> tuple[str, str]:
    """Return the result of a mutation and its details."""
    same_bits = True
    for kind, text in cases:
        reached = Reached()
        with planted({mutation: reached}):
            outcome = verifiers[kind].verify(text)
        if not outcome.equal:
            located = place_is_right(outcome, mutation, reached, verifiers[kind].records(1).sources)
            return "found", f"{text}: {located} {outcome.first()[:150]}"
        same_bits = same_bits and outcome.bits == clean(verifiers[kind], text).bits
    if same_bits:
        return "equivalent", "the training has the same bits"
    return next((("equivalent", why) for text, why in EQUIVALENT.items() if text in str(mutation)), ("MISSED", ""))


@functools.cache
def clean(verifier: Verifier, text: str) -> Outcome:
    return verifier.verify(text)


def place_is_right(outcome: Outcome, mutation: Mutation, reached: Reached, sources: Mapping[str, str]) -> str:
    """Return the pass in which a line ran, or that an error ended it, and whether the report names its place."""
    place, modules, during = outcome.place, reached.modules or [], reached.during
    names = [] if place is None else [place.source, *(each.partition("(")[2] for each in place.computed_by)]
    named = [each.split(",")[0] for each in names]
    around = "" if place is None else sources.get(place.module.rpartition(".")[0], "").split(",")[0]
    is_right = any(each in modules[:2] for each in named) or around in modules[:1]
    if outcome.failure is not None:
        during, function = "error", mutation.function.rpartition(".")[2]
        texts = [
            f"{mutation.module.replace('.', '/')}.py:\\d+ in {function}\n",
            f"Function {reached.operation}Backward",
        ]
        texts += [f"\nin \\S+ \\({each}," for each in modules[:2]]
        is_right = is_right or any(re.search(each, outcome.failure + "\n") for each in texts)
    elif during == "after":
        kinds = {each.kind for each in outcome.differences}
        of_gradient = bool({"gradient", "buffer"} & kinds)
        in_loss = place is not None and not place.computed_by and place.direction == "backward"
        is_right = in_loss if "schedules" in mutation.module else place is None and of_gradient
        if "clip_grads" in mutation.module or "param_sync" in mutation.function:
            is_right = place is None and not of_gradient
    elif during == "backward":
        is_right = (
            is_right and place is not None and any(f" {reached.operation} at " in each for each in place.computed_by)
        )
    return f"[{during}]" if is_right else f"[{during}, ELSEWHERE: {modules[:2]} {reached.operation}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--files", nargs="+", default=[""], metavar="PART", help="only modules with these parts in names"
    )
    parser.add_argument("--list", action="store_true", help="print the mutations and stop")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    programs = {name: load_program(f"{HERE / name}.py:program").smaller(num_layers=2) for name in ("gpt", "moe")}
    chosen = [name for name in MODULES if any(part in name for part in arguments.files)]
    found = [each for name in chosen for each in mutations(name)]
    if arguments.list:
        print("\n".join(map(str, found)))
        return
    programs["gpt"] = load_program(f"{HERE / 'gpt'}.py:program")  # four layers, for interleaved stages
    verifiers = {name: Verifier(program) for name, program in programs.items()}
    for verifier in verifiers.values():
        for step in (1, 2):
            verifier.records(step)  # of one process without a mutation
    began, results, places_found = time.perf_counter(), Counter(), Counter()
    reached = reaching(found, verifiers)
    for mutation in found:
        cases = reached[mutation.module, mutation.node]
        result, details = tried(mutation, cases, verifiers) if cases else ("not reached", "")
        results[result] += 1
        if result == "found":
            places_found[details.partition("[")[2].partition("]")[0].partition(":")[0]] += 1
        print(f"{result:12} {mutation}\n             {details}" if details else f"{result:12} {mutation}", flush=True)
    print(dict(results), dict(places_found), f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
