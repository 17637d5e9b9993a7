"""Fields of Megatron's optimizer and gradient buffers that are not computed, or are set twice, are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from mcontroller.errors import ConfigError
from workers.config import CriticConfig, ModelConfig, OptimConfig, load_config
from workers.train.optimizer import data_parallel_config, optimizer_config

GPT = ModelConfig(vocab_size=100, max_sequence_length=64, num_layers=4, hidden_size=48, num_attention_heads=12)
MODEL = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def critic(dtype: str = "float32", ddp: dict[str, Any] | None = None, **optim: Any) -> CriticConfig:
    return load_config(CriticConfig, {"model": GPT}, {"model": {"dtype": dtype}, "optim": optim, "ddp": ddp or {}})


@pytest.mark.parametrize(
    ("optim", "key"),
    [
        ({"megatron": {"adam_eps": 1e-6}}, "optim.megatron.adam_eps"),
        ({"megatron": {"bf16": True}}, "optim.megatron.bf16"),
        ({"optimizer": "soap"}, "optim.optimizer"),
        ({"optimizer": "sgd", "eps": 1e-4}, "optim.betas"),
        ({"optimizer": "sgd", "distributed_optimizer": True}, "optim.distributed_optimizer"),
        ({"megatron": {"timers": "all"}}, "optim.megatron.timers"),
        ({"megatron": {"log_num_zeros_in_grad": True}}, "optim.megatron.log_num_zeros_in_grad"),
    ],
)
def test_a_field_of_the_optimizer_that_is_not_computed_is_rejected(optim: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        critic(**optim)
    assert caught.value.fields["key"] == key


def test_the_optimizer_is_distributed_by_default_over_several_ranks_on_a_gpu() -> None:
    actual = [
        OptimConfig().resolved(ranks, on_gpu=gpu).distributed_optimizer for ranks in (1, 2) for gpu in (False, True)
    ]
    assert actual == [False, False, False, True]
    chosen = OptimConfig(distributed_optimizer=False).resolved(2, on_gpu=True)
    assert (chosen.distributed_optimizer, OptimConfig(optimizer="sgd").resolved(2, on_gpu=True)) == (
        False,
        OptimConfig(optimizer="sgd", distributed_optimizer=False),
    )


@pytest.mark.parametrize(
    "ddp",
    [
        {"overlap_grad_reduce": True},
        {"use_megatron_fsdp": True},
        {"average_in_collective": True},
        {"check_for_nan_in_grad": True},
        {"num_distributed_optimizer_instances": 2},
    ],
)
def test_a_field_of_the_gradient_buffers_that_is_not_computed_is_rejected(ddp: dict[str, Any]) -> None:
    [name] = ddp
    with pytest.raises(ConfigError) as caught:
        critic(ddp=ddp)
    assert caught.value.fields["key"] == f"ddp.{name}"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"sgd_momentums": 0.1}, "optim.megatron.sgd_momentums"),
        ({"decoupled_lr": "high"}, "optim.megatron.decoupled_lr"),
        ({"main_params_dtype": "float8", "use_precision_aware_optimizer": True}, "optim.megatron.main_params_dtype"),
        ({"use_precision_aware_optimizer": True}, "optim.megatron"),
        ({"exp_avg_dtype": "bfloat16"}, "optim.megatron"),
    ],
)
def test_a_field_that_the_installed_megatron_cannot_compute_is_rejected(fields: dict[str, Any], key: str) -> None:
    optimizer = "sgd" if "sgd_momentums" in fields else "adam"
    with pytest.raises(ConfigError) as caught:
        optimizer_config(OptimConfig(optimizer=optimizer, megatron=fields), MODEL)
    assert caught.value.key == key


def test_an_optimizer_in_host_memory_needs_cuda() -> None:
    with pytest.raises(ConfigError) as caught:
        optimizer_config(OptimConfig(megatron={"optimizer_cpu_offload": True}), MODEL)
    assert (caught.value.key, caught.value.value) == ("optim.megatron.optimizer_cpu_offload", True)


def test_fields_of_megatron_pass_through_in_their_types() -> None:
    optim = OptimConfig(lr=2e-3, eps=1e-6, betas=(0.8, 0.9), megatron={"decoupled_lr": 1, "config_logger_dir": "logs"})
    built = optimizer_config(optim, MODEL)
    assert (built.optimizer, built.lr, built.adam_eps, built.adam_beta2) == ("adam", 2e-3, 1e-6, 0.9)
    assert (built.decoupled_lr, built.config_logger_dir, built.params_dtype) == (1.0, "logs", torch.float32)
    ddp = data_parallel_config(OptimConfig(overlap_grad_reduce=True), {"bucket_size": 7, "grad_reduce_in_fp32": False})
    assert (ddp.bucket_size, ddp.grad_reduce_in_fp32, ddp.overlap_grad_reduce) == (7, False, True)
    with pytest.raises(ConfigError) as caught:
        data_parallel_config(OptimConfig(), {"bucket_sizes": 3})
    assert (caught.value.key, caught.value.value) == ("ddp.bucket_sizes", 3)
