"""A mixture of experts as `python -m mcontroller verify examples/verify/moe.py:program` verifies it."""

import dataclasses

import gpt


def config(**parallel):
    return gpt.config(
        num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.01,
        **parallel,
    )  # fmt: skip


program = dataclasses.replace(gpt.program, config=config)
