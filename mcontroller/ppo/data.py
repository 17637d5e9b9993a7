"""Batches of data sets: the rows of batch k depend only on k and the seed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcontroller.data.protocol import DataProto
from mcontroller.errors import DataError

RESPONSE_COLUMNS = ("responses", "response_mask", "rollout_log_probs")
"""The columns of generated responses that the trainer reads. It fetches them together."""

FAILED = "failed"
"""Column of the responses that could not be made, bool ``[rows]``: they have no tokens and no score."""

ROUTED_EXPERTS = "routed_experts"
"""Column of the experts that routers chose, ``[rows, prompt + response, layers with experts, experts of a token]``."""

TOKEN_TEMPERATURES = "token_temperatures"
"""Column of the temperature at which each token was sampled, float32 ``[rows, response]``: workers score it there."""

HELD_OUT_BATCH = "held_out_batch"
"""Key of the ``meta_info`` of problems that are not trained on: the number of the batch, from 0.

Their samples depend on it, and not on the batches that were sampled before, which they do not change either.
"""

STAGE_COLUMNS = frozenset(
    {
        ROUTED_EXPERTS,
        *("old_log_probs", "entropys", "ref_log_prob", "values", "rm_scores"),
        *("token_level_scores", "token_level_rewards", "advantages", "returns", "importance_weights"),
    }
)
"""The columns that the stages of a step add to the responses."""

TOKENS = "sequence_tokens"
"""Column of the number of tokens of each row, prompt and response, int64 ``[rows]``."""

PROMPTS = "prompt_numbers"
"""Column of the number of each row's prompt in the run, int64 ``[rows]``."""

MINI_BATCHES = "mini_batches"
"""Column of the mini-batch of each row in each epoch of an update, int64 ``[rows, epochs]``."""


class UpdateRules:
    """What ``RayPPOTrainer`` asks about the updates of a worker class; these answers fit every class.

    A worker class declares others with the attribute ``update_rules``, a class that derives from this one.

    Args:
        worker_cls: the worker class.
        config: its configuration.
    """

    def __init__(self, worker_cls: type, config: Any) -> None:
        self.worker_cls, self.config = worker_cls, config

    @staticmethod
    def of(worker_cls: type, config: Any) -> UpdateRules:
        """Return the rules that a worker class declares."""
        rules: type[UpdateRules] = getattr(worker_cls, "update_rules", UpdateRules)
        return rules(worker_cls, config)

    def check(self) -> None:
        """Raise ConfigError if a run cannot train with the configuration; called before any process starts."""

    def columns_read(self) -> Collection[str] | None:
        """Return which of ``STAGE_COLUMNS`` an update reads, so that the others are not sent; None: all."""
        return None

    def updates_once(self, rows: int, n: int) -> bool:
        """Return whether an update makes one optimizer step, and can do without ``old_log_probs``.

        Args:
            rows: responses of the batch.
            n: responses to each prompt.
        """
        return False

    def mini_batches(self, rows: int, n: int, update: int) -> Tensor | None:
        """Return the mini-batch of each row in each epoch of an update, int64 ``[rows, epochs]``.

        The trainer balances the tokens of each of them, and passes them as the column ``MINI_BATCHES``. None: it
        balances the rows of the whole batch.

        Args:
            rows: rows of the batch that have a valid token.
            n: responses to each prompt.
            update: number of the update, from 0.
        """
        return None

    def shares_prompts(self) -> bool:
        """Return whether a pass computes a prompt once for the rows that begin with it, which then stay together."""
        return False


class Tokenizer(Protocol):
    """The attributes of a tokenizer that the trainer reads."""

    @property
    def eos_token_id(self) -> int | list[int]:
        """Token that ends a response, or several."""

    @property
    def pad_token_id(self) -> int:
        """Token that pads prompts and responses."""


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokens of a tokenizer that generation reads from ``meta_info``."""
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a tokenizer that end a response."""
    stop = tokenizer.eos_token_id
    return [stop] if isinstance(stop, int) else list(stop)


class Dataset(Protocol):
    """Rows by index. A row maps names to tensors, of the same shape in every row, and to any other objects."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a row."""


def collate(rows: Sequence[Mapping[str, Any]]) -> DataProto:
    """Return a batch of rows: tensors stacked, other objects as non-tensor columns."""
    first = rows[0]
    tensors = {name: torch.stack([row[name] for row in rows]) for name in first if isinstance(first[name], Tensor)}
    others = {name: [row[name] for row in rows] for name in first if name not in tensors}
    return DataProto.from_dict(tensors, others)


def check_rows(**datasets: Dataset | None) -> None:
    """Raise DataError if the first row of a data set, given by name, lacks the tensors that prompts need."""
    expected = (
        "expected a mapping with input_ids and attention_mask [prompt], such as a row of mcontroller.ppo.PromptRows"
    )
    for name, dataset in datasets.items():
        if dataset is None or len(dataset) == 0:
            continue
        row: object = dataset[0]
        if not isinstance(row, Mapping):
            raise DataError(f"{name}: row 0 is {repr(row)[:60]} of type {type(row).__name__}; {expected}", row=0)
        for column in ("input_ids", "attention_mask"):
            if not isinstance(row.get(column), Tensor):
                has = ", ".join(row) or "no columns"
                raise DataError(f"{name}: row 0 has {has}, and no tensor {column!r}; {expected}", column=column)


def columns(batch: DataProto, *names: str) -> list[Tensor]:
    """Return the tensor columns of these names.

    Raises:
        DataError: a column is missing; ``columns`` names the missing ones.
    """
    present = batch.tensor_names
    missing = [name for name in names if name not in present]
    if missing:
        raise DataError(
            f"the batch lacks column(s) {', '.join(missing)}; it has {', '.join(present) or 'none'}",
            columns=missing,
        )
    tensors = batch.tensors(names)
    return [tensors[name] for name in names]


def supervised_rows(responses: DataProto) -> DataProto:
    """Return responses as rows of ``update_sft``, which train on the tokens of the policy.

    Args:
        responses: ``input_ids``, ``attention_mask`` ``[rows, prompt + response]``, ``response_mask``
            ``[rows, response]``.

    Returns:
        ``input_ids``, ``attention_mask`` and ``loss_mask``, int64 ``[rows, prompt + response]``.

    Raises:
        DataError: a column is missing.
    """
    ids, attention, mask = columns(responses, "input_ids", "attention_mask", "response_mask")
    loss_mask = torch.zeros_like(attention)
    loss_mask[:, -mask.size(1) :] = mask
    return DataProto.from_dict({"input_ids": ids, "attention_mask": attention, "loss_mask": loss_mask})


def without(batch: DataProto, names: Collection[str]) -> DataProto:
    """Return a batch without the tensor columns of these names; those that it does not have are no error."""
    return batch.select([name for name in batch.tensor_names if name not in names])


def with_tokens(batch: DataProto, problems: DataProto) -> DataProto:
    """Return a batch with the columns ``TOKENS`` and ``PROMPTS``.

    Args:
        batch: responses; their ``attention_mask`` is read, and not kept in the result.
        problems: of the rows, in their order, with the non-tensor column ``uid`` of whole numbers.
    """
    (mask,) = columns(batch.slice(), "attention_mask")
    prompts = torch.tensor(problems.non_tensor_batch["uid"].tolist())
    return batch.union(DataProto.from_dict({TOKENS: mask.sum(1), PROMPTS: prompts}))


def tokens_of(batch: DataProto) -> int:
    """Return the number of tokens of a batch, after ``with_tokens``."""
    return int(columns(batch, TOKENS)[0].sum())


_WHOLE = ("input_ids", "attention_mask", "position_ids", ROUTED_EXPERTS)
"""Columns ``[rows, prompt + response, ...]`` of responses; ``prompts`` is ``[rows, prompt]``."""


def of_equal_width(batches: Sequence[DataProto], pad_token_id: int) -> list[DataProto]:
    """Return batches of responses padded to one width of prompts and of responses, so that they can be joined.

    A rollout loop that writes prompts of its own, or responses as wide as the longest one, makes batches of several.

    Args:
        batches: with ``input_ids`` ``[rows, prompt + response]`` and ``responses`` ``[rows, response]``; their other
            columns may have these dims.
        pad_token_id: fills ids; other columns are filled with 0, or -1 for what no token has.
    """
    sizes = []
    for batch in batches:
        ids, responses = columns(batch, "input_ids", "responses")
        sizes.append((ids.shape[1] - responses.shape[1], responses.shape[1]))
    widest = max(prompt for prompt, _ in sizes), max(response for _, response in sizes)
    fill = {"input_ids": pad_token_id, "prompts": pad_token_id, "responses": pad_token_id}
    fill |= {ROUTED_EXPERTS: -1, "token_versions": -1}
    padded = []
    for batch, (prompt, response) in zip(batches, sizes, strict=True):
        before, after = widest[0] - prompt, widest[1] - response
        wider = {}
        for name, column in batch.tensors().items() if before or after else ():
            if name in _WHOLE or name == "prompts":
                sides = (before, after if name in _WHOLE else 0)
            elif column.ndim > 1 and column.shape[1] == response:
                sides = (0, after)
            else:
                continue
            wider[name] = pad(column, (*(0, 0) * (column.ndim - 2), *sides), value=fill.get(name, 0))
        padded.append(batch.with_tensors(wider) if wider else batch)
    return padded


class Mixture:
    """Several data sets as one: ``rows`` takes turns between them in the ratio of their weights.

    Of the first k rows of the sequence, each data set has its share of k, to within a few rows. Each goes through its
    own passes: a small one with a large weight is repeated more often.

    Args:
        datasets: the data sets by name.
        weights: of each data set, more than 0; None: its number of rows.
    """

    def __init__(self, datasets: Mapping[str, Dataset], weights: Mapping[str, float | None]) -> None:
        self.datasets = list(datasets.values())
        self.starts = [0, *accumulate(map(len, self.datasets))]
        given = [weights.get(name) for name in datasets]
        known = [len(each) if weight is None else weight for each, weight in zip(self.datasets, given, strict=True)]
        self._shares = [weight / sum(known) for weight in known]
        self._turns: list[tuple[int, int]] = []
        self._counts = [0] * len(self.datasets)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number = bisect_right(self.starts, index) - 1
        return self.datasets[number][index - self.starts[number]]

    def turn(self, position: int) -> tuple[int, int]:
        """Return the number of the data set that has a position of the sequence, and how many it had before."""
        while len(self._turns) <= position:
            total = len(self._turns) + 1
            behind = [share * total - count for share, count in zip(self._shares, self._counts, strict=True)]
            number = behind.index(max(behind))
            self._turns.append((number, self._counts[number]))
            self._counts[number] += 1
        return self._turns[position]


class BatchStream:
    """An endless sequence of batches: ``stream[k]`` is batch k, in a new random order for every pass over the data.

    The rows left at the end of a pass that do not fill a batch are dropped. A ``Mixture`` has no end of a pass.

    The position of a row is its place in the sequence of all passes, which depends on the data and the seed, and not on
    the size of batches. A run that resumes continues after the set of rows that were read: those before a position, but
    some that are still to be read.

    Args:
        dataset: the rows.
        batch_size: rows of a batch.
        seed: seed of the order.
        name: the name of the data set in error messages.

    Raises:
        DataError: the data set has fewer rows than one batch.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, name: str = "train_dataset") -> None:
        self.per_pass = len(dataset) // batch_size
        if self.per_pass == 0:
            raise DataError(
                f"{name} has {len(dataset)} rows, less than one batch of {batch_size}: add rows, or reduce the batch",
                rows=len(dataset),
                batch_size=batch_size,
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self._start, self._position = 0, 0
        self._pending: Sequence[int] = ()
        self._earlier: Mapping[int, Sequence[int]] = {}

    def resume(
        self,
        index: int,
        position: int,
        pending: Sequence[int] = (),
        earlier: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Continue a stream, which may have had another batch size.

        Args:
            index: number of the next batch.
            position: of the first row of those that were not read, without ``pending``.
            pending: positions of rows before it that are read first.
            earlier: positions of the rows of batches before ``index``.
        """
        self._start, self._position, self._pending = index, position, tuple(pending)
        self._earlier = dict(earlier or {})

    def position(self, index: int) -> int:
        """Return the position of the first row after those of the batches before ``index``; see ``pending``."""
        if (after := index - self._start - self._pending_batches) > 0:
            return self._first_row(after - 1) + self.batch_size
        return self._position + (self._filled if after == 0 else 0)

    def pending(self, index: int) -> Sequence[int]:
        """Return the positions before ``position(index)`` of rows that are not in the batches before ``index``."""
        return self._pending[(index - self._start) * self.batch_size :]

    def rows_before(self, index: int) -> int:
        """Return the number of rows of the batches before ``index``, with those that ended passes left out."""
        return self.position(index) - len(self.pending(index))

    def passes(self, index: int) -> float:
        """Return the passes over the data set before batch ``index``."""
        return self.rows_before(index) / len(self.dataset)

    def batches_of(self, passes: int) -> int:
        """Return the number of batches of a new stream in so many passes."""
        is_endless = isinstance(self.dataset, Mixture)
        return passes * len(self.dataset) // self.batch_size if is_endless else passes * self.per_pass

    def rows(self, index: int) -> list[int]:
        """Return the positions of the rows of a batch."""
        if index in self._earlier:
            return list(self._earlier[index])
        number = index - self._start
        if number < self._pending_batches:
            rows = self._pending[number * self.batch_size : (number + 1) * self.batch_size]
            return [*rows, *range(self._position, self._position + self.batch_size - len(rows))]
        first = self._first_row(number - self._pending_batches)
        return list(range(first, first + self.batch_size))

    @property
    def _pending_batches(self) -> int:
        return -(-len(self._pending) // self.batch_size)

    @property
    def _filled(self) -> int:
        """The rows after ``position`` that fill the last of the batches with pending rows."""
        return self._pending_batches * self.batch_size - len(self._pending)

    def _first_row(self, number: int) -> int:
        """Return the position of the first row of a batch, counted from the first one without pending rows.

        It is in the next pass if too few rows are left of one.
        """
        rows, position = len(self.dataset), self._position + self._filled
        in_pass = (rows - position % rows) // self.batch_size
        if isinstance(self.dataset, Mixture) or number < in_pass:
            return position + number * self.batch_size
        passes, batch = divmod(number - in_pass, self.per_pass)
        return (position // rows + 1 + passes) * rows + batch * self.batch_size

    def _row(self, position: int) -> int:
        """Return the row of the data set at a position."""
        dataset, (number, before) = self.dataset, (0, position)
        start, size = 0, len(dataset)
        if isinstance(dataset, Mixture):
            number, before = dataset.turn(position)
            start, size = dataset.starts[number], len(dataset.datasets[number])
        passes, place = divmod(before, size)
        if number not in self._orders or self._orders[number][0] != passes:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + passes + (number << 40))
            self._orders[number] = passes, torch.randperm(size, generator=generator).tolist()
        return start + self._orders[number][1][place]

    def __getitem__(self, index: int) -> DataProto:
        return collate([self.dataset[self._row(position)] for position in self.rows(index)])


def in_order(dataset: Dataset, batch_size: int = 0) -> Iterator[DataProto]:
    """Yield the whole data set once, in its order, ``batch_size`` rows at a time (0: all at once)."""
    size = batch_size or max(len(dataset), 1)
    for start in range(0, len(dataset), size):
        yield collate([dataset[row] for row in range(start, min(start + size, len(dataset)))])
