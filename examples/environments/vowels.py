"""An environment of the package verifiers, as its authors write one, and a tokenizer of letters for a small policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import TOKENIZERS, TokenizerSource

LETTERS = "\x00\x01abcdefghijklmnopqrstuvwxyz "


async def vowels(completion: Any) -> float:
    """Return the share of the letters that are vowels."""
    text = completion[-1]["content"]
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def load_environment(problems: int = 64) -> Any:
    """Return an environment with one turn, whose rubric counts vowels."""
    import verifiers
    from datasets import Dataset

    questions = [f"write {LETTERS[2 + number % 26]} and {LETTERS[2 + number // 26]}" for number in range(problems)]
    data = Dataset.from_list([{"question": question, "answer": ""} for question in questions])
    return verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[vowels]))


@TOKENIZERS.register("letters")
class Letters:
    """A token for each letter."""

    pad_token_id, eos_token_id, vocab_size = 0, 1, len(LETTERS)

    def __init__(self, source: TokenizerSource) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[number] for number in ids if number > self.eos_token_id)

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        return "".join(f"{message['content']}\x01" for message in messages)

    def save(self, directory: Path) -> None:
        pass
