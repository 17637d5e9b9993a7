"""Let Megatron-Bridge be imported without Transformer Engine.

One file of Bridge, ``peft/lora_layers.py``, imports Transformer Engine without a guard; all others have one. While that
file is executed, and only then, a stand-in is in its place: its classes are ones that nothing is an instance of.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from parallel_state.patches.import_hook import ImportHook

UNGUARDED = "megatron.bridge.peft.lora_layers"
_ENGINE = ("transformer_engine", "transformer_engine.pytorch")


def stand_in_for_engine() -> None:
    """Execute the file with the stand-in when it is imported, if there is no Transformer Engine then."""
    sys.meta_path.insert(0, _WithStandIn(UNGUARDED.__eq__, lambda module: None))


class _WithStandIn(ImportHook):
    def loader(self, spec: Any) -> Any:
        execute = spec.exec_module

        def execute_with_stand_in(module: ModuleType) -> None:
            spec = {name: sys.modules.pop(name) for name in _ENGINE if name in sys.modules}
            if spec.get(_ENGINE[0]) or (not spec and importlib.util.find_spec(_ENGINE[0])):
                sys.modules.update(spec)
                execute(module)
                return
            package, pytorch = (ModuleType(name) for name in _ENGINE)
            pytorch.__getattr__ = _Nothing().__getattr__  # type: ignore[method-assign]
            package.pytorch = pytorch  # type: ignore[attr-defined]
            sys.modules.update(zip(_ENGINE, (package, pytorch), strict=True))
            try:
                execute(module)
            finally:
                for name in _ENGINE:
                    del sys.modules[name]
                sys.modules.update(spec)

        spec.exec_module = execute_with_stand_in
        return spec


class _Nothing:
    """A module whose classes have no instances."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Nothing()
