"""Every recipe is checked as its user checks it, with the published sizes of its model and without its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.recipes.calculator_agent import run
from mcontroller.cli.main import main

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("math_verify")

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"

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
MODELS: dict[str, dict] = {
    "smollm2-135m-grpo": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "hidden_act": "silu",
    },
    "qwen3-1.7b-grpo": QWEN3 | {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "qwen3-8b-grpo": QWEN3_8B,
    "qwen3-8b-lora": QWEN3_8B,
    "qwen3-30b-a3b-grpo": QWEN3_30B,
    "qwen3-30b-a3b-async": QWEN3_30B,
    "qwen2.5-3b-tools": {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu",
    },
    "llama-3.3-70b-grpo": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "hidden_act": "silu",
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "deepseek-v3-grpo": {
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
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 1,024 sums."""
    file = tmp_path_factory.mktemp("rows") / "train.jsonl"
    questions = ([{"role": "user", "content": f"what is {number} plus 1"}] for number in range(1024))
    lines = (json.dumps({"prompt": question, "answer": str(number + 1)}) for number, question in enumerate(questions))
    file.write_text("\n".join(lines))
    return file


def model_directory(path: Path, sizes: dict) -> Path:
    """Write the model's configuration, and a tokenizer of letters with a chat template, and return the directory."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(sizes | {"torch_dtype": "bfloat16", "eos_token_id": 1}))
    tokens = ["<s>", "</s>", "?", *"abcdefghijklmnopqrstuvwxyz0123456789 "]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}{{ tools | tojson if tools }}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_every_recipe_is_checked():
    assert {file.stem for file in RECIPES.glob("*.yaml")} == set(MODELS)


@pytest.mark.processes  # check asks the interpreter of the engine whether it has vLLM
@pytest.mark.parametrize("name", MODELS)
def test_a_recipe_is_right_and_fits(name, rows, tmp_path, capsys):
    model = model_directory(tmp_path / "model", MODELS[name])
    values = [f"actor_rollout_ref.model.hf_path={model}", f"data.train.path={rows}"]
    assert main(["check", str(RECIPES / f"{name}.yaml"), *values]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    peak = re.search(r"([\d.]+) GB with trainer.offload=auto", printed)
    assert peak is not None and float(peak[1]) < 80, printed
    (documented,) = re.findall(rf"`{re.escape(name)}`.*\| ([\d.]+) \|", (RECIPES / "README.md").read_text())
    assert float(documented) == pytest.approx(float(peak[1]), rel=0.02)


def test_the_calculator_tells_the_agent_what_is_wrong():
    assert run('{"expression": "3 * (2 + 2)"}') == "12"
    for arguments in ("{", "[]", "{}", '{"expression": "import os"}'):
        assert run(arguments).startswith("error: ")
