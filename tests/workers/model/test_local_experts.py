"""Grouped experts of the local layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from parallel_state import ParallelLayout
from parallel_state.simulated import run_ranks
from workers.model.local_modules import TEColumnParallelGroupedLinear

pytestmark = pytest.mark.simulated


def test_sharded_experts_need_no_more_groups_than_megatrons() -> None:
    def offsets() -> dict[str, Any]:
        model_parallel_cuda_manual_seed(1)
        groups = ProcessGroupCollection(
            ep=mpu.get_expert_model_parallel_group(),
            expt_tp=mpu.get_expert_tensor_parallel_group(),
            expt_dp=mpu.get_expert_data_parallel_group(),
        )
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        layer = TEColumnParallelGroupedLinear(
            1, 4, 6, config=config, init_method=torch.nn.init.zeros_, bias=False, pg_collection=groups
        )
        return {key: tensor.global_offset for key, tensor in layer.sharded_state_dict().items()}

    assert run_ranks(ParallelLayout(2, ep=2), offsets) == [{"weight0": (0, 0, 0)}, {"weight0": (1, 0, 0)}]
