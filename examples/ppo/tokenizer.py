"""A small tokenizer: one token per letter or digit, and per run of other characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mcontroller.errors import ConfigError, DataError
from trainer.data.tokenizers import TOKENIZERS, Message, TokenizerSource

__all__ = ["CharTokenizer"]

SPECIAL = ("<pad>", "<eos>")
UNKNOWN = "\ufffd"
PIECE = re.compile(r"\w|\W+")


class CharTokenizer:
    """Texts to ids and back. ``"12 + 3"`` is four tokens: ``1``, ``2``, `` + ``, ``3``.

    The ``instruction``, the words at the start of every question of a task, is a single token.
    """

    pad_token_id = 0
    eos_token_id = 1

    def __init__(self, instruction: str, pieces: Sequence[str]) -> None:
        self.instruction = instruction
        self.pieces = list(pieces)
        self._texts = [*SPECIAL, instruction, *pieces]
        self._ids = {text: index for index, text in enumerate(self._texts)}

    @classmethod
    def of(cls, questions: Sequence[str], answers: Iterable[str]) -> CharTokenizer:
        """Return a tokenizer with the pieces of these texts and the common start of all questions.

        Raises:
            DataError: there are no questions, such as if the prompts are chat messages.
        """
        if not questions:
            raise DataError("CharTokenizer is made from the texts of the prompts, and no prompt is a text")
        first, last = min(questions), max(questions)
        shared = first
        while not last.startswith(shared):
            shared = shared[:-1]
        instruction = shared[: shared.rfind(" ") + 1]
        texts = [question.removeprefix(instruction) for question in questions] + list(answers)
        return cls(instruction, sorted({piece for text in texts for piece in PIECE.findall(text)}))

    def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        raise ConfigError("CharTokenizer has no chat template: use prompts that are texts", key="data.chat_template")

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._texts)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            DataError: a piece of the text is not in the vocabulary; ``unknown`` names them.
        """
        has_instruction = bool(self.instruction) and text.startswith(self.instruction)
        pieces = PIECE.findall(text.removeprefix(self.instruction) if has_instruction else text)
        unknown = sorted(set(pieces).difference(self._ids))
        if unknown:
            raise DataError(
                f"the tokenizer does not know {unknown} in {text!r}; it knows {self.pieces}", unknown=unknown
            )
        return [self._ids[self.instruction]] * has_instruction + [self._ids[piece] for piece in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids up to the end-of-sequence token; ids without a text become U+FFFD."""
        texts = []
        for index in ids:
            if index == self.eos_token_id:
                break
            texts.append(self._texts[index] if len(SPECIAL) <= index < self.vocab_size else UNKNOWN)
        return "".join(texts)

    def save(self, directory: Path) -> None:
        """Write the vocabulary as JSON into ``tokenizer.json``."""
        text = json.dumps({"instruction": self.instruction, "pieces": self.pieces}, indent=1)
        (directory / "tokenizer.json").write_text(text)

    @classmethod
    def load(cls, directory: Path) -> CharTokenizer:
        """Return the tokenizer that ``save`` wrote."""
        return cls(**json.loads((directory / "tokenizer.json").read_text()))


@TOKENIZERS.register("characters")
def characters(source: TokenizerSource) -> CharTokenizer:
    """Return the tokenizer of all prompts and answers of the run."""
    prompts, answers = source.texts()
    return CharTokenizer.of(list(prompts), answers)
