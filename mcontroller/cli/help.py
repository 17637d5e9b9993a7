"""Explain configuration keys: type, unit, default and meaning.

examples: mcontroller help actor_rollout_ref.optim.lr
          mcontroller help optim.lr           the last parts of a key are enough
          mcontroller help trainer            the fields of a section
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from mcontroller.cli.field_docs import FieldDoc, fields_of, fields_under
from mcontroller.cli.main import CONFIGS, VERBS, entry_points
from mcontroller.config.imports import import_class
from mcontroller.errors import ConfigError

ROOT = "run"
"""Name of the entry point whose keys have no prefix."""

PAGE_HEAD = """# Configuration

<!-- Generated: python -m mcontroller help --markdown > docs/configuration.md -->

Every field: its default, its type if the default does not show it, its unit, and the first sentence about it.
**`python -m mcontroller help KEY` prints the rest**: what each value does, limits and reasons. A key is the path of
fields, joined by dots: `actor_rollout_ref.optim.lr=1e-6` on a command line, nested mappings in YAML.
"""

_SENTENCE = re.compile(r"(?<=[.?])\s(?=[A-Z`])(?!None:)")
"""The end of the first sentence of a text, with the meaning of None that follows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("key", nargs="?", help="a key, the last parts of one, or a section; default: all sections")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="explain the keys of this dataclass as well, for a program with its own configuration",
    )
    parser.add_argument("--markdown", action="store_true", help="print the page of all fields")


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation of a key, the sections, or the page of all fields."""
    classes, parts = roots(arguments.config)
    if arguments.markdown:
        text = config_page(classes, parts)
    elif arguments.key is None:
        sections = [field for cls in classes for field in fields_of(cls, parts=parts)]
        text = "\n".join(_line(field) for field in _unique(sections)) + "\n"
    else:
        text = explanation_of(arguments.key, all_fields(classes, parts))
    sys.stdout.write(text)
    return 0


def roots(paths: Iterable[str] = ()) -> tuple[list[type], dict[str, type]]:
    """Return the dataclasses whose keys have no prefix, and the registered dataclasses of other keys.

    Args:
        paths: more roots, each ``package.module:Class``.

    Raises:
        ConfigError: a path is not an importable class.
    """
    registered = {name: entry.load() for name, entry in entry_points(CONFIGS).items()}
    first: list[type] = [registered.pop(ROOT)] if ROOT in registered else []
    return first + [import_class(path, "--config") for path in paths], registered


def all_fields(classes: Iterable[type], parts: dict[str, type]) -> list[FieldDoc]:
    """Return every field under the roots and under the registered parts that no root contains."""
    fields = [field for cls in classes for field in fields_under(cls, parts=parts)]
    keys = {field.key for field in fields}
    others = [(name, cls) for name, cls in parts.items() if name not in keys]
    return _unique(fields + [field for name, cls in others for field in fields_under(cls, f"{name}.", parts)])


def explanation_of(key: str, fields: Sequence[FieldDoc]) -> str:
    """Return the text about every field whose key is ``key`` or ends with it.

    Raises:
        ConfigError: there is none; the message contains near matches.
    """
    matches = [field for field in fields if field.key == key] or [
        field for field in fields if field.key.endswith(f".{key}")
    ]
    if not matches:
        raise _unknown(key, fields)
    by_owner: dict[tuple[type, str], list[FieldDoc]] = {}
    for field in matches:
        by_owner.setdefault((field.owner, field.name), []).append(field)
    return "\n".join(_block(same, fields) for same in by_owner.values())


def _block(same: Sequence[FieldDoc], fields: Sequence[FieldDoc]) -> str:
    """Return the text about one field of a dataclass, under all keys at which the dataclass is used."""
    field = same[0]
    facts = [f"type: {field.annotation}", f"default: {field.default}", *([f"unit: {field.unit}"] if field.unit else [])]
    lines = [*(alike.key for alike in same), f"  {', '.join(facts)}"]
    lines += textwrap.wrap(" ".join(field.meaning.split()), 100, initial_indent="  ", subsequent_indent="  ")
    if field.nested is not None:
        prefix = f"{field.key}."
        inner = [
            inner_field
            for inner_field in fields
            if inner_field.key.startswith(prefix) and "." not in inner_field.key[len(prefix) :]
        ]
        lines += ["", f"  fields ({field.nested.__name__}):", *(f"    {_line(inner_field)}" for inner_field in inner)]
    return "\n".join(lines) + "\n"


def _line(field: FieldDoc) -> str:
    unit = f" [{field.unit}]" if field.unit else ""
    first = field.meaning.partition("\n")[0]
    return f"{field.name}: {field.annotation} = {field.default}{unit}  {first}"


def _unknown(key: str, fields: Sequence[FieldDoc]) -> ConfigError:
    tails = {
        ".".join(parts[start:]) for field in fields for parts in [field.key.split(".")] for start in range(len(parts))
    }
    close = difflib.get_close_matches(key, sorted(tails), n=3, cutoff=0.7)
    if key in entry_points(VERBS):
        hint = f"it is a verb: mcontroller {key} --help"
    elif close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = "mcontroller help prints all sections; --config MODULE:CLASS adds the sections of your program"
    return ConfigError(f"there is no configuration key {key!r}; {hint}", key=key, value=None, close_matches=close)


def _unique(fields: Iterable[FieldDoc]) -> list[FieldDoc]:
    """Return the fields, one for each key, from the last root that declares it."""
    return list({field.key: field for field in fields}.values())


# ---- the page of all fields ------------------------------------------------------------------------------------------


def config_page(roots: Iterable[type], parts: Mapping[str, type]) -> str:
    """Return the page: a section for each dataclass, with the keys at which it is used.

    Args:
        roots: dataclasses whose keys have no prefix. One that derives from an earlier one shows its own fields only.
        parts: the dataclasses of other keys, by key.
    """
    used: dict[type, list[str]] = {}
    for root in roots:
        _collect(root, "", parts, used)
    for key, cls in parts.items():
        if not any(key in keys for keys in used.values()):
            _collect(cls, key, parts, used)
    return "\n".join([PAGE_HEAD, *(_section(cls, keys, used) for cls, keys in used.items())])


def _collect(cls: type, key: str, parts: Mapping[str, type], used: dict[type, list[str]]) -> None:
    keys = used.setdefault(cls, [])
    if key not in keys:
        keys.append(key)
    for field in fields_of(cls, f"{key}." if key else "", parts):
        if field.nested is not None:
            _collect(field.nested, field.key, parts, used)


def _section(cls: type, keys: list[str], used: Mapping[type, list[str]]) -> str:
    base = next((other for other in cls.__mro__[1:] if other in used), None)
    keys_text = f"Keys: {', '.join(f'`{key}`' for key in keys)}." if any(keys) else "Its keys have no prefix."
    inherited = f" All fields of [{base.__name__}](#{base.__name__.lower()}), and:" if base else ""
    fields = [field for field in fields_of(cls) if base is None or field.owner is cls]
    return "\n".join([f"## {cls.__name__}\n", f"{keys_text}{inherited}\n", *map(_item, fields), ""])


def _item(field: FieldDoc) -> str:
    """Return the line of a field: name and default, the type if the default does not show it, unit, first sentence."""
    if field.nested is not None:
        name = f"[`{field.name}`](#{field.nested.__name__.lower()})"
        note = "" if field.default.startswith("the defaults") else f" (default {field.default})"
    else:
        shown = field.default[:1] in "'\"-0123456789" or field.default in ("True", "False")
        default = "" if field.default == "required" else f" = {field.default}"
        name, note = f"`{field.name}{'' if shown else f': {field.annotation}'}{default}`", ""
    if field.default == "required":
        note = " (required)"
    unit = f" [{field.unit}]" if field.unit else ""
    first = _SENTENCE.split(" ".join(field.meaning.split()), maxsplit=1)[0]
    return f"- {name}{note}{unit} {_code(first)}"


def _code(text: str) -> str:
    """Return a docstring's text with code in Markdown's single backquotes."""
    return text.replace("``", "`")
