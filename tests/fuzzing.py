"""What the tests with malformed values share (hypothesis).

Their short form is part of the tests. The long form takes a number of examples and prints the seed of a failure:

    FUZZ_EXAMPLES=20000 python -m pytest tests/test_malformed_values.py --timeout=3600 --hypothesis-seed=20261122
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mcontroller.errors import MControllerError

__all__ = ["KEYS", "VALUES", "fuzz", "only_errors_of_this_project"]

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

KEYS = st.sampled_from(
    [
        "global_steps",
        "kl_coef",
        "groups",
        "earlier",
        "staged",
        "obsolete",
        "step",
        "layout",
        "parts",
        "weights",
        "counters",
        "files",
        "sha256",
        "weight_map",
        "model_type",
        "a",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-3, 10**30) | st.floats() | st.text(max_size=8) | KEYS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def only_errors_of_this_project(call: Callable[[], object]) -> None:
    """Call a function, which may raise an error of this project that has a text, and no other."""
    try:
        call()
    except MControllerError as error:
        assert str(error)
