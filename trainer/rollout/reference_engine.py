"""The reference engine: the ranks of a group, such as Megatron's, which continue requests step by step.

A step is one call of ``generate_sequences``, which adds some tokens to the requests in flight, the first ``max_rows``
of them. Nothing is kept between two steps: after each, a request is answered with what was added, and the rest is
another request, which goes on before those that waited. The noise of a token depends on the seed of its response and on
its position, so that the tokens are the same in every layout, in any order of requests and for any length of steps.

Nothing happens by itself: whoever waits for a response makes the steps, and weights move between two of them.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import MControllerError
from trainer.columns import LOG_PROBS, columns
from trainer.rollout.requests import Request
from workers.columns import ROUTED_EXPERTS
from workers.generate.engine_protocol import EngineLost, Sampled

STEP_TOKENS = 64
"""[tokens] The most by which a step continues a request."""
_OF_A_REQUEST = ("response_length", "seed")
_VERSION = "policy_version"
_READ = ("responses", "response_mask", *LOG_PROBS, _VERSION, ROUTED_EXPERTS)


class ReferenceEngine:
    """Generates with a group, one step at a time; see ``workers.generate.engine_protocol.Engine``.

    Args:
        group: its workers have ``generate_sequences`` with the columns ``sample_seed`` and ``generated``, and
            ``generation_limits``.
        step_tokens: [tokens] the most that a step adds to a request. None: ``step_tokens`` of the workers'
            ``generation_limits``, or ``STEP_TOKENS``.
        max_rows: the most requests of a step; the others wait. None: ``max_rows`` of the workers' limits.
        limits: ``generation_limits`` of the workers. None: they are called for them.

    Attributes:
        name: of the group.
        step_tokens, max_rows: as passed.
        lock: held while a step is sent, or requests are answered.
    """

    def __init__(
        self,
        group: Any,
        *,
        step_tokens: int | None = None,
        max_rows: int | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        limits = limits or group.generation_limits()[0]
        self._group, self.lock = group, threading.RLock()
        self.name: str = getattr(group, "name", "reference")
        self.step_tokens: int = step_tokens or limits.get("step_tokens", STEP_TOKENS)
        self.max_rows: int = max_rows or limits["max_rows"]
        self._width: int = limits["prompt_length"] + limits["response_length"]
        self._waiting: list[Request] = []
        self._rows: list[Request] = []
        self._calls: list[tuple[list[Request], DataProto]] = []
        self._driver: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: array[int], sampling: Mapping[str, Any], on_part: Callable[[Sampled], None] | None = None
    ) -> Sampled:
        """Generate the tokens of one step of a response, which are one part; see ``Engine.generate``.

        Raises:
            EngineLost: the group failed.
        """
        settings = {name: value for name, value in sampling.items() if name not in _OF_A_REQUEST}
        settings.setdefault("pad_token_id", 0)  # the answer has no padding
        request = Request(prompt, settings, sampling["seed"], 0, sampling["response_length"])
        self.start(request)
        self.drive()
        try:
            sampled: Sampled = await asyncio.wrap_future(request)
        except Exception as error:
            raise EngineLost(f"engine {self.name} was lost: {error}", engine=self.name) from error
        return sampled

    async def close(self) -> None:
        """Answer all requests in flight with ``EngineLost``."""
        self._fail(EngineLost(f"engine {self.name} was closed", engine=self.name))

    def start(self, request: Request) -> None:
        """Take a request, for the steps after the one in flight."""
        with self.lock:
            self._waiting.append(request)

    def requests(self, *, begun: bool = False) -> list[Request]:
        """Return the requests in flight, in the order in which they go on.

        Args:
            begun: whether to return only those whose response has tokens.
        """
        with self.lock:
            live = [request for request in (*self._rows, *self._waiting) if not request.done()]
        return [request for request in live if request.generated] if begun else live

    def step(self, requests: Sequence[Request] | None = None, tokens: int | None = None) -> bool:
        """Send a step, if none is in flight, and return whether one is.

        Args:
            requests: those that it continues, of ``requests()``. None: the first ``max_rows``.
            tokens: [tokens] the most that it adds to each of them. None: ``step_tokens``.
        """
        with self.lock:
            if self._rows:
                return True
            live = self.requests()
            self._rows = list(live[: self.max_rows] if requests is None else requests)
            chosen = {*self._rows}
            self._waiting = [request for request in live if request not in chosen]
            alike: list[list[Request]] = []
            for request in self._rows:
                same = next((rows for rows in alike if _have_one_setting(rows[0], request)), None)
                if same is None:
                    alike.append([request])
                else:
                    same.append(request)
            try:
                for rows in alike:
                    self._calls.append((rows, self._call(rows, tokens or self.step_tokens)))
            except MControllerError:
                self._drop_step()
                raise
            return bool(self._rows)

    def ready(self) -> bool:
        """Whether ``take`` would not wait."""
        return all(batch.wait(0.0) for _, batch in self._calls)

    def take(self) -> None:
        """Wait for the step in flight, and answer its requests.

        Raises:
            GroupError: the group failed.
        """
        with self.lock:
            answers: dict[Request, Sampled] = {}
            try:
                for rows, batch in self._calls:
                    answers.update(zip(rows, _sampled(rows, batch), strict=True))
            except MControllerError:
                self._drop_step()
                raise
            stepped, waiting, self._rows, self._waiting, self._calls = self._rows, self._waiting, [], [], []
            for request in stepped:
                if not request.done() and request.answered(answers[request]):
                    self._waiting.append(request)
            self._waiting += waiting

    def postpone_begun(self) -> None:
        """Continue the responses that have tokens after those that have none."""
        with self.lock:
            self._waiting.sort(key=lambda request: request.generated > 0)

    def drive(self) -> None:
        """Make steps on the running event loop until no request is in flight."""
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        try:
            await _let_waiters_run()
            while self.step():
                while not self.ready():
                    await asyncio.sleep(0.001)
                self.take()
                await _let_waiters_run()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self.lock:
            self._drop_step()
            requests, self._waiting = self.requests(), []
        for request in requests:
            request.answered(error)

    def _drop_step(self) -> None:
        self._waiting, self._rows, self._calls = self._rows + self._waiting, [], []

    def _call(self, rows: Sequence[Request], tokens: int) -> DataProto:
        """Send a call that continues requests with the same settings."""
        lengths = np.array([len(request.prompt) for request in rows])
        widest, meta_info = int(lengths.max()), rows[0].settings
        ids = np.full((len(rows), widest), meta_info["pad_token_id"], np.int32)  # half of what is copied and sent
        for row, request in zip(ids, rows, strict=True):
            row[widest - len(request.prompt) :] = request.prompt
        room = min(tokens, max(request.left for request in rows), self._width - widest)
        prompts = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(np.arange(widest) >= widest - lengths[:, None]),
            "sample_seed": torch.tensor([request.seed for request in rows], dtype=torch.long),
            "generated": torch.tensor([request.generated for request in rows]),
        }
        meta_info = {**meta_info, "n": 1, "response_length": room}
        batch: DataProto = self._group.generate_sequences.options(blocking=False)(
            DataProto.from_dict(prompts, meta_info=meta_info)
        )
        return batch


def _have_one_setting(request: Request, other: Request) -> bool:
    return request.settings is other.settings or request.settings == other.settings


def _sampled(rows: Sequence[Request], batch: DataProto) -> Iterator[Sampled]:
    """Yield what a call generated for each request, as far as there is room."""
    responses, mask = columns(batch.prefetch(_READ), "responses", "response_mask")
    tensors = batch.tensors([name for name in _READ if name in batch.tensor_names])
    width, kept = responses.shape[1], mask.sum(1).tolist()
    widest = max(len(request.prompt) for request in rows)
    name = next((name for name in LOG_PROBS if name in tensors), None)
    tokens = array("q", responses.long().numpy().tobytes())
    log_probs = None if name is None else array("d", tensors[name].double().numpy().tobytes())
    basis = batch.meta_info.get(name, {}) if name == LOG_PROBS[1] else None
    versions = tensors[_VERSION].tolist() if _VERSION in tensors else [0] * len(rows)
    experts, eos = tensors.get(ROUTED_EXPERTS), rows[0].settings["eos_token_id"]
    ends = {eos} if isinstance(eos, int) else {*eos}
    for row, (request, version) in enumerate(zip(rows, versions, strict=True)):
        count = min(kept[row], request.left)
        made = slice(row * width, row * width + count)
        first = widest - len(request.prompt)
        yield Sampled(
            tokens[made],
            None if log_probs is None else log_probs[made],
            [(version, count)],
            is_partial=count < request.left and tokens[made.stop - 1] not in ends,
            basis=basis,
            experts=None if experts is None else experts[row, first : widest + count - 1],
        )


async def _let_waiters_run() -> None:
    """Let those who waited for a trajectory submit their next one: a result reaches them in four rounds."""
    for _ in range(4):
        await asyncio.sleep(0)
