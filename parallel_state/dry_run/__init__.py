"""``dry_run``: a training step of the real model in its real layout, without a GPU and without data.

Megatron's device is torch's ``meta`` device: tensors have shapes and no values, so a rank of a large model takes
seconds. Storages and FLOPs are counted, and simulated ranks match every collective by order, shape, dtype and group.
docs/verify.md describes the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_state.dry_run.errors import DoesNotFit as DoesNotFit
    from parallel_state.dry_run.errors import DryRunError as DryRunError
    from parallel_state.dry_run.outcome import Outcome as Outcome
    from parallel_state.dry_run.outcome import Use as Use
    from parallel_state.dry_run.run import dry_run as dry_run
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
