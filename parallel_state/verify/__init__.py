"""``verify``: whether a model that is trained in a parallel layout is the model that one process trains.

A ``Program`` says how a team builds its model, its batches and its loss. ``verify_layout(program, "tp=2,cp=2")`` trains
it in one process and on simulated ranks, compares what they compute, and raises ``LayoutDiffers`` with the first place
that differs. docs/verify.md describes the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from parallel_state.verify.layouts import Variant as Variant
    from parallel_state.verify.outcome import Difference as Difference
    from parallel_state.verify.outcome import LayoutDiffers as LayoutDiffers
    from parallel_state.verify.outcome import Outcome as Outcome
    from parallel_state.verify.program import Program as Program
    from parallel_state.verify.program import VerifyError as VerifyError
    from parallel_state.verify.verifier import Verifier as Verifier
    from parallel_state.verify.verifier import verify_layout as verify_layout
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
