"""Adapters on any layout compute what plain torch computes with transformers' model, and so do their gradients."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcontroller.data.batch import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import (
    FOR_GRADIENTS,
    PROMPT,
    RESPONSE,
    VOCAB,
    be_a_worker,
    callable_directly,
    experience,
    own_shard,
)
from tests.workers.weights.hf_models import LATENT
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, load_config
from workers.lora.adapters import adapters_of
from workers.lora.peft_files import adapter_tensors

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.simulated

RANK, ALPHA, ROWS = 3, 6.0, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
OF_ATTENTION = ("q_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
LINEARS = (*OF_ATTENTION, "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES | LATENT | {"head_dim": 4, "rms_norm_eps": 1e-3}),
}
SHORT = {"rollout": {"prompt_length": PROMPT, "response_length": RESPONSE}}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SP = {"tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "dense-dp2-recomputed": ("qwen3", 2, {}, {"model": {"transformer": RECOMPUTE}}),
    "dense-tp2-sp-packed": ("qwen3", 2, SP, {"packed": True}),
    "dense-pp2-vpp2-recomputed": ("qwen3", 2, {"pp": 2, "vpp": 2}, {"model": {"transformer": RECOMPUTE}}),
    "dense-cp2-tp2": ("qwen3", 4, {"cp": 2, "tp": 2}, {}),
    "experts-tp2-sp-ep2": ("qwen3_moe", 2, SP | {"ep": 2, "etp": 1}, {}),
    "experts-of-mixtral-ep2": ("mixtral", 2, {"ep": 2}, {}),
    "experts-tp2-sp-etp2": ("qwen3_moe", 2, SP | {"etp": 2}, {}),
    "latent-tp2-sp-pp2-ep2": ("deepseek_v3", 4, SP | {"pp": 2, "ep": 2, "etp": 1}, {}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family as transformers saves it, with a random adapter in ``adapter``."""
    root = tmp_path_factory.mktemp("hf")
    for family, config in FAMILIES.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config()).float().save_pretrained(root / family)
        add_adapter(root / family)
    return {family: root / family for family in FAMILIES}


def add_adapter(path: Path, experts: bool = True, linears: tuple[str, ...] = LINEARS) -> None:
    """Write a random adapter in PEFT's format beside a model."""
    factors = random_adapter(
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), experts, linears
    )
    with_experts = any(".experts" in name for name in factors)
    of_peft = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.split(".")[-3] for name in factors if ".experts." not in name}),
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if with_experts else None,
    }
    (path / "adapter").mkdir()
    save_file(factors, path / "adapter" / "adapter_model.safetensors")
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(of_peft))


def random_adapter(model: Any, experts: bool, linears: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of an adapter of all linear layers but k_proj, and of the experts, under PEFT's names."""
    generator = torch.Generator().manual_seed(2)
    factors: dict[str, Tensor] = {}

    def add(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        for factor, shape in (("A", a), ("B", b)):
            value = 0.2 * torch.randn(shape, generator=generator)
            factors[f"base_model.model.{name}.lora_{factor}.weight"] = value

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in linears:
            add(name, (RANK, module.in_features), (module.out_features, RANK))
        if experts and name.endswith(".experts"):
            for part, weight in ((".base_layer", module.gate_up_proj), ("", module.down_proj)):
                count, out, width = weight.shape
                add(name + part, (RANK * count, width), (out, RANK * count))
    return factors


def merged_weights(model: Any, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model with an adapter, as a function of its factors."""
    weights = dict(model.named_parameters())
    for key in [key for key in factors if ".lora_A." in key]:
        a, b = factors[key], factors[key.replace(".lora_A.", ".lora_B.")]
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if ".experts" not in name:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + ALPHA / RANK * b @ a
            continue
        name = name.replace(".base_layer", ".gate_up_proj") if name.endswith("base_layer") else f"{name}.down_proj"
        delta = torch.einsum("ore,eri->eoi", b.unflatten(1, (RANK, -1)), a.unflatten(0, (-1, RANK)))
        weights[name] = weights[name] + ALPHA / RANK * delta
    return weights


def of_transformers(path: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities of the responses with the adapter and without it, and the gradients of its factors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    factors = {
        name: factor.requires_grad_() for name, factor in load_file(path / "adapter/adapter_model.safetensors").items()
    }
    merged = merged_weights(model, factors)
    adapted = log_probs(lambda **inputs: torch.func.functional_call(model, merged, (), inputs))
    loss = -adapted.sum() / experience(ROWS).batch["response_mask"].sum()
    gradients = torch.autograd.grad(loss, list(factors.values()))
    return adapted.detach(), log_probs(model).detach(), dict(zip(factors, gradients, strict=True))


def log_probs(model: Callable[..., Any]) -> Tensor:
    """Log-probabilities of the responses of the batch."""
    batch = experience(ROWS).batch
    ids, attention = batch["input_ids"], batch["attention_mask"]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False).logits
    chosen = logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)
    return chosen * batch["response_mask"]


def supervised() -> DataProto:
    """The batch with the loss of all tokens of the responses."""
    batch = experience(ROWS).batch
    mask = torch.cat((torch.zeros_like(batch["input_ids"][:, :PROMPT]), batch["response_mask"]), 1)
    return DataProto.from_dict({name: batch[name] for name in ("input_ids", "attention_mask")} | {"loss_mask": mask})


def computed(path: Path, parallel: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """On one rank: scores with and without the adapter, its gradients, and the norm of them."""
    model = {"hf_path": str(path), "dtype": "float32", "lora": {"path": str(path / "adapter")}}
    settings = {"parallel": parallel, "optim": FOR_GRADIENTS, "ppo_micro_batch_size": 2}
    config = load_config(ActorConfig, {"model": model}, settings, SHORT, changes)
    be_a_worker()
    worker = callable_directly(ActorRolloutRefWorker(config, "actor_ref"))
    worker.init_model()
    shard = own_shard(experience(ROWS), worker)
    log_probs, reference = worker.compute_log_prob(shard), worker.compute_ref_log_prob(shard)
    metrics = worker.update_sft(own_shard(supervised(), worker)).meta_info["metrics"]
    with torch.no_grad(), worker.context.activate():
        for adapters in adapters_of(worker.model):
            for factor in adapters.parameters():
                factor.copy_(factor.main_grad)
        gradients = adapter_tensors(worker.model)
    last = worker.context.pg.pp.rank() == worker.context.pg.pp.size() - 1
    return {
        "dp": (worker.context.pg.dp.rank(), worker.context.pg.dp.size()),
        "log_probs": log_probs.batch["old_log_probs"] if last else None,
        "reference": reference.batch["ref_log_prob"] if last else None,
        "gradients": gradients,
        "norm": metrics["sft/grad_norm"],
        "trained": sum(p.numel() for chunk in worker.model for p in chunk.parameters() if p.requires_grad),
        "buffers": sum(b.numel for chunk in worker.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)),
    }


@functools.cache
def expected_of(path: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return of_transformers(path)


@pytest.mark.parametrize("case", CASES)
def test_adapters_compute_what_transformers_computes(case: str, checkpoints: dict[str, Path]) -> None:
    family, world_size, parallel, changes = CASES[case]
    ranks = run_ranks(computed, world_size, checkpoints[family], parallel, changes)
    check_as_transformers(checkpoints[family], ranks)


def check_as_transformers(path: Path, ranks: list[dict[str, Any]]) -> None:
    """Check what ``computed`` returns on all ranks."""
    actual = differences(path, ranks)
    assert actual.pop("effect") > 0.5  # the adapter matters
    assert max(actual.values()) < 2e-5, actual
    for rank in ranks:
        assert rank["buffers"] < rank["trained"] * 1.1 + 500  # padding


def differences(path: Path, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest differences of what ``computed`` returns from transformers, and what the adapter changes.

    Those of gradients are relative to the largest gradient, those of their norm to the norm.
    """
    adapted, plain, gradients = expected_of(path)
    assert ranks[0]["gradients"].keys() == gradients.keys()
    largest = {"log-probs": 0.0, "reference": 0.0, "effect": float((adapted - plain).abs().max())}
    for rank in ranks:
        for name, column, expected in (("log-probs", "log_probs", adapted), ("reference", "reference", plain)):
            if rank[column] is not None:
                index, size = rank["dp"]
                difference = (rank[column] - expected.chunk(size)[index]).abs().max()
                largest[name] = max(largest[name], float(difference))
    errors = [(ranks[0]["gradients"][name] - gradient).abs().max() for name, gradient in gradients.items()]
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    largest["gradients"] = float(max(errors) / max(gradient.abs().max() for gradient in gradients.values()))
    return largest | {"norm": abs(ranks[0]["norm"] / float(norm) - 1)}
