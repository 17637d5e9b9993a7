"""Records as rows of tokens: prompts for generation, and demonstrations for the supervised phase."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcontroller.config.checks import close_names
from mcontroller.errors import ConfigError, DataError
from trainer.data.config import ProblemsConfig
from trainer.data.sources import Records
from trainer.data.stream import Mixture
from trainer.data.tokenizers import (
    ContinuingTokenizer,
    Message,
    PrefixingTokenizer,
    TextTokenizer,
    stop_tokens,
)


class PromptRows:
    """Rows of ``input_ids`` and ``attention_mask`` ``[prompt]``, int64, padded on the left, and other objects.

    The other objects are ``prompt``, the text, ``answer``, None if the record lacks it, and ``record``, all columns.
    All prompts are encoded once, see ``encoded_prompt``. Those that are longer than ``prompt_length`` are dropped,
    rejected, or lose their first tokens, as ``data.truncation`` says.

    Args:
        records: the problems.
        config: the columns, and the use of the chat template.
        tokenizer: the tokenizer.
        prompt_length: [tokens] longest prompt.

    Attributes:
        dropped: the number of prompts that were too long.
        truncated: the number of prompts that were too long and lost their first tokens.

    Raises:
        DataError: a record lacks the prompt, has one of another type, the chat template rejects it, or it is too long.
        ConfigError: there are chat messages, and the tokenizer has no chat template; or ``answer_key`` is set to a
            column that no record has.
    """

    def __init__(self, records: Records, config: ProblemsConfig, tokenizer: TextTokenizer, prompt_length: int) -> None:
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length
        self.kept: list[tuple[str, Tensor, Any, Mapping[str, Any]]] = []
        _check_columns(records, config)
        shortest, self.truncated = 0, 0
        for index, record in enumerate(records.rows):
            text, ids = encoded_prompt(record, records.locations[index], config, tokenizer)
            if len(ids) > prompt_length:
                shortest = min(shortest or len(ids), len(ids))
                if config.truncation == "drop":
                    continue
                if config.truncation == "error":
                    raise DataError(
                        f"{records.locations[index]}: the prompt has {len(ids)} tokens; rollout.prompt_length is "
                        f"{prompt_length}: increase it, or set data.truncation to drop or left",
                        location=records.locations[index],
                        prompt_length=prompt_length,
                    )
                ids, self.truncated = ids[-prompt_length:], self.truncated + 1
            self.kept.append((text, torch.tensor(ids), answer_of(record, config.answer_key), record))
        self.dropped = len(records) - len(self.kept)
        if not self.kept:
            raise DataError(
                f"all {len(records)} prompts of {records.name} are longer than rollout.prompt_length {prompt_length}; "
                f"the shortest has {shortest} tokens: increase rollout.prompt_length",
                prompt_length=prompt_length,
            )

    def crc32(self) -> int:
        """Return a checksum of all texts and answers."""
        value = 0
        for text, _, answer, _ in self.kept:
            value = zlib.crc32(f"{text}\0{answer!r}\0".encode(), value)
        return value

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
        mask: for each token, 1 if the policy is trained on it, 0 if it is not the policy's, such as a tool's.
    """

    tokens: Sequence[int]
    mask: Sequence[int]

    def __post_init__(self) -> None:
        """Check that there are as many values in both."""
        if len(self.tokens) != len(self.mask):
            text = f"a Demonstration has {len(self.tokens)} tokens and a mask of {len(self.mask)}: expected as many"
            raise DataError(text, length=len(self.mask), expected=len(self.tokens))


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
        ids, trained_on = [*response.tokens, stop_tokens(tokenizer)[0]], [*response.mask, 1]
        row, mask = _padded(torch.tensor(ids), self.response_length, tokenizer.pad_token_id, left=False)
        trained, _ = _padded(torch.tensor(trained_on), self.response_length, 0, left=False)
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
        tokenizer = self.prompts.tokenizer
        if isinstance(tokenizer, ContinuingTokenizer):
            tokens = tokenizer.encode_after(prompt["prompt"], answer)
        else:
            tokens = tokenizer.encode(answer)
        return Demonstration(tokens, [1] * len(tokens))


def demonstrations_of(
    prompts: Sequence[PromptRows],
    response_length: int,
    demonstrate: Callable[[Mapping[str, Any]], Demonstration] | None = None,
) -> Demonstrations | Mixture:
    """Return the demonstrations of several data sets, each row of which is shown equally often; see ``Demonstrations``.

    Args:
        prompts: of each data set.
        response_length: see ``Demonstrations``.
        demonstrate: see ``Demonstrations``.
    """
    parts = {str(number): Demonstrations(prompt, response_length, demonstrate) for number, prompt in enumerate(prompts)}
    return next(iter(parts.values())) if len(parts) == 1 else Mixture(parts, {})


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
                f"{records.locations[index]} has no column {config.prompt_key!r}; it has {', '.join(record)}: set "
                "data.prompt_key to the column of the prompts",
                location=records.locations[index],
            )


def answer_of(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a key in it, such as ``reward_model.ground_truth``; None if it is absent."""
    if key in record:
        return record[key]
    column, _, inner = key.partition(".")
    value = record.get(column)
    return answer_of(value, inner) if inner and isinstance(value, Mapping) else None


def encoded_prompt(
    record: Mapping[str, Any], location: str, config: ProblemsConfig, tokenizer: TextTokenizer
) -> tuple[str, list[int]]:
    """Return the prompt of a row of a data set: its text and its tokens.

    Chat messages, and texts with ``data.chat_template=true``, give what ``apply_chat_template`` of transformers returns
    for the row, with its tools; messages that end with the assistant's are continued. Other texts begin with the
    tokenizer's ``text_prefix``, such as BOS.

    Args:
        record: the row.
        location: its file and line, for error messages.
        config: the columns, and the use of the chat template.
        tokenizer: the tokenizer.

    Raises:
        DataError: the row has no prompt, or one that cannot be rendered or encoded; with its location.
        ConfigError: there are chat messages, and the tokenizer has no chat template.
    """
    prompt = record[config.prompt_key]
    if isinstance(prompt, str) and not config.chat_template:
        if config.system_prompt is not None:
            raise ConfigError(
                f"{location}: data.system_prompt is set, and the prompt is a text: set data.chat_template=true, or "
                "data.system_prompt=null",
                key="data.system_prompt",
                value=config.system_prompt,
            )
        text, prefix = prompt, tokenizer.text_prefix if isinstance(tokenizer, PrefixingTokenizer) else []
    else:
        tools = _tools(record, location, config)
        messages = _messages(prompt, location, config)
        try:
            text, prefix = tokenizer.render(messages, **({"tools": tools} if tools else {})), []
        except DataError as error:
            raise DataError(f"{location}: {error}", location=location) from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"the prompt has {text[error.start]!r}, half of a surrogate pair, which is no character"
        raise DataError(f"{location}: {reason}", location=location) from error
    ids = tokenizer.encode(text)
    if not ids:
        raise DataError(f"{location}: the prompt is empty", location=location)
    return text, ids if ids[: len(prefix)] == prefix else prefix + ids


def _messages(prompt: Any, location: str, config: ProblemsConfig) -> Sequence[Message]:
    """Return the chat messages of a prompt; the system's of the configuration if it begins with none."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if config.chat_template is False or not _are_messages(messages):
        expected = "a text"
        if config.chat_template is not False:
            expected += ', or chat messages such as [{"role": "user", "content": "..."}]'
        raise DataError(
            f"{location}: the prompt is {repr(prompt)[:80]} of type {type(prompt).__name__}; expected {expected}",
            location=location,
        )
    if config.system_prompt is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in prompt)
        and all(message.get("content") is not None or message.get("tool_calls") for message in prompt)
    )


def _tools(record: Mapping[str, Any], location: str, config: ProblemsConfig) -> list[Mapping[str, Any]]:
    """Return the JSON schemas of a row's tools; files have them as objects, or as their text in JSON."""
    given = None if config.tools_key is None else from_json(record.get(config.tools_key))
    tools = [from_json(tool) for tool in given] if isinstance(given, list) else given
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"{location}: the column {config.tools_key!r} is {repr(given)[:80]}; expected a list of JSON schemas of "
            "tools. Set data.tools_key to their column, or to null if there are none",
            location=location,
        )
    return tools


def from_json(value: Any) -> Any:
    """Return what a text in JSON stands for if that is an object or a list; any other value as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _padded(ids: Tensor, length: int, pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return the padded ids and their mask, int64 ``[length]``."""
    row = torch.full((length,), pad, dtype=torch.long)
    mask = torch.zeros(length, dtype=torch.long)
    filled = slice(length - len(ids), length) if left else slice(0, len(ids))
    row[filled] = ids
    mask[filled] = 1
    return row, mask
