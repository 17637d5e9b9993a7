"""Documentation of configuration fields, read from the string below each field of a dataclass.

This form is also the one that Sphinx and editors read::

    @dataclass
    class RolloutConfig:
        prompt_length: int = 512
        \"\"\"[tokens] Longest prompt.\"\"\"

A unit is in brackets at the start; name, type and default are read from the field.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mcontroller.config.fields import mapped_config, nested_config, reasons_without_effect

_UNIT = re.compile(r"\[([^]]+)\]\s*")


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One field of a configuration.

    Attributes:
        key: its dotted key.
        owner: the dataclass that declares it.
        name: the last part of the key.
        annotation: its type, as in the source.
        unit: the unit of its value, or an empty string.
        default: its default as text: "required", or a Python literal.
        meaning: what it does; empty if it is not documented.
        nested: the dataclass of its value, or of the values of a mapping by name; None for other values.
        nested_key: the key of ``nested``: ``key``, or, in a mapping, ``key.NAME``.
        without_effect: when nothing reads it, such as ``with steps=0``.
    """

    key: str
    owner: type[Any]
    name: str
    annotation: str
    unit: str
    default: str
    meaning: str
    nested: type[Any] | None
    nested_key: str
    without_effect: list[str]


def fields_of(cls: type, prefix: str = "") -> list[FieldDoc]:
    """Return the fields of a dataclass, inherited ones first, in the order of declaration.

    Args:
        cls: the dataclass.
        prefix: the dotted key of ``cls``, with a dot at the end.
    """
    docs = []
    for field in dataclasses.fields(cls):
        owner = next(base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", {}))
        annotation, text = _declarations(owner)[field.name]
        unit, meaning = _unit_and_meaning(text)
        key, mapped = f"{prefix}{field.name}", mapped_config(cls, field.name)
        nested, nested_key = mapped or nested_config(cls, field.name), f"{key}.NAME" if mapped else key
        default, without_effect = _default(field), reasons_without_effect(field)
        docs.append(
            FieldDoc(key, owner, field.name, annotation, unit, default, meaning, nested, nested_key, without_effect)
        )
    return docs


def fields_under(cls: type, prefix: str = "") -> Iterator[FieldDoc]:
    """Yield the fields of a dataclass and of all dataclasses in it, with the arguments of ``fields_of``."""
    for field in fields_of(cls, prefix):
        yield field
        if field.nested is not None:
            yield from fields_under(field.nested, f"{field.nested_key}.")


@functools.lru_cache(maxsize=256)
def _declarations(cls: type) -> dict[str, tuple[str, str]]:
    """Return the annotation of every field that ``cls`` itself declares, and the string below it."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    declared = {}
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            declared[statement.target.id] = ast.unparse(statement.annotation), _string(following)
    return declared


def _string(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else ""
    return ""


def _unit_and_meaning(text: str) -> tuple[str, str]:
    unit = _UNIT.match(text)
    return (unit.group(1), text[unit.end() :]) if unit else ("", text)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(field.default_factory):
        return "the defaults of its fields"
    return repr(field.default_factory())
