"""Models of Megatron-Bridge compute what transformers does, come back bit by bit, and are compared at every load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller.errors import ConfigError, DataError
from tests.bridge.models import BRIDGE, ENGINE, LAYOUTS, MATRIX, PLAIN, WITH_ENGINE, layouts_of
from tests.ranks import run_ranks
from tests.training import new_context
from tests.workers.roles import actor
from tests.workers.weights.hf_models import Model, Reference, save_model, saved
from tests.workers.weights.test_hf_mutations import silently_different
from workers.config import ParallelConfig
from workers.config.model import model_config_from_hf
from workers.model.build import build_model
from workers.weights.hf.names import hf_shards

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        return made.get(name) or made.setdefault(name, Reference(MATRIX[name], tmp_path_factory.mktemp("hf")))

    return get


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in MATRIX for layout in layouts_of(name)])
def test_scores_gradients_and_weights_are_those_of_transformers(
    name: str, layout: str, reference: Callable[[str], Reference]
) -> None:
    differences = reference(name).differences(LAYOUTS[layout], packed=False)
    exact = {
        quantity: differences.pop(quantity) for quantity in ("load", "export", "generation") if quantity in differences
    }
    assert set(exact.values()) == {0.0}
    differences["gradients"] /= max(
        float(gradient.abs().max()) for gradient in reference(name).computed["gradients"].values()
    )
    assert max(differences.values()) < 5e-5, differences


def loaded(path: Path, **changes: Any) -> None:
    model, parallel = model_config_from_hf(path, provider="bridge", **changes), ParallelConfig()
    build_model(model, parallel, new_context(parallel))


def changed(name: str, **fields: Any) -> Model:
    return (PLAIN | ENGINE)[name]._replace(fields=(PLAIN | ENGINE)[name].fields | fields)


EVERY_SECOND = ["sliding_attention", "full_attention"] * 3
WRONG: dict[str, tuple[Model, dict[str, Any], str]] = {
    "the part of a head that is rotated, as Bridge reads it": (PLAIN["glm4_moe"], {"rotary_percent": 1.0}, "0"),
    "the epsilon of latent norms, which Bridge takes from rms_norm_eps": (
        changed("deepseek_v3", rms_norm_eps=1e-3),
        {},
        "0",
    ),
}
if WITH_ENGINE:
    WRONG = {
        "the epsilon of norms after layers, which Bridge leaves at its default": (
            changed("gemma3", rms_norm_eps=1e-3),
            {},
            "0",
        ),
        "layers with windows, which Bridge takes as 5:1": (changed("gemma3", layer_types=EVERY_SECOND), {}, "1"),
        "the limit of the clamped activation": (ENGINE["gpt_oss"], {"activation_func_clamp_value": 0.1}, "0"),
    }


@pytest.mark.parametrize("case", WRONG)
def test_a_model_that_is_silently_wrong_is_an_error_of_the_load(case: str, tmp_path: Path) -> None:
    model, fields, layer = WRONG[case]
    path = save_model(model, tmp_path)

    def rejected() -> None:
        with pytest.raises(DataError) as caught:
            loaded(path, transformer=fields)
        assert caught.value.layer == f"model.layers.{layer}"
        loaded(path, transformer=fields, verify_load="off")

    run_ranks(rejected, 1)


@pytest.mark.parametrize("name", ENGINE if WITH_ENGINE else ())
def test_no_key_is_read_over(name: str, tmp_path: Path) -> None:
    path = save_model(ENGINE[name], tmp_path)  # an error of Bridge is not silent
    assert "\n".join(run_ranks(silently_different, 1, path, ENGINE[name].settings, Exception)[0]) == ""


def parts(path: Path) -> list[dict[str, torch.Tensor]]:
    """The weights of this rank as they are transferred to other groups, before and after a change of the model."""
    model = dataclasses.asdict(model_config_from_hf(path, dtype="float32", **BRIDGE))
    worker = actor({"tp": 2, "pp": 2, "sequence_parallel": True}, "actor", model=model)
    with worker.context.activate():
        first = {shard.part.name: shard.param for shard in hf_shards(worker.model, worker.context, None)}
        copies = {name: tensor.clone() for name, tensor in first.items()}
        for parameter in worker.model[0].parameters():
            parameter.data *= 2
        hf_shards(worker.model, worker.context, None)
    return [copies, first]


def test_a_transfer_sends_the_current_weights_under_their_own_names(tmp_path: Path) -> None:
    path = save_model(PLAIN["qwen3"], tmp_path)
    expected, ranks = saved(path), run_ranks(parts, 4, path)
    for factor, of_ranks in zip((1, 2), zip(*ranks, strict=True), strict=True):
        names = [name for rank in of_ranks for name in rank]
        assert sorted(names) == sorted(expected)  # each on one rank
        for rank in of_ranks:
            assert all(tensor.equal(factor * expected[name]) for name, tensor in rank.items())


def test_a_model_of_bridge_needs_a_directory(tmp_path: Path) -> None:
    path = save_model(PLAIN["qwen3"], tmp_path)
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(path, provider="bridge", hf_path=None)
    assert (caught.value.key, caught.value.value) == ("model.hf_path", None)
