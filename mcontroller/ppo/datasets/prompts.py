"""Records as rows of tokens: prompts for generation, and demonstrations for the supervised phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcontroller.config.checks import close_names
from mcontroller.errors import ConfigError, DataError
from mcontroller.ppo.datasets.config import ProblemsConfig
from mcontroller.ppo.datasets.sources import Records
from mcontroller.ppo.datasets.tokenizers import Message, PrefixingTokenizer, TextTokenizer


class PromptRows:
    """Rows of ``input_ids`` and ``attention_mask`` ``[prompt]``, int64, padded on the left, and other objects.

    The other objects are ``prompt``, the text, ``answer``, None if the record lacks it, and ``record``, all columns.
    All prompts are encoded once. Those that are longer than ``prompt_length`` are dropped. A prompt that is a text, and
    does not go through the chat template, begins with the tokenizer's ``text_prefix``, such as BOS.

    Args:
        records: the problems.
        config: the columns, and the use of the chat template.
        tokenizer: the tokenizer.
        prompt_length: [tokens] longest prompt.

    Attributes:
        dropped: the number of prompts that were too long.

    Raises:
        DataError: a record lacks the prompt, has one of another type, or all prompts are too long.
        ConfigError: there are chat messages, and the tokenizer has no chat template; or ``answer_key`` is set to a
            column that no record has.
    """

    def __init__(self, records: Records, config: ProblemsConfig, tokenizer: TextTokenizer, prompt_length: int) -> None:
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length
        self.kept: list[tuple[str, Tensor, Any, Mapping[str, Any]]] = []
        _check_columns(records, config)
        prefix = tokenizer.text_prefix if isinstance(tokenizer, PrefixingTokenizer) else []
        shortest = 0
        for index, record in enumerate(records.rows):
            prompt = record[config.prompt_key]
            text = prompt_text(prompt, records.location(index), config, tokenizer)
            ids = tokenizer.encode(text)
            if not ids:
                raise DataError(f"{records.location(index)}: the prompt is empty", location=records.location(index))
            if isinstance(prompt, str) and not config.chat_template and ids[: len(prefix)] != prefix:
                ids = prefix + ids
            if len(ids) <= prompt_length:
                self.kept.append((text, torch.tensor(ids), answer_of(record, config.answer_key), record))
            else:
                shortest = min(shortest or len(ids), len(ids))
        self.dropped = len(records) - len(self.kept)
        if not self.kept:
            raise DataError(
                f"all {len(records)} prompts of {records.name} are longer than rollout.prompt_length {prompt_length}; "
                f"the shortest has {shortest} tokens: increase rollout.prompt_length",
                prompt_length=prompt_length,
            )

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, ids, answer, record = self.kept[index]
        row, mask = _padded(ids, self.prompt_length, self.tokenizer.pad_token_id, left=True)
        return {"input_ids": row, "attention_mask": mask, "prompt": text, "answer": answer, "record": record}


@dataclass(frozen=True)
class Demonstration:
    """A right response to a problem, without the token that ends it.

    Attributes:
        tokens: its token ids.
        own: for each token, 1 if the policy is trained on it, 0 if it is not the policy's, such as a tool's.
    """

    tokens: Sequence[int]
    own: Sequence[int]


class Demonstrations:
    """Rows for the supervised phase: each prompt and its answer; ``loss_mask`` is 1 for the answer.

    Args:
        prompts: the prompts.
        response_length: [tokens] longest answer, with the token that ends it.
        demonstrate: returns the response to a row of ``prompts`` instead of its answer, such as one of several turns;
            ``loss_mask`` is 1 for its own tokens.

    Raises:
        DataError: an answer is longer than ``response_length``, or is no text.
    """

    def __init__(
        self,
        prompts: PromptRows,
        response_length: int,
        demonstrate: Callable[[Mapping[str, Any]], Demonstration] | None = None,
    ) -> None:
        self.prompts = prompts
        self.response_length = response_length
        self.demonstrate = demonstrate or self._answer
        lengths = [len(self.demonstrate(prompts[index]).tokens) + 1 for index in range(len(prompts))]
        if (longest := max(lengths)) > response_length:
            raise DataError(
                f"with the token that ends it, the answer to the prompt "
                f"{prompts[lengths.index(longest)]['prompt'][-60:]!r} has {longest} tokens; rollout.response_length is "
                f"{response_length}, too short for {sum(length > response_length for length in lengths)} of "
                f"{len(lengths)} answers: set rollout.response_length={longest}, or warm_up.steps=0",
                length=longest,
                most=response_length,
            )

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, tokenizer = self.prompts[index], self.prompts.tokenizer
        response = self.demonstrate(prompt)
        stop = tokenizer.eos_token_id
        ids, own = [*response.tokens, stop if isinstance(stop, int) else stop[0]], [*response.own, 1]
        row, mask = _padded(torch.tensor(ids), self.response_length, tokenizer.pad_token_id, left=False)
        trained, _ = _padded(torch.tensor(own), self.response_length, 0, left=False)
        return {
            "input_ids": torch.cat((prompt["input_ids"], row)),
            "attention_mask": torch.cat((prompt["attention_mask"], mask)),
            "loss_mask": torch.cat((torch.zeros_like(prompt["input_ids"]), trained)),
        }

    def _answer(self, prompt: Mapping[str, Any]) -> Demonstration:
        answer = prompt["answer"]
        if not isinstance(answer, str):
            raise DataError(
                f"the warm-up needs answers that are texts; that of the prompt {prompt['prompt'][:60]!r} is "
                f"{answer!r}: set warm_up.steps=0, or data.answer_key",
                prompt=prompt["prompt"],
            )
        tokens = self.prompts.tokenizer.encode(answer)
        return Demonstration(tokens, [1] * len(tokens))


def _check_columns(records: Records, config: ProblemsConfig) -> None:
    """Raise an error if a record lacks the column of the prompt, or all lack the column of the answer that was set."""
    key = config.answer_key
    if key != ProblemsConfig().answer_key and all(answer_of(row, key) is None for row in records.rows):
        there = list(dict.fromkeys(name for row in records.rows for name in row))
        raise ConfigError(
            f"data.answer_key is {config.answer_key!r}, and {records.name} has no such column"
            f"{close_names(config.answer_key, there)}; it has {', '.join(there)}",
            key="data.answer_key",
            value=config.answer_key,
        )
    for index, record in enumerate(records.rows):
        if config.prompt_key not in record:
            raise DataError(
                f"{records.location(index)} has no column {config.prompt_key!r}; it has {', '.join(record)}: set "
                "data.prompt_key to the column of the prompts",
                location=records.location(index),
            )


def answer_of(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a key in it, such as ``reward_model.ground_truth``; None if it is absent."""
    if key in record:
        return record[key]
    column, _, inner = key.partition(".")
    value = record.get(column)
    return answer_of(value, inner) if inner and isinstance(value, Mapping) else None


def prompt_text(prompt: Any, location: str, config: ProblemsConfig, tokenizer: TextTokenizer) -> str:
    """Return the text of a prompt, which is a text or a list of chat messages.

    Raises:
        DataError: it is neither; with its location.
        ConfigError: it needs a chat template, and the tokenizer has none.
    """
    if isinstance(prompt, str):
        if not config.chat_template:
            return prompt
        messages: Sequence[Message] = [{"role": "user", "content": prompt}]
    elif config.chat_template is False or not _are_messages(prompt):
        raise DataError(
            f"{location}: the prompt is {repr(prompt)[:80]} of type {type(prompt).__name__}; expected a text"
            + (
                ""
                if config.chat_template is False
                else ', or chat messages such as [{"role": "user", "content": "..."}]'
            ),
            location=location,
        )
    else:
        messages = prompt
    if config.system_prompt is not None:
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return tokenizer.render(messages)


def _are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in prompt)
    )


def _padded(ids: Tensor, length: int, pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return the padded ids and their mask, int64 ``[length]``."""
    row = torch.full((length,), pad, dtype=torch.long)
    mask = torch.zeros(length, dtype=torch.long)
    filled = slice(length - len(ids), length) if left else slice(0, len(ids))
    row[filled] = ids
    mask[filled] = 1
    return row, mask
