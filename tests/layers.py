"""The structure of the source tree, read from its syntax trees without importing it: layers, circles, private names.

``test_layers.py`` asserts the rules. ``python -m tests.layers [--violations] [ROOT ...]`` prints the figures of one or
more checkouts side by side.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

LAYERS = ("parallel_state", "mcontroller", "workers", "trainer")
"""The packages, from the lowest to the highest. A package imports itself and lower ones."""

SCRIPTS = ("benchmarks", "examples")
"""Folders whose files use the packages as a user would."""


NAMEDTUPLE_METHODS = frozenset(("_asdict", "_field_defaults", "_fields", "_make", "_replace"))
GETATTR_LIKE = frozenset(("delattr", "getattr", "hasattr", "setattr"))


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is neither a dunder nor a public method of namedtuples."""
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != "" and name not in NAMEDTUPLE_METHODS


@dataclass
class SourceFile:
    """One Python file: its dotted name, its syntax tree, and what it defines and imports."""

    name: str
    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def type_checking_imports(self) -> list[ast.ImportFrom]:
        """The imports under ``if TYPE_CHECKING:`` at the top level."""
        blocks = (node for node in self.tree.body if isinstance(node, ast.If) and _names_type_checking(node.test))
        return [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]

    @cached_property
    def exports(self) -> dict[str, tuple[str, str]]:
        """In a package, each name that its ``__init__`` exports lazily, with its module and its name there."""
        if not self.is_package:
            return {}
        return {
            alias.asname or alias.name: (_absolute(self, node), alias.name)
            for node in self.type_checking_imports
            for alias in node.names
        }

    @cached_property
    def private_names(self) -> set[str]:
        """The private names that the file defines: globals, and attributes of its classes."""
        found: set[str] = set()
        for node in self.tree.body:
            found.update(_defined_names(node))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    found.update(_defined_names(member))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
        return {name for name in found if is_private(name)}


@dataclass(frozen=True)
class Import:
    """An import of one of our modules; ``attribute`` is the name taken from it, empty for the module itself."""

    importer: str
    module: str
    attribute: str
    line: int
    is_export: bool  # under TYPE_CHECKING in an __init__: a lazy re-export


class SourceTree:
    """All Python files of a checkout, by dotted name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, SourceFile] = {}
        for top in (*LAYERS, *SCRIPTS, "tests"):
            for path in sorted((root / top).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                text = path.read_text()
                self.files[name] = SourceFile(name, path, text, ast.parse(text, str(path)))

    def of(self, *tops: str) -> list[SourceFile]:
        """The files below these top-level folders."""
        return [file for name, file in self.files.items() if name.partition(".")[0] in tops]

    def where(self, file: SourceFile, line: int) -> str:
        return f"{file.path.relative_to(self.root)}:{line}"

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """The imports of our modules by each file, wherever they are in it."""
        return {name: list(self._imports_of(file)) for name, file in self.files.items()}

    def _imports_of(self, file: SourceFile) -> Iterator[Import]:
        exported = set(map(id, file.type_checking_imports)) if file.is_package else set()
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._import(file, alias.name, "", node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield from self._import(file, _absolute(file, node), alias.name, node, id(node) in exported)
            elif isinstance(node, ast.Call) and _called_name(node) == "import_module" and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield from self._import(file, name.value, "", node)

    def _import(
        self, file: SourceFile, module: str, attribute: str, node: ast.stmt | ast.expr, is_export: bool = False
    ) -> Iterator[Import]:
        """Resolve submodules, and names that a package exports lazily, to the module that defines them."""
        if attribute and f"{module}.{attribute}" in self.files:
            module, attribute = f"{module}.{attribute}", ""
        elif module in self.files and attribute in self.files[module].exports:
            module, attribute = self.files[module].exports[attribute]
        if module.partition(".")[0] in (*LAYERS, *SCRIPTS, "tests"):
            yield Import(file.name, module, attribute, node.lineno, is_export)

    @cached_property
    def edges(self) -> dict[str, dict[str, Import]]:
        """Module -> the modules that it imports, without the lazy re-exports of packages."""
        graph: dict[str, dict[str, Import]] = {file.name: {} for file in self.of(*LAYERS)}
        for name, targets in graph.items():
            for found in self.imports[name]:
                if found.module in graph and found.module != name and not found.is_export:
                    targets.setdefault(found.module, found)
        return graph

    def upward_imports(self) -> list[str]:
        """Imports of a higher package, or of scripts or tests, by one of the packages; lazy re-exports included."""
        floors = {name: floor for floor, name in enumerate((*LAYERS, *SCRIPTS, "tests"))}
        return [
            f"{self.where(file, found.line)} imports {found.module}"
            for file in self.of(*LAYERS)
            for found in self.imports[file.name]
            if floors[found.module.partition(".")[0]] > floors[file.name.partition(".")[0]]
        ]

    def module_circles(self) -> list[str]:
        """Modules that import each other, directly or through others, also for type checking and inside functions."""
        return [
            " and ".join(circle) + ": " + "; ".join(_arrows(self.edges, circle))
            for circle in strongly_connected(self.edges)
        ]

    def folder_circles(self) -> list[str]:
        """In each folder, files and subfolders that import each other in a circle; a subfolder counts as one."""
        found = []
        for folder in sorted({file.folder for file in self.of(*LAYERS)}):
            graph: dict[str, dict[str, Import]] = defaultdict(dict)
            for name, targets in self.edges.items():
                for target, example in targets.items():
                    ends = _child_of(folder, name), _child_of(folder, target)
                    if None not in ends and ends[0] != ends[1]:
                        graph[str(ends[0])].setdefault(str(ends[1]), example)
            for circle in strongly_connected(graph):
                found.append(f"in {folder}: " + " and ".join(circle) + ": " + "; ".join(_arrows(graph, circle)))
        return found

    def private_uses(self, *tops: str) -> list[str]:
        """Uses of another file's private names: imports, globals of its module, attributes of its classes.

        ``self``, ``cls`` and names that the file defines itself are allowed, and so are the attributes of imported
        foreign modules.
        """
        return [
            f"{self.where(file, line)} uses {use}"
            for file in self.of(*(tops or (*LAYERS, *SCRIPTS)))
            for line, use in sorted(set(self._private_uses_of(file)))
        ]

    @cached_property
    def _homes_of_private_names(self) -> dict[str, set[str]]:
        homes: dict[str, set[str]] = defaultdict(set)
        for file in self.of(*LAYERS, *SCRIPTS):
            for name in file.private_names:
                homes[name].add(file.name)
        return homes

    def _private_uses_of(self, file: SourceFile) -> Iterator[tuple[int, str]]:
        for found in self.imports[file.name]:
            if is_private(found.attribute):
                yield found.line, f"{found.attribute} of {found.module}"
        foreign, ours = self._imported_names(file)
        for node in ast.walk(file.tree):
            owner, attribute = _attribute_use(node)
            if owner is None or not is_private(attribute) or _is_self(owner):
                continue
            if ast.unparse(owner) in ours:
                yield owner.lineno, f"{attribute} of {ours[ast.unparse(owner)]}"
            elif attribute not in file.private_names and _root_name(owner) not in foreign:
                for home in sorted(self._homes_of_private_names.get(attribute, ())):
                    yield owner.lineno, f"{ast.unparse(owner)}.{attribute}, which {home} defines"

    def _imported_names(self, file: SourceFile) -> tuple[set[str], dict[str, str]]:
        """The names that a file binds to foreign modules, and the names bound to our modules with these."""
        foreign: set[str] = set()
        ours: dict[str, str] = {}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.files:
                        ours[alias.asname or alias.name] = alias.name
                    else:
                        foreign.add(alias.asname or alias.name.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                module = _absolute(file, node)
                for alias in node.names:
                    if f"{module}.{alias.name}" in self.files:
                        ours[alias.asname or alias.name] = f"{module}.{alias.name}"
                    elif module not in self.files:
                        foreign.add(alias.asname or alias.name)
        return foreign - ours.keys() - set(LAYERS), ours

    def shared_types(self) -> list[str]:
        """Public classes and type aliases of the packages that have the same name."""
        return self._shared(_type_name)

    def shared_functions(self) -> list[str]:
        """Public functions of the packages that have the same name."""
        return self._shared(_function_name)

    def _shared(self, name_of: Callable[[ast.stmt], str]) -> list[str]:
        homes: dict[str, list[str]] = defaultdict(list)
        for file in self.of(*LAYERS):
            for name in filter(None, {name_of(node): None for node in file.tree.body}):
                if not name.startswith("_"):
                    homes[name].append(file.name)
        shared = {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}
        return [f"{name} is defined in {', '.join(modules)}" for name, modules in shared.items()]


def strongly_connected(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of at least two nodes that reach each other, each sorted (Tarjan, SIAM J. Comput. 1, 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        path.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
            if target in path:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == index[node]:
            group = path[path.index(node) :]
            del path[path.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found)


def _arrows(graph: Mapping[str, Mapping[str, Import]], circle: list[str]) -> list[str]:
    """Return one example of an import for each arrow inside a circle."""
    return [
        f"{found.importer}:{found.line} imports {found.module}"
        for node in circle
        for target, found in graph[node].items()
        if target in circle
    ]


def _child_of(folder: str, module: str) -> str | None:
    """Return the file or subfolder of ``folder`` that contains ``module``; None if it is outside."""
    if module == folder:
        return folder
    if not module.startswith(f"{folder}."):
        return None
    return f"{folder}.{module.removeprefix(f'{folder}.').partition('.')[0]}"


def _absolute(file: SourceFile, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    base = file.folder.split(".")
    return ".".join([*base[: len(base) - node.level + 1], *([node.module] if node.module else [])])


def _names_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _defined_names(node: ast.stmt) -> Iterator[str]:
    """Return the names that a statement of a module or of a class body defines, in ``if`` and ``try`` blocks too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
    elif isinstance(node, ast.If | ast.Try | ast.With):
        for statement in ast.iter_child_nodes(node):
            if isinstance(statement, ast.stmt):
                yield from _defined_names(statement)


def _is_self(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()", "type(self)", "self.__class__")


def _attribute_use(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Return the owner and the name of an attribute access, ``getattr`` with a literal name included."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and _called_name(node) in GETATTR_LIKE and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return node.args[0], name.value
    return None, ""


def _root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _type_name(node: ast.stmt) -> str:
    """Return the name of a class or of a type alias such as ``Mode = str | Callable[..., Any]``, else ''."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
            return target.id
    return ""


def _function_name(node: ast.stmt) -> str:
    return node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""


RULES: dict[str, Callable[[SourceTree], list[str]]] = {
    "imports of a higher package": SourceTree.upward_imports,
    "circles of modules": SourceTree.module_circles,
    "circles of folders": SourceTree.folder_circles,
    "private names used across files": SourceTree.private_uses,
    "public types that share a name": SourceTree.shared_types,
    "public functions that share a name": SourceTree.shared_functions,
}
"""Name of a kind of violation -> the function that lists them, one line each."""


def figures(tree: SourceTree) -> dict[str, str]:
    """Return the figures of a checkout, by name."""
    files = tree.of(*LAYERS)
    circles = strongly_connected(tree.edges)
    return {
        "modules": str(len(files)),
        **{f"modules of {top}": str(len(tree.of(top))) for top in LAYERS},
        **{name: str(len(rule(tree))) for name, rule in RULES.items()},
        "modules in circles": str(sum(map(len, circles))),
        "private names used across files by tests": str(len(tree.private_uses("tests"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, default=[Path(__file__).parents[1]], metavar="ROOT")
    parser.add_argument("--violations", action="store_true", help="list the violations of the last checkout")
    arguments = parser.parse_args()
    trees = [SourceTree(root.resolve()) for root in arguments.roots]
    columns = [figures(tree) for tree in trees]
    for name in columns[0]:
        sys.stdout.write(f"{name:44}" + "".join(f"{column[name]:>40}" for column in columns) + "\n")
    if arguments.violations:
        for name, rule in RULES.items():
            sys.stdout.write("\n".join(["", name, *(f"  {line}" for line in rule(trees[-1]))]) + "\n")


if __name__ == "__main__":
    main()
