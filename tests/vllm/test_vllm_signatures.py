"""The arguments that the stand-in for vLLM takes are those of the installed vLLM."""

from __future__ import annotations

from tests.workers.generate.vllm.signatures import SIGNATURES, installed_signatures


def test_recorded_arguments_are_those_of_the_installed_vllm() -> None:
    assert installed_signatures() == SIGNATURES
