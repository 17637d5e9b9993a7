"""The pinned Transformer Engine has what Megatron-Core takes from it, and what the stand-in of the tests poses as."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.workers.model.transformer_engine_names import FILE, STAND_IN, Source, stand_in_callables, uses_of_megatron

RELEASE = json.loads(FILE.read_text())
PINS = (Path(__file__).parents[3] / "launch" / "container" / "requirements.txt").read_text().splitlines()
ENGINE = "transformer_engine.pytorch"

GONE = {
    f"{ENGINE}.attention._SplitAlongDim": "guarded: torch.split divides queries, keys and values",
    f"{ENGINE}.attention._SplitAlongDim.apply": "the same",
    f"{ENGINE}.attention.apply_rotary_pos_emb": "guarded: it is in attention.rope, where Megatron looks first",
    f"{ENGINE}.cpp_extensions.cast_to_fp8": "read with releases up to 1.14 only",
    f"{ENGINE}.cpp_extensions.rmsnorm_fwd": "is in transformer_engine_torch, which is compiled; for inference",
    f"{ENGINE}.module.base.get_workspace": "guarded, but then torch computes the router, in another order",
}
"""Names that Megatron-Core 0.16.1 reads and the source of the pinned release lacks -> why it works without them."""

GONE_ARGUMENTS = {
    "transformer_engine.common.recipe.DelayedScaling": {"interval", "override_linear_precision"},  # ignored
    f"{ENGINE}.Linear": {"ub_atomic_gemm_ag", "ub_atomic_gemm_rs", "ub_split_ag", "ub_split_rs"},  # before 1.5
    f"{ENGINE}.LayerNormLinear": {"ub_atomic_gemm_ag", "ub_split_ag"},  # before 1.5
    f"{ENGINE}.cpp_extensions.general_gemm": {"workspace"},  # called with get_workspace, which is gone too
}
"""Keyword arguments that the pinned release lacks; Megatron-Core passes them to older releases only, or the recipe
ignores them: ``interval`` changes nothing, and ``override_linear_precision`` is of ``fp8_wgrad``, which is rejected."""


def pinned(package: str) -> str:
    [line] = [line for line in PINS if line.split("=")[0].split("[")[0] == package]
    return line.partition("==")[2]


of_pinned_megatron = pytest.mark.skipif(
    version("megatron-core") != pinned("megatron-core"), reason="the names of another Megatron-Core are not in the file"
)


def test_the_names_are_those_of_the_pinned_release() -> None:
    assert RELEASE["version"] == pinned("transformer-engine")


@of_pinned_megatron
def test_the_pinned_release_has_every_name_and_argument_that_megatron_uses() -> None:
    missing, arguments = set[str](), dict[str, set[str]]()
    for uses in uses_of_megatron().values():
        missing |= uses.names - set(RELEASE["names"])
        for name, keywords in uses.keywords.items():
            parameters = RELEASE["parameters"].get(name, ["**"])
            if "**" not in parameters and keywords - set(parameters):
                arguments.setdefault(name, set()).update(keywords - set(parameters))
    assert missing == GONE.keys()
    assert arguments == GONE_ARGUMENTS


def test_the_stand_in_has_no_name_or_argument_that_the_pinned_release_lacks() -> None:
    source, wrong = Source(STAND_IN), dict[str, set[str]]()
    for name in stand_in_callables():
        if name in GONE:
            wrong[name] = set()
        for callable_name in (name, f"{name}.forward"):
            real, posed = RELEASE["parameters"].get(callable_name), source.parameters(callable_name)
            if real is not None and posed is not None and (lacking := set(posed) - {"self", "**"} - set(real)):
                wrong[callable_name] = lacking
    assert wrong == {}
