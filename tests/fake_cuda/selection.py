"""The tests that run on the fake CUDA device, each with the reason, and the tests that cannot."""

from __future__ import annotations

from collections.abc import Sequence

NOT_ON_A_GPU = {
    "tests/workers/train/test_gradient_fusion.py": (
        "linear layers in plain PyTorch fuse gradients on a CPU only; on a GPU Transformer Engine does"
    ),
    "tests/workers/config/test_optim.py::test_an_optimizer_in_host_memory_needs_cuda": (
        "it rejects a machine without CUDA"
    ),
}
"""File or test -> why it must fail on a GPU. An entry that passes is an error."""

SIMULATED = (
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
    "tests/workers/test_trace.py",
)
"""Files or tests that simulate ranks themselves: these compute on the CPU, and reject tensors of other devices."""

_MATRIX = "tests/workers/test_parity_matrix.py::test_layout_computes_what_one_process_computes"
_TE = "tests/fake_cuda/transformer_engine"

CHOSEN: dict[str, tuple[str, ...]] = {
    "what the fake CUDA device itself does, and the paths that only its tests take": (
        "tests/fake_cuda/test_cuda_ipc.py",
        "tests/fake_cuda/test_device.py",
        "tests/fake_cuda/test_device_of_a_worker.py",
        "tests/fake_cuda/test_gpucheck.py",
        "tests/fake_cuda/test_memory.py",
        "tests/fake_cuda/test_nccl_transfer.py",
        "tests/fake_cuda/test_process_groups.py",
        "tests/fake_cuda/test_races.py",
        "tests/fake_cuda/test_selection.py",
        "tests/fake_cuda/test_synchronisations.py",
        "tests/fake_cuda/test_vllm_engine.py",
        "tests/fake_cuda/test_workers.py",
        "tests/fake_cuda/test_trace_times.py",
    ),
    "tensors of every axis in NCCL's collectives, with each kind of rows and of model": (
        f"{_MATRIX}[PP2 with VPP2 x EP2, recomputation, router losses, float32]",
        f"{_MATRIX}[CP2, learned positions, packed, float32]",
        "tests/workers/train/test_packed.py::test_packed_rows_have_the_results_of_padded_ones[pp2-vpp2-dp2-0]",
        "tests/workers/test_roles.py::test_two_roles_of_different_layouts_share_processes",
    ),
    "a model is built on the device, with the defaults and layers of one": (
        "tests/workers/model/test_gpu_defaults.py",
        "tests/workers/model/test_local_attention.py",
        "tests/workers/model/test_local_modules.py",
        "tests/workers/model/test_placement.py",
        "tests/workers/model/test_build.py::test_the_choice_of_layers_is_printed_once",
    ),
    "losses, scores and optimizers make new tensors on the device": (
        "tests/workers/config/test_optim.py::test_the_optimizer_is_distributed_by_default_over_several_ranks_on_a_gpu",
        "tests/workers/test_bad_input.py::test_nan_in_a_loss_raises_on_every_rank_and_names_its_origin",
        "tests/workers/test_bad_input.py::test_overflow_of_float16_skips_the_step_and_lowers_the_loss_scale",
        "tests/workers/test_reference.py::test_moves_of_a_resumed_reference_are_exact[tp]",
        "tests/workers/test_roles.py::test_a_reward_model_scores_the_last_token_of_a_response",
        "tests/workers/train/test_micro_batches.py",
        "tests/workers/train/test_nonfinite.py::test_nan_of_the_backward_pass[dp, distributed optimizer]",
        "tests/workers/train/test_optimizer_steps.py::test_parameter_groups_and_buckets[dp2-distributed]",
        "tests/workers/train/test_policy_objective.py::test_the_reported_policy_loss",
    ),
    "experts are recorded and replayed on the device": (
        "tests/workers/router_replay/test_layouts.py::test_replay_equals[pp2-vpp2-recompute-some]",
        "tests/workers/router_replay/test_generation.py::test_generation_records[tp2-pp2-ep2]",
    ),
    "decoding: the cache, samples and masks on the device": (
        "tests/workers/generate/test_generation.py::test_log_probs_of_samples_equal_those_of_scoring[tp2-pp2]",
        "tests/workers/generate/test_passes.py",
        "tests/workers/generate/test_unequal_prompts.py",
    ),
    "engines share the device with a policy": (
        "tests/workers/generate/vllm/test_buckets.py",
        "tests/workers/generate/vllm/test_gpu_memory.py",
        "tests/workers/generate/vllm/test_rollout.py::test_all_engines_of_an_actor_hold_its_weights_after_every_update",
        "tests/workers/generate/vllm/test_served_engine.py",
    ),
    "parts leave the device and come back, with page-locked memory and streams": (
        "tests/workers/test_colocated.py::test_training_with_offload[bfloat16, distributed optimizer]",
        "tests/workers/test_colocated.py::test_offloaded_roles",
        "tests/workers/test_communicators.py",
        "tests/workers/test_distinct_gpus.py",
        "tests/workers/weights/test_offload.py",
    ),
    "checkpoints: read from and written to the device, in the background, with its random numbers": (
        "tests/workers/checkpoint/test_background_saves.py",
        "tests/workers/checkpoint/test_optimizer_state.py::test_training_resumes_to_the_bit[tp2-dp2]",
        "tests/workers/checkpoint/test_save_and_load.py::test_random_numbers_and_learning_rate_continue",
    ),
    "weights are gathered, hashed, copied to another layout, read from and written to files": (
        "tests/workers/weights/test_fingerprints.py::test_fingerprints_are_those_of_one_process[experts-buffers]",
        "tests/workers/weights/test_full_state.py::test_loading_a_full_state_sets_every_weight[experts]",
        "tests/workers/weights/test_hf.py::test_logits_are_transformers[qwen3_moe-tp-ep-etp-sequence_parallel]",
        "tests/workers/weights/test_hf.py::test_a_trained_actor_is_exported",
    ),
    "layers of Transformer Engine: scores, training, decoding, checkpoints, FP8": (
        f"{_TE}/test_broken_installation.py",
        f"{_TE}/test_checkpoints.py::test_checkpoints_go_from_local_layers_to_transformer_engines_and_back[experts]",
        f"{_TE}/test_checkpoints.py::test_training_in_fp8_continues_from_a_checkpoint_with_its_scales[delayed]",
        f"{_TE}/test_fp8.py::test_packed_rows_train_in_fp8[mxfp8-experts on ep2]",
        f"{_TE}/test_fp8.py::test_packed_rows_train_in_fp8[delayed-one process]",
        f"{_TE}/test_fp8.py::test_fp8_changes[delayed]",
        f"{_TE}/test_fp8.py::test_weights_move[delayed]",
        f"{_TE}/test_fp8.py::test_an_offload_frees",
        f"{_TE}/test_generation.py",
        f"{_TE}/test_layers.py",
    ),
}
"""Reason -> what runs without ``--all``: files, tests by the beginning of their names, and the names of cases.

One case for each path that touches the device. What a layout computes is the same on every device, and ``make test``
compares it.
"""


def reason_to_fail(node_id: str) -> str | None:
    """Return why this test must fail on a GPU, if it is in a list."""
    if any(_is_of(node_id, entry) for entry in SIMULATED):
        return "simulated ranks compute on the CPU"
    return next((reason for entry, reason in NOT_ON_A_GPU.items() if _is_of(node_id, entry)), None)


def is_chosen(node_id: str) -> bool:
    """Whether this test runs without ``--all``."""
    return any(_is_of(node_id, entry) for entries in CHOSEN.values() for entry in entries)


def cases_that_do_not_exist(node_ids: Sequence[str]) -> list[str]:
    """Return the chosen cases that these tests, all cases of them, do not have."""
    cases = [entry for entries in CHOSEN.values() for entry in entries if "[" in entry]
    collected = [entry for entry in cases if any(_is_of(node, entry.partition("[")[0]) for node in node_ids)]
    return [entry for entry in collected if not any(_is_of(node, entry) for node in node_ids)]


def _is_of(node_id: str, entry: str) -> bool:
    name, _, case = entry.removesuffix("]").partition("[")
    rest = node_id.removeprefix(name)
    return rest != node_id and rest[:1] in ("", ":", "[", "_") and (not case or rest.endswith(f"[{case}]"))
