"""Detect another module that shadows one of this distribution's packages.

``workers`` and ``parallel_state`` are common names. If a file ``workers.py`` of the user's is found first on
``sys.path``, ``from workers import ActorConfig`` fails with "cannot import name", which names neither the cause nor the
fix. It uses the standard library only, because no package of this project can be imported before the check.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path


def check_packages(init: str) -> None:
    """Check that ``parallel_state`` and ``workers`` are the packages installed next to ``mcontroller``.

    Args:
        init: the path of mcontroller's ``__init__.py``.

    Raises:
        ImportError: another module shadows ``parallel_state``, without which nothing works; with both paths.

    Warns:
        ShadowedPackageWarning: another module shadows ``workers``; with both paths. It is only a warning, because a
            program may need none of our workers.
    """
    root = Path(init).resolve().parent.parent
    for name in ("parallel_state", "workers"):
        ours = root / name / "__init__.py"
        found = _origin(name)
        if found is None or not ours.exists() or Path(found).resolve() == ours:
            continue
        text = (
            f"import {name} finds {found}, which shadows mcontroller's own package {ours}: rename that module, or move "
            "its folder behind mcontroller's on sys.path"
        )
        if name == "parallel_state":
            raise ImportError(text, name=name, path=found)
        warnings.warn(text, ShadowedPackageWarning, stacklevel=3)


class ShadowedPackageWarning(UserWarning):
    """Another module is imported under the name of one of this distribution's packages."""


def _origin(name: str) -> str | None:
    """Return the file that ``import name`` loads or has loaded; None if there is none."""
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    return None if spec is None or not spec.origin else spec.origin
