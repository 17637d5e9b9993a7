"""Models as they are built: their seeds, their stages, their layers. Layouts are verified in tests/workers/verify."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel, gpt_layer_specs

from mcontroller.errors import ConfigError
from parallel_state.layout import ParallelLayout
from parallel_state.megatron import MegatronContext
from tests import forking
from tests.ranks import run_ranks
from tests.training import SMALL_GPT, Role, largest_difference, new_context
from workers.config import ParallelConfig
from workers.model import build
from workers.model.build import build_model
from workers.model.local_spec import block_spec
from workers.model.transformer_config import transformer_config

ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
OF_EXPERTS = dataclasses.replace(SMALL_GPT, num_moe_experts=4, moe_ffn_hidden_size=64, transformer=ROUTER_LOSSES)


@pytest.mark.simulated
def test_a_seed_determines_the_weights() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return Role(dataclasses.replace(SMALL_GPT, seed=seed), ParallelConfig()).weights()

    one, again, other = (run_ranks(weights, 1, seed)[0] for seed in (1, 1, 2))
    assert largest_difference(one, again) == 0.0
    assert largest_difference(one, other) > 0.01


@pytest.mark.simulated
def test_weights_have_the_standard_deviations_of_megatron() -> None:
    [weights] = run_ranks(lambda: Role(OF_EXPERTS, ParallelConfig()).weights(), 1)
    std, layers = OF_EXPERTS.init_method_std, OF_EXPERTS.num_layers
    for name, expected in {
        "embedding.word_embeddings.weight": std,
        "decoder.layers.2.self_attention.linear_qkv.weight": std,
        "decoder.layers.2.self_attention.linear_proj.weight": std / (2 * layers) ** 0.5,
        "decoder.layers.3.mlp.experts.linear_fc1.weight3": std,
        "decoder.layers.3.mlp.experts.linear_fc2.weight3": std / (2 * layers) ** 0.5,
        "output_layer.weight": std,
    }.items():
        assert float(weights[name].std()) == pytest.approx(expected, rel=0.05), name
        assert abs(float(weights[name].mean())) < expected / 10, name
    assert weights["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"].unique().tolist() == [1.0]


@pytest.mark.simulated
def test_each_stage_has_its_own_layers() -> None:
    def held() -> list[tuple[bool, bool, list[int]]]:
        parallel = ParallelConfig(pp=2, vpp=2)
        chunks: list[Any] = build_model(SMALL_GPT, parallel, new_context(parallel))
        return [
            (chunk.pre_process, chunk.post_process, [layer.layer_number for layer in chunk.decoder.layers])
            for chunk in chunks
        ]

    first_rank, second_rank = run_ranks(held, 2)
    assert first_rank == [(True, False, [1]), (False, False, [3])]
    assert second_rank == [(False, False, [2]), (False, True, [4])]


@pytest.mark.simulated
def test_a_user_defined_provider_builds_the_chunks() -> None:
    def provided() -> tuple[list[tuple[bool, bool, int | None]], tuple[int, ...], tuple[int, ...]]:
        parallel, calls = ParallelConfig(pp=2), []
        context = MegatronContext(ParallelLayout(2, pp=2))
        config = transformer_config(SMALL_GPT, parallel)

        def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
            calls.append((pre_process, post_process, vp_stage))
            spec = block_spec(config, "local", context.pg.pp.rank(), vp_stage)
            return GPTModel(config, spec, 40, 16, pre_process, post_process, vp_stage=vp_stage)

        [plain] = build_model(SMALL_GPT, parallel, context, model_provider=provider)
        [critic] = build_model(SMALL_GPT, parallel, context, model_provider=provider, value_head=True)
        last = context.pg.pp.rank() == 1
        return calls, *(tuple(c.output_layer.weight.shape) if last else () for c in (plain, critic))  # type: ignore

    first, last = run_ranks(provided, 2)
    assert first == ([(True, False, None)] * 2, (), ())
    assert last == ([(False, True, None)] * 2, (40, 64), (1, 64))


@pytest.mark.processes
def test_the_choice_of_layers_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def built_twice() -> None:
        reloaded = importlib.reload(build)  # simulated ranks of other tests have printed it in this process
        parallel = ParallelConfig(tp=2)
        context = new_context(parallel)
        for _ in range(2):
            reloaded.build_model(SMALL_GPT, parallel, context)

    forking.run_ranks(built_twice, 2)
    chosen = "transformer_engine" if torch.cuda.is_available() and gpt_layer_specs.HAVE_TE else "local"
    assert capfd.readouterr().out.count(f"model.transformer_impl=auto: layers of {chosen}") == 1


@pytest.mark.simulated
def test_what_megatron_cannot_build_is_a_configuration_error() -> None:
    def rejected() -> tuple[str, str]:
        parallel = ParallelConfig()
        model = dataclasses.replace(OF_EXPERTS, transformer={"moe_token_dispatcher_type": "flex"})
        with pytest.raises(ConfigError) as caught:
            build_model(model, parallel, new_context(parallel))
        return caught.value.key, str(caught.value)

    [(key, message)] = run_ranks(rejected, 1)
    assert key == "model" and "dispatcher requires TPxEP > 1" in message  # Megatron's reason


@pytest.mark.simulated
def test_transformer_engine_is_rejected_if_it_cannot_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")

    def rejected() -> tuple[str, str]:
        parallel = ParallelConfig()
        model = dataclasses.replace(SMALL_GPT, transformer_impl="transformer_engine")
        with pytest.raises(ConfigError) as caught:
            build_model(model, parallel, new_context(parallel))
        return caught.value.key, caught.value.value

    assert run_ranks(rejected, 1) == [("model.transformer_impl", "transformer_engine")]
