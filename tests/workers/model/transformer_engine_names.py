"""What Megatron-Core takes from Transformer Engine, and the names and parameters that a release of it has.

``python -m tests.workers.model.transformer_engine_names FOLDER VERSION`` writes the file of the release whose wheel is
unpacked in the folder (``pip download --no-deps transformer-engine==VERSION``); it needs no GPU, and imports nothing of
the wheel. The file has names only, of what the installed Megatron-Core and the stand-in of the tests use.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "transformer_engine"
FILE = Path(__file__).with_name("transformer_engine_names.json")
STAND_IN = Path(__file__).parents[2] / "fake_cuda" / "site-packages"


class Uses:
    """The names of Transformer Engine in one source file, and the keywords that they are called with.

    Attributes:
        names: dotted names that are imported or read.
        keywords: by dotted name, the keyword arguments of its calls; of a class, those of ``__init__`` and with the
            name ``NAME.forward`` those of its forward pass.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.names: set[str] = set()
        self.keywords: dict[str, set[str]] = {}
        self._local: dict[str, str] = {}
        for node in ast.walk(tree):
            self._import(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and (name := self._dotted(node)):
                self.names.add(name)
            if isinstance(node, ast.Call) and (name := self._dotted(node.func)):
                self._call(name, node, {})
            if isinstance(node, ast.ClassDef):
                self._class(node)

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    self._local[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE
                    self.names.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE and not node.level:
            for alias in node.names:
                self._local[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.names.add(f"{node.module}.{alias.name}")

    def _dotted(self, node: ast.AST) -> str:
        """The dotted name of an expression such as ``te.pytorch.Linear``; "" if it is none of the package."""
        if isinstance(node, ast.Name):
            return self._local.get(node.id, "")
        if isinstance(node, ast.Attribute) and (inner := self._dotted(node.value)):
            return f"{inner}.{node.attr}"
        return ""

    def _class(self, node: ast.ClassDef) -> None:
        for base in filter(None, map(self._dotted, node.bases)):
            by_key = {
                (target.value.id, target.slice.value)
                for target in ast.walk(node)
                if isinstance(target, ast.Subscript)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and isinstance(target.slice, ast.Constant)
            }
            extra = {name: {key for other, key in by_key if other == name} for name, _ in by_key}
            for call in (call for call in ast.walk(node) if isinstance(call, ast.Call)):
                function = call.func
                if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "super()":
                    method = {"__init__": base, "forward": f"{base}.forward"}.get(function.attr)
                    if method:
                        self._call(method, call, extra)

    def _call(self, name: str, call: ast.Call, extra: Mapping[str, set[str]]) -> None:
        for keyword in call.keywords:
            spread = extra.get(ast.unparse(keyword.value), set())
            self.keywords.setdefault(name, set()).update({keyword.arg} if keyword.arg else spread)


class Source:
    """The names and parameters in the source of a package, without importing it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        """Return whether a dotted name is a module, or defined in one; attributes of classes count as defined."""
        return self._file(name) is not None or self._definition(name) is not None

    def parameters(self, name: str) -> list[str] | None:
        """Return the parameters of a function, of the constructor of a class, or of a method.

        None if it is not known, or if any keyword is accepted.
        """
        of_class = name.removesuffix(".forward")
        definition = self._definition(of_class)
        if definition is not None and isinstance(definition[1], ast.ClassDef):
            return self._of_method(*definition, "__init__" if name == of_class else "forward")
        is_function = definition is not None and isinstance(definition[1], ast.FunctionDef) and name == of_class
        return _parameters(definition[1]) if is_function else None

    def _of_method(self, module: str, node: Any, method: str) -> list[str] | None:
        if not isinstance(node, ast.ClassDef):
            return None
        for child in node.body:
            if isinstance(child, ast.FunctionDef) and child.name == method:
                return _parameters(child)
        if method == "__init__" and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return [child.target.id for child in node.body if isinstance(child, ast.AnnAssign)]
        for base in node.bases:
            definition = self._definition(f"{module}.{ast.unparse(base)}")
            if definition and (parameters := self._of_method(*definition, method)) is not None:
                return parameters
        return None

    def _file(self, module: str) -> Path | None:
        path = self._folder.joinpath(*module.split("."))
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

    def _definition(self, name: str) -> tuple[str, ast.AST] | None:
        """The module that defines a name, and the definition there."""
        module, _, last = name.rpartition(".")
        file = self._file(module)
        if file is None:
            outer = self._definition(module) if module else None
            return outer if outer and isinstance(outer[1], ast.ClassDef) else None
        for node in _top_level(ast.parse(file.read_text()).body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(
                    isinstance(part, ast.Name) and part.id == last for target in targets for part in ast.walk(target)
                ):
                    return module, node
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, file, node)
                for alias in node.names:
                    inner = last if alias.name == "*" else alias.name
                    if last in (alias.asname or alias.name, inner if alias.name == "*" else ""):
                        definition = self._definition(f"{origin}.{inner}")
                        if definition or alias.name != "*":
                            return definition or (module, node)
        return None

    def _origin(self, module: str, file: Path, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for block in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _top_level(getattr(node, block, []))


def _parameters(function: ast.FunctionDef) -> list[str] | None:
    arguments = function.args
    if arguments.kwarg is not None and arguments.kwarg.arg == "kwargs" and len(arguments.args) < 2:
        return None
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return named + (["**"] if arguments.kwarg else [])


def uses_of_megatron() -> dict[str, Uses]:
    """Return what each file of the installed Megatron-Core uses, by path; files that use nothing are left out."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    uses_by_file = {}
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if PACKAGE in text and (uses := Uses(ast.parse(text))).names:
            uses_by_file[str(file.relative_to(folder))] = uses
    return uses_by_file


def stand_in_callables() -> list[str]:
    """Return the dotted names of classes and functions of the stand-in that its modules define."""
    names = []
    for file in sorted((STAND_IN / PACKAGE / "pytorch").rglob("*.py")):
        module = ".".join(file.relative_to(STAND_IN).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                names.append(f"{module}.{node.name}")
    return names


def main(folder: Path, version: str) -> None:
    """Write the file."""
    source = Source(folder)
    uses = uses_of_megatron().values()
    names = {name for file in uses for name in file.names} | set(stand_in_callables())
    called = {name for file in uses for name in file.keywords} | set(stand_in_callables())
    called |= {f"{name}.forward" for name in stand_in_callables()}
    parameters = {name: source.parameters(name) for name in sorted(called)}
    content = {
        "version": version,
        "names": sorted(filter(source.has, names)),
        "parameters": {name: listed for name, listed in parameters.items() if listed is not None},
    }
    lines = [f'"version": "{version}"', f'"names": {json.dumps(content["names"])}']
    rows = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(listed)}" for name, listed in content["parameters"].items())
    FILE.write_text("{\n" + ",\n".join(lines) + ',\n"parameters": {\n  ' + rows + "\n}\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
