"""Which tests of the workers do not run on the pretended device, and which run there only with ``--all``."""

from __future__ import annotations

NOT_ON_A_GPU = {
    "tests/workers/train/test_gradient_fusion.py": (
        "linear layers in plain PyTorch fuse gradients on a CPU only; on a GPU Transformer Engine does"
    ),
    "tests/workers/generate/test_generation.py::test_reordered_weights_generate_the_same": (
        "oneDNN's memory layout of weights is for CPUs"
    ),
    "tests/workers/config/test_optim.py::test_an_optimizer_in_host_memory_needs_cuda": (
        "it rejects a machine without CUDA"
    ),
}
"""File or test -> why it must fail on a GPU. With ``--all`` it runs, and an entry that passes is an error."""

SIMULATED = (
    "tests/workers/communication/test_estimate.py::test_the_bytes_on_paper",
    "tests/workers/checkpoint/test_optimizer_state.py::test_a_save_in_buckets_gathers_no_optimizer_over_dp",
    "tests/workers/test_mistakes.py",
    "tests/workers/weights/transfer/test_equal_generation.py",
    "tests/workers/weights/transfer/test_verification.py",
    "tests/workers/generate/vllm/test_rollout.py::test_every_engine_generates_a_part_and_the_rows_return_in_order",
    "tests/workers/weights/test_hf_stream.py",
    "tests/workers/router_replay/test_trainer.py",
    "tests/workers/test_multi_turn.py",
    "tests/workers/test_simulated_roles.py",
    "tests/workers/test_token_balance.py",
)
"""Files or tests that simulate ranks themselves: these compute on the CPU, and reject tensors of other devices."""

ALWAYS = {
    "tests/workers/test_parity_matrix.py": (
        "TP2 x PP2 x CP2,",
        "TP2 x PP2 x EP2 with SP, float32",
        "PP2 x DP2, distributed optimizer with overlap,",
        "PP2 with VPP2, bfloat16",
        "TP2 x PP2 x CP2 with SP, packed, by tokens",
        "CP2, learned positions, packed",
        "PP2, tied embeddings, bfloat16",
        "PP2 with VPP2 x EP2, recomputation, router losses, float32",
    ),
    "tests/workers/weights/test_hf.py::test_logits_are_transformers_and_the_export_is_bit_exact": (
        "llama-pp-vpp",
        "qwen2-tp-pp",
        "qwen2_tied-pp-vpp",
        "qwen3-tp-pp",
        "qwen3_moe-tp-ep-etp",
        "qwen3_moe_raw",
    ),
    "tests/workers/memory/test_estimate.py::test_estimates_are_within_a_tenth_of_the_counted_bytes": (
        "[tp 2, sequence parallel, bfloat16]",
        "[dp 2,",
        "[ep 2, sharded",
        "[pp 2, vpp 2",
        "[cp 2,",
    ),
    "tests/fake_cuda/transformer_engine/test_memory.py": ("[tp 2,", "[cp 2,", "[dp 2, MLP", "[ep 2,"),
    "tests/workers/model/test_build.py::test_layouts_compute_what_one_process_does": (
        "tp2-cp2-pp2-sp",
        "experts tp2-pp2-ep2-etp1-sp",
        "tied pp2-vpp2",
        "layer norm",
    ),
    "tests/workers/generate/test_rollout_layout.py::test_responses_equal_those_of_one_process": (
        "cp4-tp2",
        "vpp",
        "etp",
        "uneven",
    ),
    "tests/workers/checkpoint/test_optimizer_state.py::test_training_of_experts_continues_in_another_layout": (
        "together-True",
        "apart-False",
    ),
    "tests/workers/distinct_tokens/test_shared_prompts.py::test_shared_prompts_have": (
        "tp2-sp-dp2-rope",
        "one process-attention recomputed",
    ),
    "tests/workers/off_policy/test_in_ray.py": (),
    "tests/workers/run/test_pools_run.py": (),
    "tests/workers/run/test_preempted_run.py": (),
    "tests/workers/weights/test_hf_smollm2.py": (),
    "tests/workers/router_replay/test_layouts.py::test_replay_equals": (
        "recompute-experts",
        "pp2-vpp2-recompute-some",
        "tp2-pp2-cp2-packed-by-tokens",
    ),
    "tests/workers/router_replay/test_layouts.py::test_recorded_experts": ("tp2-pp2-cp2-packed-by-tokens", "ep2"),
    "tests/workers/router_replay/test_generation.py::test_generation_records": (
        "many-experts",
        "tp2-pp2-ep2",
        "copy-many-experts",
    ),
    "tests/fake_cuda/transformer_engine/test_fp8.py::test_packed_rows_train_in_fp8_with_whole_blocks_of_tokens": (
        "one process",
        "mxfp8",
    ),
    "tests/fake_cuda/transformer_engine/test_fp8.py::test_fp8_changes": ("delayed",),
    "tests/fake_cuda/transformer_engine/test_fp8.py::test_weights_move": ("delayed",),
}
"""Tests of many layouts: file or test -> parts of the names of the cases that run without ``--all`` too."""


def reason_to_fail(node_id: str) -> str | None:
    """Return why this test must fail on a GPU, if it is in the list."""
    if any(_is_of(node_id, entry) for entry in SIMULATED):
        return "simulated ranks compute on the CPU"
    return next((reason for entry, reason in NOT_ON_A_GPU.items() if _is_of(node_id, entry)), None)


def runs_only_with_all(node_id: str) -> bool:
    """Whether this test runs with ``--all`` only."""
    return any(_is_of(node_id, entry) and not any(case in node_id for case in cases) for entry, cases in ALWAYS.items())


def _is_of(node_id: str, entry: str) -> bool:
    return node_id.startswith(entry) and node_id[len(entry) :][:1] in ("", ":", "[", "_")
