"""The published sizes of models, as their ``config.json`` has them, and dry runs with them.

python -m examples.recipes.dry_runs [--check] [NAME ...]    # every recipe, and layouts that others publish

A dry run needs no weights: a recipe's is that of ``python -m mcontroller dry-run``, one pipeline of every call; with
``--check``, all other ranks run too. Of the layouts of others, it is one update with the layers and losses of this
project, and the longest rows of their settings, without layers that predict several tokens. The names that begin with
``limit`` are what a dry run may take on two cores: 3 minutes with ``--check`` and 4 GiB for Kimi-K2 and DeepSeek-V3, 2
minutes for Llama-70B, 15 s for a model of 1.7B.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from parallel_state.dry_run.outcome import CONTEXT, GIB, gpu_bytes
from trainer.run.config import RunConfig, read_run_config
from trainer.run.model_roles import role_calls
from trainer.run.shared_gpus import shared_gpus_of_run
from workers.planning import planning

RECIPES = Path(__file__).parent
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

QWEN3 = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "attention_bias": False,
}  # fmt: skip
QWEN3_8B = QWEN3 | {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B = QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "tie_word_embeddings": False,
    "rope_theta": 10000, "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "hidden_act": "silu",
    "attention_bias": False, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
MODELS: dict[str, dict] = {
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "hidden_act": "silu",
    },
    "qwen3-1.7b": QWEN3 | {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B,
    "qwen3-235b-a22b": QWEN3_30B | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    "qwen2.5-3b": {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu",
    },
    "llama-3.3-70b": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "hidden_act": "silu",
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": DEEPSEEK_V3 | {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
        "rope_theta": 50000.0, "max_position_embeddings": 131072, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "n_routed_experts": 384, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "beta_fast": 1, "beta_slow": 1, "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
}  # fmt: skip
"""Name of a model -> its ``config.json``; a recipe has the name of its model and one more word."""


@dataclass(frozen=True)
class Published:
    """A layout that others publish.

    Attributes:
        source: project and commit, and the file.
        gpu: the GPU that they name.
        model: its name in ``MODELS``.
        ranks: the number of GPUs.
        tokens: of a micro-batch, over all ranks of cp: one row of this length.
        parallel: the axes.
        transformer: fields of TransformerConfig.
        bfloat16_gradients: reduce gradients in bfloat16, not in float32.
        optimizer: fields of Megatron's OptimizerConfig.
        every_rank: run every rank, not one of each stage.
    """

    source: str
    gpu: str
    model: str
    ranks: int
    tokens: int
    parallel: dict[str, Any]
    transformer: dict[str, Any] = field(default_factory=dict)
    bfloat16_gradients: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict)
    every_rank: bool = False

    def run(self, model: Path) -> dict[str, Any]:
        """Return a run whose actor makes the update."""
        experts = {"moe_grouped_gemm": True} if "ep" in self.parallel else {}
        return {
            "pool": {"process_on_nodes": [8] * (self.ranks // 8), "use_gpu": True},
            "data": {"train": {"path": "unread.jsonl"}, "train_batch_size": 512},
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {
                "model": {"hf_path": str(model), "dtype": "bfloat16", "transformer": experts | self.transformer},
                "parallel": self.parallel,
                "optim": {"lr": 1e-6, "distributed_optimizer": True, "megatron": self.optimizer},
                "ddp": {"grad_reduce_in_fp32": not self.bfloat16_gradients},
                "packed": True,
                "ppo_max_tokens_per_micro_batch": self.tokens,
                "ppo_mini_batch_size": 8192,
                "use_kl_loss": False,
                "rollout": {
                    "engine": "vllm",
                    "vllm": {"tp": 4},
                    "n": 16,
                    "prompt_length": 1024,
                    "response_length": self.tokens - 1024,
                },
            },
        }


BRIEF = {"bfloat16_gradients": True, "optimizer": {"use_precision_aware_optimizer": True}}
ON_HOST = {
    "optimizer": {
        "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True,
    }
}  # fmt: skip
LARGE = {"tp": 8, "sequence_parallel": True, "pp": 8, "cp": 4, "ep": 32, "etp": 1}
LAST = {"num_layers_in_last_pipeline_stage": 5}
PUBLISHED = {
    "nemo-rl-qwen3-30b-a3b": Published(
        "NeMo-RL 7ea279abf, grpo-qwen3-30ba3b-4n8g", "H100", "qwen3-30b-a3b", 32, 4096, {"ep": 8}, {}, **BRIEF
    ),
    "nemo-rl-qwen3-30b-a3b-40k": Published(
        "NeMo-RL 7ea279abf, grpo-qwen3-30ba3b-4n8g-40K", "H100", "qwen3-30b-a3b", 32, 40960,
        {"tp": 4, "sequence_parallel": True, "cp": 8, "ep": 8, "etp": 1}, FULL, **BRIEF,
    ),
    "nemo-rl-qwen3-235b-a22b": Published(
        "NeMo-RL 7ea279abf, grpo-qwen3-235b-16n8g", "H100", "qwen3-235b-a22b", 128, 8192,
        {"tp": 2, "sequence_parallel": True, "pp": 8, "cp": 2, "ep": 16, "etp": 1},
        {**FULL, "num_layers_in_first_pipeline_stage": 11, "num_layers_in_last_pipeline_stage": 11}, **BRIEF,
    ),
    "nemo-rl-llama-3.3-70b": Published(
        "NeMo-RL 7ea279abf, grpo_math_70B_megatron", "H100", "llama-3.3-70b", 64, 4096, {"tp": 4, "pp": 4}, {}, **BRIEF
    ),
    "nemo-rl-deepseek-v3": Published(
        "NeMo-RL 7ea279abf, grpo-deepseek-v3-32n8g", "H100", "deepseek-v3", 256, 1536, {"pp": 16, "ep": 16},
        {**FULL, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 2}, **BRIEF,
    ),
    "megatron-deepseek-v3": Published(
        "Megatron-Bridge 0edb66993, deepseek_v3_pretrain_1024gpu_h100_bf16", "H100", "deepseek-v3", 1024, 4096,
        {"tp": 2, "sequence_parallel": True, "pp": 16, "ep": 64, "etp": 1},
        {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 1},
        bfloat16_gradients=True,
        optimizer={
            "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16",
        },
    ),
    "verl-qwen3-30b-a3b": Published(
        "verl b178a3cd5, run_qwen3moe-30b_megatron_96gb", "H20", "qwen3-30b-a3b", 8, 10240, {"ep": 8, "etp": 1}, {},
        **ON_HOST,
    ),
    "verl-deepseek-v3": Published(
        "verl b178a3cd5, run_deepseek671b_math_megatron_80gb", "H100", "deepseek-v3", 256, 6144,
        {"pp": 16, "ep": 16, "etp": 1},
        {**FULL, "num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 1},
    ),
    "slime-qwen3-30b-a3b": Published(
        "slime 624b824a8, run-qwen3-30B-A3B", "H100", "qwen3-30b-a3b", 8, 20480,
        {"tp": 4, "sequence_parallel": True, "ep": 8, "etp": 1}, FULL, **ON_HOST,
    ),
    "slime-qwen3-235b-a22b": Published(
        "slime 624b824a8, run-qwen3-235B-A22B", "H100", "qwen3-235b-a22b", 64, 2 * 16384,
        {"tp": 4, "sequence_parallel": True, "pp": 4, "cp": 2, "ep": 16, "etp": 1},
        {**FULL, "num_layers_in_last_pipeline_stage": 22}, **ON_HOST,
    ),
    "slime-deepseek-r1": Published(
        "slime 624b824a8, run-deepseek-r1", "H100", "deepseek-v3", 128, 4 * 16384,
        {"tp": 8, "sequence_parallel": True, "pp": 4, "cp": 4, "ep": 32, "etp": 1},
        {**FULL, "num_layers_in_last_pipeline_stage": 13}, **ON_HOST,
    ),
    "slime-kimi-k2": Published(
        "slime 624b824a8, run-kimi-k2-Instruct", "H100", "kimi-k2", 256, 4 * 16384,
        {"tp": 8, "sequence_parallel": True, "pp": 8, "cp": 4, "ep": 32, "etp": 1},
        {**FULL, "num_layers_in_last_pipeline_stage": 5}, **ON_HOST,
    ),
    "limit-kimi-k2": Published("no fit", "H100", "kimi-k2", 256, 16384, LARGE, LAST),
    "limit-kimi-k2-recomputed": Published("recomputed", "H100", "kimi-k2", 256, 16384, LARGE, LAST | FULL),
    "limit-deepseek-v3": Published("1,024 ranks", "H100", "deepseek-v3", 1024, 16384, LARGE, LAST),
    "limit-llama-3.3-70b": Published(
        "all 64 ranks", "H100", "llama-3.3-70b", 64, 8192, {"tp": 8, "sequence_parallel": True, "pp": 4},
        every_rank=True,
    ),
    "limit-qwen3-30b-a3b": Published(
        "32 ranks", "H100", "qwen3-30b-a3b", 32, 8192, {"tp": 2, "sequence_parallel": True, "pp": 2, "ep": 8, "etp": 1}
    ),
    "limit-qwen3-1.7b": Published("1 rank", "H100", "qwen3-1.7b", 8, 16384, {}),
}  # fmt: skip


def model_directory(path: Path, name: str) -> Path:
    """Write ``config.json`` of a model, and return the directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name] | {"torch_dtype": "bfloat16", "eos_token_id": 1}))
    return path


def read(name: str, folder: Path) -> RunConfig:
    """Return the configuration of a recipe, or of a layout of others; ``folder`` gets the model's ``config.json``."""
    if name in PUBLISHED:
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(PUBLISHED[name].run(model_directory(folder / name, PUBLISHED[name].model))))
        return read_run_config(file)
    model = model_directory(folder / name, name.rpartition("-")[0])
    return read_run_config(RECIPES / f"{name}.yaml", [f"actor_rollout_ref.model.hf_path={model}"])


@contextlib.contextmanager
def sampled_memory() -> Iterator[list[int]]:
    """Yield a list that gets the memory of this process and its children [bytes], twice a second.

    A page of several processes counts once.
    """
    sizes, ended, process = list[int](), threading.Event(), psutil.Process()

    def sample() -> None:
        while not sizes or not ended.wait(0.5):
            size = 0
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                    size += one.memory_full_info().pss
            sizes.append(size)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


def row(name: str, folder: Path, *, checks: bool) -> str:
    """Return the row of a recipe, or of a layout of others, in a table of Markdown."""
    published, began = PUBLISHED.get(name), time.perf_counter()
    config, gpu = read(name, folder), "H100" if published is None else published.gpu
    with sampled_memory() as sizes:
        outcomes = {
            name: call.outcome(second=checks, every_rank=published is not None and published.every_rank)
            for name, call in role_calls(config).items()
            if (published is None or call.method == "update_actor") and not call.needs_every_rank
        }
    update = next(iter(outcomes.values()))
    source = name if published is None else published.source
    cells = [source, f"{update.layout.world_size} {gpu}", update.text]
    if problems := [one.failure or one.warnings[0] for one in outcomes.values() if one.failure or one.warnings]:
        cells += [problems[0].splitlines()[0], ""]
    else:
        cells.append("/".join(f"{update.uses[rank].peak / GIB:.1f}" for rank in update.stages.values()))
        shared = None if published is not None else shared_gpus_of_run(config, outcomes).peak(config.trainer.offload)
        cells.append(f"{(shared or update.peak + CONTEXT) / GIB:.1f} of {gpu_bytes(gpu) / GIB:.1f}")
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    cells += [f"{cpu_seconds:.0f}", f"{time.perf_counter() - began:.0f}", f"{max(sizes) / GIB:.1f}"]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    """Print a row for each name, by default for all."""
    parser = argparse.ArgumentParser(description="Print the dry runs of recipes, and of layouts that others publish.")
    recipes = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a recipe or a layout; default: all")
    parser.add_argument("--check", action="store_true", help="run a second pipeline, and all ranks with one layer")
    parser.add_argument("--row", action="store_true", help="print no head of the table")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - {*recipes, *PUBLISHED}:
        parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join([*recipes, *PUBLISHED])}")
    warnings.simplefilter("ignore")
    if not given.row:
        print("| source | GPUs | layout | update, by stage | GiB of a GPU | CPU s | s | memory, GiB |")
        print("|---|---|---|---|--:|--:|--:|--:|", flush=True)
    names = given.names or [*recipes, *PUBLISHED]
    if len(names) > 1:  # each in a process, whose CPU time and memory are its own
        command = [sys.executable, "-m", "examples.recipes.dry_runs", "--row", *(["--check"] if given.check else [])]
        for name in names:
            subprocess.run([*command, name], check=True)
        return
    with tempfile.TemporaryDirectory() as folder, planning():
        with contextlib.redirect_stdout(sys.stderr):  # workers print what they choose
            line = row(names[0], Path(folder), checks=given.check)
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
