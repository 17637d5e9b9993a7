"""Defaults on a GPU: which fields are set, and that the configuration's own values stay."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs

from mcontroller.errors import ConfigError
from tests.training import SMALL_GPT
from workers.config import ParallelConfig
from workers.megatron_worker import MegatronWorker
from workers.model.gpu_defaults import chosen_implementation, gpu_defaults, max_connections, set_max_connections

FUSIONS = {"apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion"}
HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture(params=[True, False], ids=["transformer-engine", "local"])
def with_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A machine with a GPU, as far as the choice of defaults asks for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", request.param)
    return bool(request.param)


def values(**model: Any) -> dict[str, bool]:
    return gpu_defaults(dataclasses.replace(SMALL_GPT, **model))


def test_there_are_none_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_defaults(SMALL_GPT) == {}


def test_fusions_are_on_if_their_kernels_are_there(with_engine: bool) -> None:
    of_engine = {"apply_rope_fusion", "gradient_accumulation_fusion"}
    assert values() == {name: with_engine or name not in of_engine for name in FUSIONS}
    assert values(transformer_impl="local") == {name: name not in of_engine for name in FUSIONS}


@pytest.mark.parametrize(
    ("model", "off"),
    [
        ({"activation": "gelu"}, "bias_activation_fusion"),
        ({"gated_linear_unit": False}, "bias_activation_fusion"),
        ({"transformer": {"glu_linear_offset": 0.5}}, "bias_activation_fusion"),
        ({"transformer": {"activation_func_clamp_value": 7.0}}, "bias_activation_fusion"),
        ({"position_embedding_type": "none"}, "apply_rope_fusion"),
        ({"num_moe_experts": 4, "add_bias_linear": True}, "bias_dropout_fusion"),
    ],
)
def test_a_fusion_that_would_compute_something_else_is_off(with_engine: bool, model: dict[str, Any], off: str) -> None:
    assert values(**model)[off] is False


def test_fields_of_the_configuration_stay(with_engine: bool) -> None:
    assert values(transformer={"apply_rope_fusion": False}).keys() == FUSIONS - {"apply_rope_fusion"}


@pytest.mark.parametrize(
    ("axes", "capability", "expected"),
    [
        ({}, HOPPER, None),
        ({"pp": 4}, HOPPER, None),
        ({"tp": 2}, HOPPER, "1"),
        ({"tp": 2}, None, "1"),
        ({"cp": 2}, (8, 0), "1"),
        ({"tp": 8, "sequence_parallel": True}, BLACKWELL, None),
    ],
)
def test_one_connection_where_layers_overlap_collectives(
    axes: dict[str, Any], capability: tuple[int, int] | None, expected: str | None
) -> None:
    assert max_connections(ParallelConfig(**axes), capability)[0] == expected


@pytest.mark.parametrize(
    ("variable", "used", "expected", "warns"),
    [(None, False, "1", False), ("1", True, "1", False), ("8", False, "8", True), (None, True, None, True)],
)
def test_the_variable_is_set_before_the_device_is_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str | None,
    used: bool,
    expected: str | None,
    warns: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(os, "environ", {} if variable is None else {"CUDA_DEVICE_MAX_CONNECTIONS": variable})
    set_max_connections(ParallelConfig(tp=2))
    assert bool(caplog.records) == warns
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_a_worker_class_asks_for_connections_by_the_axes_of_its_arguments() -> None:
    sharded, whole = SimpleNamespace(parallel=ParallelConfig(tp=2)), SimpleNamespace(parallel=ParallelConfig())
    variables = MegatronWorker.cuda_variables
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert variables(HOPPER, config=sharded) == variables(None, ParallelConfig(cp=2)) == one
    assert variables(HOPPER, config=whole) == variables(BLACKWELL, config=sharded) == variables(HOPPER) == {}


def test_an_engine_that_megatron_cannot_use_is_an_error_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", False)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", None)
    with pytest.raises(ConfigError) as caught:
        chosen_implementation("auto")
    assert (caught.value.key, caught.value.value) == ("model.transformer_impl", "auto")
    assert chosen_implementation("local") == "local"
