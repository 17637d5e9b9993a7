"""Every number of a model is on the device and in the dtype of its model, but for what Megatron keeps in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from mcontroller.errors import ConfigError
from tests.ranks import run_ranks
from tests.training import SMALL_GPT, new_context
from tests.workers.roles import MODEL, actor, experience
from workers.config import ModelConfig, ParallelConfig
from workers.model.build import build_model
from workers.model.local_spec import block_spec
from workers.model.placement import place_chunks
from workers.model.transformer_config import transformer_config

ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
MODELS = {
    "experts": dataclasses.replace(SMALL_GPT, num_moe_experts=4, moe_ffn_hidden_size=64, transformer=ROUTER),
    "learned positions": dataclasses.replace(SMALL_GPT, position_embedding_type="learned_absolute"),
    "tied": dataclasses.replace(SMALL_GPT, tie_embeddings=True),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Held = dict[str, tuple[torch.dtype, str]]


class OfAUser(GPTModel):
    """With a layer, a table and a mask that torch makes in its own default dtype."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


def own_chunk(model: ModelConfig, **changes: Any) -> list[torch.nn.Module]:
    """A chunk of a user's class in the dtype of ``model``, where the ModelConfig that goes with it says float32."""
    parallel = ParallelConfig()
    context = new_context(parallel)
    config = transformer_config(model, parallel)
    for name, value in changes.items():
        setattr(config, name, value)

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        spec = block_spec(config, "local", context.pg.pp.rank(), vp_stage)
        return OfAUser(config, spec, 40, 16, pre_process, post_process, position_embedding_type="learned_absolute")

    return build_model(SMALL_GPT, parallel, context, model_provider=provider)


def held(chunks: list[torch.nn.Module]) -> tuple[Held, Held]:
    """Dtype and device of every parameter, and of every buffer, by name."""
    params = {name: (p.dtype, p.device.type) for chunk in chunks for name, p in chunk.named_parameters()}
    buffers = {name: (b.dtype, b.device.type) for chunk in chunks for name, b in chunk.named_buffers()}
    return params, buffers


@pytest.mark.simulated
@pytest.mark.parametrize("value_head", [False, True], ids=["logits", "values"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_parameters_have_the_models_dtype_and_routers_sums_float32(model: str, dtype: str, value_head: bool) -> None:
    def built() -> tuple[Held, Held]:
        parallel, wanted = ParallelConfig(), dataclasses.replace(MODELS[model], dtype=dtype)
        if value_head:
            wanted = dataclasses.replace(wanted, tie_embeddings=False)
        return held(build_model(wanted, parallel, new_context(parallel), value_head=value_head))

    [(params, buffers)] = run_ranks(built, 1)
    assert {at for at, _ in params.values()} == {DTYPES[dtype]}, params
    assert {at for at, _ in buffers.values()} == ({torch.float32} if model == "experts" else set()), buffers


@pytest.mark.simulated
@pytest.mark.parametrize(
    "changes",
    [
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "transformer": ROUTER},
        {"position_embedding_type": "learned_absolute"},
    ],
    ids=["experts", "learned positions"],
)
def test_a_bfloat16_model_is_trained_on_a_cpu(changes: dict[str, Any]) -> None:
    def trained() -> float:
        worker = actor({}, "actor", model=MODEL | {"dtype": "bfloat16"} | changes)
        return worker.update_actor(experience(8)).meta_info["metrics"]["actor/grad_norm"]  # type: ignore[no-any-return]

    assert run_ranks(trained, 1)[0] > 0


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_user_defined_model_has_the_dtype_of_its_own_config(dtype: str) -> None:
    [(params, buffers)] = run_ranks(lambda: held(own_chunk(dataclasses.replace(SMALL_GPT, dtype=dtype))), 1)
    assert {at for at, _ in params.values()} == {DTYPES[dtype]}, params
    assert buffers["table"][0] == DTYPES[dtype]
    assert buffers["mask"][0] == torch.bool


@pytest.mark.simulated
def test_parameters_and_buffers_go_to_the_device() -> None:
    def placed() -> list[tuple[Held, Held]]:
        parallel = ParallelConfig()
        built = build_model(MODELS["experts"], parallel, new_context(parallel))
        both = [built, own_chunk(SMALL_GPT)]
        for chunks in both:
            place_chunks(chunks, torch.device("meta"))
        return [held(chunks) for chunks in both]

    for params, buffers in run_ranks(placed, 1)[0]:
        assert params and buffers
        assert {device for _, device in (*params.values(), *buffers.values())} == {"meta"}


@pytest.mark.simulated
def test_parameters_stay_the_same_objects_with_megatrons_marks() -> None:
    def kept() -> tuple[bool, bool, bool]:
        chunk: Any = own_chunk(SMALL_GPT)[0]
        before, weight = list(chunk.parameters()), chunk.output_layer.weight
        chunk.config.params_dtype, chunk.config.bf16 = torch.bfloat16, True
        place_chunks([chunk], torch.device("cpu"))
        same = all(one is other for one, other in zip(before, chunk.parameters(), strict=True))
        return same, weight.dtype == torch.bfloat16, weight.tensor_model_parallel

    assert run_ranks(kept, 1) == [(True, True, True)]


@pytest.mark.simulated
def test_a_config_that_contradicts_itself_is_rejected() -> None:
    def rejected() -> tuple[str, torch.dtype]:
        with pytest.raises(ConfigError) as caught:
            own_chunk(SMALL_GPT, bf16=True)
        return caught.value.key, caught.value.value

    assert run_ranks(rejected, 1) == [("params_dtype", torch.float32)]


def test_a_chunk_without_megatrons_config_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        place_chunks([torch.nn.Linear(2, 2)], torch.device("cpu"))
    assert (caught.value.key, caught.value.value) == ("config", None)
