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
from collections.abc import Mapping, Sequence

from mcontroller.cli.field_docs import FieldDoc, fields_of, fields_under
from mcontroller.cli.main import CONFIGS, VERBS, entry_points
from mcontroller.errors import ConfigError

PAGE_HEAD = """# Configuration

<!-- Generated: python -m mcontroller help --markdown > docs/configuration.md -->

Every field: its default, its type if the default does not show it, its unit, and the first sentence about it.
**`python -m mcontroller help KEY` prints the rest**: what each value does, limits and reasons. A key is the path of
fields, joined by dots: `actor_rollout_ref.optim.lr=1e-6` on a command line, nested mappings in YAML. Text that YAML
reads as a number or a truth value is put in quotes, as `"data.prompt_key='010'"`.
"""

_SENTENCE = re.compile(r"(?<=[.?])\s(?=[A-Z`])(?!None:)")
"""The end of the first sentence of a text, with the meaning of None that follows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("key", nargs="?", help="a key, the last parts of one, or a section; default: all sections")
    parser.add_argument("--markdown", action="store_true", help="print the page of all fields")


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation of a key, the sections, or the page of all fields."""
    config = run_config()
    if arguments.markdown:
        text = config_page(config)
    elif arguments.key is None:
        text = "\n".join(map(_line, fields_of(config))) + "\n"
    else:
        text = explanation_of(arguments.key, list(fields_under(config)))
    sys.stdout.write(text)
    return 0


def run_config() -> type:
    """Return the dataclass of the configuration of a run, which a package above this one declares."""
    config: type = entry_points(CONFIGS)["run"].load()
    return config


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
    return "\n".join(map(_block, by_owner.values()))


def _block(same: Sequence[FieldDoc]) -> str:
    """Return the text about one field of a dataclass, under all keys at which the dataclass is used."""
    field = same[0]
    facts = [f"type: {field.annotation}", f"default: {field.default}", *([f"unit: {field.unit}"] if field.unit else [])]
    facts += [f"no effect {reason}" for reason in field.without_effect]
    lines = [*(alike.key for alike in same), f"  {', '.join(facts)}"]
    lines += textwrap.wrap(" ".join(field.meaning.split()), 100, initial_indent="  ", subsequent_indent="  ")
    if field.nested is not None:
        lines += [
            "",
            f"  fields ({field.nested.__name__}):",
            *(f"    {_line(inner)}" for inner in fields_of(field.nested)),
        ]
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
        hint = "mcontroller help prints all sections"
    return ConfigError(f"there is no configuration key {key!r}; {hint}", key=key, value=None, close_matches=close)


# ---- the page of all fields ------------------------------------------------------------------------------------------


def config_page(config: type) -> str:
    """Return the page: a section for each dataclass in a configuration, with the keys at which it is used.

    A dataclass that derives from an earlier one shows its own fields only.
    """
    used: dict[type, list[str]] = {config: [""]}
    for field in fields_under(config):
        if field.nested is not None:
            used.setdefault(field.nested, []).append(field.nested_key)
    return "\n".join([PAGE_HEAD, *(_section(cls, keys, used) for cls, keys in used.items())])


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
