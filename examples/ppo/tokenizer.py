"""A tokenizer small enough to be read: one token a letter or digit, one a run of anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mcontroller.errors import DataError

__all__ = ["CharTokenizer"]

SPECIAL = ("<pad>", "<eos>")
UNKNOWN = "\ufffd"
PIECE = re.compile(r"\w|\W+")


class CharTokenizer:
    """Texts to ids and back. ``"12 + 3"`` is four tokens: ``1``, ``2``, `` + ``, ``3``.

    An ``instruction``, the words that every question of a task begins with, is one token of its own.
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
        """The tokenizer of these texts: it knows what stands in them, and the words that all questions begin with."""
        first, last = min(questions), max(questions)
        shared = first
        while not last.startswith(shared):
            shared = shared[:-1]
        instruction = shared[: shared.rfind(" ") + 1]
        texts = [question.removeprefix(instruction) for question in questions] + list(answers)
        return cls(instruction, sorted({piece for text in texts for piece in PIECE.findall(text)}))

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return len(self._texts)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises DataError naming what the tokenizer does not know."""
        begins = bool(self.instruction) and text.startswith(self.instruction)
        pieces = PIECE.findall(text.removeprefix(self.instruction) if begins else text)
        unknown = sorted(set(pieces).difference(self._ids))
        if unknown:
            raise DataError(
                f"the tokenizer does not know {unknown} in {text!r}; it knows {self.pieces}", unknown=unknown
            )
        return [self._ids[self.instruction]] * begins + [self._ids[piece] for piece in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids up to the end-of-sequence token; an id that is no text is shown as U+FFFD."""
        texts = []
        for index in ids:
            if index == self.eos_token_id:
                break
            texts.append(self._texts[index] if len(SPECIAL) <= index < self.vocab_size else UNKNOWN)
        return "".join(texts)

    def save(self, path: Path) -> None:
        """Writes the vocabulary as JSON."""
        path.write_text(json.dumps({"instruction": self.instruction, "pieces": self.pieces}, indent=1))

    @classmethod
    def load(cls, path: Path) -> CharTokenizer:
        """The tokenizer that ``save`` wrote."""
        return cls(**json.loads(path.read_text()))
