"""TRL's side of ``against_trl.py``: GRPOTrainer with generation by transformers; ``--prepare`` makes the initial model.

Settings for speed: no gradient checkpointing, which is TRL's default; no reference model (beta 0); no pass for old
log-probabilities (one optimizer step for each generation); the whole batch in one pass; no logs, saves and progress
bars; float32, as on the other side.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.against_trl import (
    DIGITS,
    EOS,
    PAD,
    PROMPT,
    PROMPTS,
    RESPONSE,
    SAMPLES,
    Blocks,
    Settings,
    answer,
    random_prompt,
    share_correct,
)

WARM_UP_STEPS, WARM_UP_LR = 30, 1e-3
"""Supervised steps of the initial model, which then solves the task in part."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    ids = {text: index for index, text in enumerate([PAD, EOS, *DIGITS])}
    fast = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token=PAD, eos_token=EOS, padding_side="left")


def prepare(settings: Settings) -> None:
    """Write the prompts, the tokenizer, and a Llama model after a short supervised phase."""
    numbers = random.Random(settings.seed)
    with settings.prompts.open("w", encoding="utf-8") as lines:
        for _ in range(settings.steps * PROMPTS):
            prompt = random_prompt(numbers)
            lines.write(json.dumps({"prompt": prompt, "answer": answer(prompt)}) + "\n")
    characters = tokenizer()
    characters.save_pretrained(settings.model)
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(characters),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            pad_token_id=characters.pad_token_id,
            eos_token_id=characters.eos_token_id,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=WARM_UP_LR)
    for _ in range(WARM_UP_STEPS):
        prompts = [random_prompt(numbers) for _ in range(128)]
        ids = torch.tensor([characters.encode(prompt + answer(prompt), add_special_tokens=False) for prompt in prompts])
        labels = ids.clone()
        labels[:, :PROMPT] = -100
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"initial model after {WARM_UP_STEPS} supervised steps: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(settings.model)


class Stepping(TrainerCallback):
    """Runs the trainer in the blocks of the parent."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.score = 0.0

    def reward(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        scores = [share_correct(*pair) for pair in zip(prompts, completions, strict=True)]
        self.score = sum(scores) / len(scores)
        return scores

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = not self.blocks.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = not self.blocks.step_ended(self.score)


def agreed(value: int) -> int:
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def run(settings: Settings) -> None:
    """Train in blocks until the parent ends them."""
    torch.set_num_threads(settings.threads)
    rows = settings.micro_batch // settings.ranks
    args = GRPOConfig(
        output_dir=f"{settings.directory}/trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=PROMPTS * SAMPLES // settings.micro_batch,
        num_generations=SAMPLES,
        max_completion_length=RESPONSE,
        max_steps=settings.steps,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        loss_type="dapo",
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        seed=settings.seed,
    )
    stepping = Stepping(Blocks(settings.socket if args.process_index == 0 else None, agreed))
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings.model, padding_side="left"),
        reward_funcs=stepping.reward,
        args=args,
        train_dataset=load_dataset("json", data_files=str(settings.prompts), split="train").remove_columns("answer"),
        callbacks=[stepping],
    ).train()


if __name__ == "__main__":
    if sys.argv[1] == "--prepare":
        prepare(Settings.parsed(sys.argv[2]))
    else:
        run(Settings.parsed(sys.argv[1]))
