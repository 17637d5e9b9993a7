"""Tiny random models of every family as transformers saves them, and what layouts compute with them beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from mcontroller.data.batch import DataProto
from tests.ranks import run_ranks
from tests.workers.roles import (
    FOR_GRADIENTS,
    PAD,
    PROMPT,
    RESPONSE,
    VOCAB,
    accumulated_gradients,
    actor,
    experience,
    own_shard,
    prompts,
)
from workers.config.model import model_config_from_hf
from workers.weights.hf.model import hf_tensors

transformers = pytest.importorskip("transformers")

ROWS = 8
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": PAD}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
BY_BIAS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    **BY_BIAS,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


class Model(NamedTuple):
    """A model of a family: the prefix of its classes in transformers, and the fields of its configuration.

    ``settings`` are fields of ``ModelConfig`` beside those of its ``config.json``; ``generates`` whether Megatron can.
    """

    classes: str
    fields: dict[str, Any]
    settings: dict[str, Any] = {}  # noqa: RUF012
    generates: bool = True


MODELS = {
    "llama": Model("Llama", SIZES),
    "qwen2": Model("Qwen2", SIZES),
    "qwen3": Model("Qwen3", SIZES | {"head_dim": 16}),
    "qwen3_moe": Model("Qwen3Moe", SIZES | QWEN_MOE | {"norm_topk_prob": True}),
    "seed_oss": Model("SeedOss", SIZES | {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "mistral": Model("Mistral", SIZES | {"sliding_window": 4}),
    "mixtral": Model("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": Model("Glm4Moe", SIZES | BY_BIAS | {"use_qk_norm": True, "attention_bias": True, "head_dim": 16}),
    "glm4_moe, no norms or biases": Model("Glm4Moe", SIZES | BY_BIAS | {"head_dim": 16}),
    "deepseek_v3": Model("DeepseekV3", SIZES | LATENT),
    "deepseek_v3, queries as they are, YaRN": Model(
        "DeepseekV3", SIZES | LATENT | {"q_lora_rank": None, "rope_parameters": YARN}
    ),
}
"""The models of the tests; the name begins with the model type."""

LETTERS = "M-M*-M"
_KINDS_OF_LAYERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
NEMOTRON = Model(
    "NemotronH",
    {key: SIZES[key] for key in SIZES.keys() - {"num_hidden_layers", "rms_norm_eps"}}
    | {
        "layers_block_type": [_KINDS_OF_LAYERS[letter] for letter in LETTERS],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 4,
        "chunk_size": 4,
        "time_step_min": 1e-30,  # transformers limits the step from below, Megatron does not
        "time_step_floor": 0.3,  # of its first values: with the default, states are near 0
    },
)
"""A model with Mamba layers, which needs megatron-core 0.19."""

SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2": {"tp": 2},
    "TP2 with SP": SP,
    "PP2": {"pp": 2},
    "PP2 with VPP2": {"pp": 2, "vpp": 2},
    "CP2": {"cp": 2},
    "EP2": {"ep": 2},
    "TP2 x PP2 x EP2 with SP": {**SP, "pp": 2, "ep": 2, "etp": 1},
    "TP2 x PP2 x CP2 with SP": {**SP, "pp": 2, "cp": 2},
}


def world_size(axes: dict[str, Any]) -> int:
    tp, ep = axes.get("tp", 1) * axes.get("cp", 1), axes.get("ep", 1) * axes.get("etp", 1)
    return int(axes.get("pp", 1) * max(tp, ep))


def config_of(model: str | Model, **changes: Any) -> Any:
    classes, fields, *_ = MODELS[model] if isinstance(model, str) else model
    return getattr(transformers, f"{classes}Config")(**fields | changes)


def save_model(model: str | Model, directory: Path, **changes: Any) -> Path:
    """Save a random model; vectors, such as norms and biases, which are built as ones and zeros, are random too."""
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config_of(model, **changes)).float()
    with torch.no_grad():
        for tensor in (*built.parameters(), *(b for n, b in built.named_buffers() if n.endswith("_correction_bias"))):
            if tensor.dim() == 1:
                tensor += 0.2 * torch.randn_like(tensor)
    built.save_pretrained(directory)
    return directory


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rows_of(batch: DataProto) -> Iterator[tuple[torch.Tensor, int]]:
    """The tokens of each row without padding, and how many of them are the response."""
    columns = batch.batch
    for ids, attention, mask in zip(
        columns["input_ids"], columns["attention_mask"], columns["response_mask"], strict=True
    ):
        yield ids[attention.bool()], int(mask.sum())


def of_transformers(path: Path, gradients_to: Path) -> dict[str, Any]:
    """Log-probabilities ``[rows, response]``, greedy tokens, and gradients of the mean by the names of the weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    log_probs = torch.zeros(ROWS, RESPONSE)
    loss, count = torch.zeros(()), 0
    for row, (ids, response) in enumerate(rows_of(experience(ROWS))):
        token_log_probs = model(ids[None]).logits[0, -response - 1 : -1].log_softmax(-1)
        token_log_probs = token_log_probs.gather(1, ids[-response:, None])[:, 0]
        log_probs[row, :response] = token_log_probs.detach()
        loss, count = loss - token_log_probs.sum(), count + response
    (loss / count).backward()
    starts, greedy = prompts(ROWS, {}).batch, []
    with torch.no_grad():
        for ids, attention in zip(starts["input_ids"], starts["attention_mask"], strict=True):
            tokens = ids[attention.bool()][None]
            for _ in range(RESPONSE):
                tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
            greedy.append(tokens[0, -RESPONSE:])
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(gradients_to)  # under the names, and in the shapes, of the weights' files
    return {"log_probs": log_probs, "greedy": torch.stack(greedy), "gradients": saved(gradients_to)}


def on_rank(path: Path, of: Model, axes: dict[str, Any], packed: bool, out: Path) -> dict[str, Any]:
    """The same on one rank, and the weights as they are streamed to an engine; exports the model to ``out``."""
    model = dataclasses.asdict(model_config_from_hf(path, dtype="float32", **of.settings))
    settings = {"optim": FOR_GRADIENTS, "packed": packed, "ppo_mini_batch_size": ROWS, "ppo_epochs": 1}
    generates = of.generates and axes.get("cp", 1) == 1
    worker = actor(axes, "actor_rollout" if generates else "actor", model=model, **settings)
    streamed = tensors_of(worker)
    worker.export_hf(str(out))
    shard = own_shard(experience(ROWS), worker)
    scored = worker.compute_log_prob(shard)
    greedy = worker.generate_sequences(own_shard(prompts(ROWS, GREEDY), worker)) if generates else None
    mask = shard.batch["response_mask"]
    columns = {name: shard.batch[name] for name in ("input_ids", "attention_mask")}
    columns["loss_mask"] = torch.nn.functional.pad(mask, (PROMPT, 0))
    worker.update_sft(DataProto.from_dict(columns))
    accumulated_gradients(worker)
    gradients = tensors_of(worker)
    if of.settings:  # Bridge adds 1 to norms whose weights Megatron keeps around 0
        for parameter in (parameter for chunk in worker.model for parameter in chunk.parameters()):
            parameter.data.zero_()
        added = tensors_of(worker)
        gradients = {name: value - 1 if bool((added[name] == 1).all()) else value for name, value in gradients.items()}
    return {
        "rows": worker.context.pg.dp.rank() * len(mask) + torch.arange(len(mask)),
        "streamed": streamed,
        "gradients": gradients,
        "log_probs": None if scored is None else scored.batch["old_log_probs"] * mask,
        "greedy": None if greedy is None else greedy.batch["responses"],
    }


def tensors_of(worker: Any) -> dict[str, torch.Tensor]:
    with worker.context.activate():
        return {name: tensor.clone() for name, tensor in hf_tensors(worker.model, worker.context)}


class Reference:
    """A model on disk, and what transformers computes with it.

    Args:
        model: or its key in ``MODELS``.
        directory: for its files.
    """

    def __init__(self, model: str | Model, directory: Path) -> None:
        self.directory = directory
        self.model = MODELS[model] if isinstance(model, str) else model
        self.path = save_model(self.model, directory / "model")
        self.computed = of_transformers(self.path, directory / "gradients")

    def differences(self, axes: dict[str, Any], packed: bool) -> dict[str, float]:
        """Return the largest difference of each quantity; 0 if bits are equal, or all tokens.

        Raises:
            ConfigError: the layout is rejected.
        """
        out = self.directory / f"{axes}{packed}"
        ranks = run_ranks(on_rank, world_size(axes), self.path, self.model, axes, packed, out)
        weights = saved(self.path)
        return {
            "load": max(_largest(rank["streamed"], weights) for rank in ranks),
            "export": _largest(saved(out), weights),
            "log-probs": max(self._of_rows(rank, "log_probs") for rank in ranks),
            "gradients": max(_largest(rank["gradients"], self.computed["gradients"]) for rank in ranks),
            **(
                {"generation": max(self._of_rows(rank, "greedy") for rank in ranks)}
                if self.model.generates and axes.get("cp", 1) == 1
                else {}
            ),
        }

    def _of_rows(self, rank: dict[str, Any], quantity: str) -> float:
        if rank[quantity] is None:
            return 0.0
        return float((rank[quantity] - self.computed[quantity][rank["rows"]]).abs().max())


def _largest(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)
