"""The page of all configuration fields, in Markdown."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from mcontroller.cli.field_docs import FieldDoc, fields_of

__all__ = ["config_page"]

HEAD = """# Configuration

<!-- Generated: python -m mcontroller help --markdown > docs/configuration.md -->

Every field of every configuration: its type, default, unit and meaning. `python -m mcontroller help KEY` prints the
same for one key. A key is the path of fields to a value, joined by dots: `actor_rollout_ref.optim.lr=1e-6` on a command
line, or nested mappings in YAML.
"""


def config_page(roots: Iterable[type], parts: Mapping[str, type]) -> str:
    """Return the page: a section for each dataclass, with the keys at which it is used.

    Args:
        roots: dataclasses whose keys have no prefix. One that derives from an earlier one shows its own fields only.
        parts: the dataclasses of further keys, by key.
    """
    used: dict[type, list[str]] = {}
    for root in roots:
        _collect(root, "", parts, used)
    for key, cls in parts.items():
        if not any(key in keys for keys in used.values()):
            _collect(cls, key, parts, used)
    return "\n".join([HEAD, *(_section(cls, keys, used) for cls, keys in used.items())])


def _collect(cls: type, key: str, parts: Mapping[str, type], used: dict[type, list[str]]) -> None:
    keys = used.setdefault(cls, [])
    if key not in keys:
        keys.append(key)
    for field in fields_of(cls, f"{key}." if key else "", parts):
        if field.nested is not None:
            _collect(field.nested, field.key, parts, used)


def _section(cls: type, keys: list[str], used: Mapping[type, list[str]]) -> str:
    base = next((other for other in cls.__mro__[1:] if other in used), None)
    named = [f"`{key}`" for key in keys if key]
    keys_text = f"Keys: {', '.join(named)}.\n" if named else "Root of the configuration: its keys have no prefix.\n"
    inherited = f"All fields of [{base.__name__}](#{base.__name__.lower()}), and these.\n" if base else ""
    fields = [field for field in fields_of(cls) if base is None or field.owner is cls]
    rows = [_row(field) for field in fields]
    summary = _code(inspect.cleandoc(cls.__doc__ or ""))
    table = ["| field | type | default | unit | meaning |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n".join([f"## {cls.__name__}\n", f"{summary}\n", keys_text + inherited, *table, ""])


def _row(field: FieldDoc) -> str:
    kind = (
        f"[{field.annotation}](#{field.nested.__name__.lower()})"
        if field.nested is not None
        else f"`{field.annotation}`"
    )
    default = "required" if field.default == "required" else f"`{field.default}`"
    default = "its defaults" if field.nested is not None and field.default.startswith("the defaults") else default
    cells = [f"`{field.name}`", kind, default, field.unit, _code(" ".join(field.meaning.split()))]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    """Return a docstring's text with code in Markdown's single backquotes."""
    return text.replace("``", "`")
