"""Let Megatron-Bridge be imported without Transformer Engine.

One file of Bridge, ``peft/lora_layers.py``, imports Transformer Engine without a guard; all others have one. While that
file is executed, and only then, a stand-in is in its place: its classes are ones that nothing is an instance of.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from parallel_state.patches.import_hook import Patch, call_before_import

_UNGUARDED = "megatron.bridge.peft.lora_layers"
_ENGINE = ("transformer_engine", "transformer_engine.pytorch")


class _StandIn(ModuleType):
    """A module whose classes have no instances."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _StandIn(name)


def stand_in_for_engine() -> None:
    """Put the stand-in in place before the file is imported, if there is no Transformer Engine then."""
    call_before_import(_UNGUARDED, _put_in_place)


def _put_in_place() -> None:
    if find_spec(_ENGINE[0]) is None:
        sys.modules.update((name, _StandIn(name)) for name in _ENGINE)


def _remove(module: Any) -> None:
    if isinstance(sys.modules[_ENGINE[0]], _StandIn):
        sys.modules.update(dict.fromkeys(_ENGINE))  # type: ignore[arg-type] # with None, an import raises ImportError


PATCHES: dict[str, Patch] = {_UNGUARDED: _remove}
"""Module name -> the function that patches it."""
