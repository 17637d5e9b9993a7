"""An engine of vLLM, to which requests go on one connection, and what they say about sampling."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workers.config import RolloutConfig
from workers.generate.engine_protocol import EngineLost, RequestFailed, Sampled
from workers.generate.sampling import Sampling
from workers.generate.vllm.in_engine.engine_messages import packed, read_message

_CONNECT_S = 30.0
_SEED_BITS = (1 << 63) - 1


@dataclass(frozen=True)
class VllmAddress:
    """Where an engine takes requests.

    Attributes:
        host, port: of its socket.
        token: that a program has to send first.
        config: the default settings of sampling.
    """

    host: str
    port: int
    token: str
    config: RolloutConfig

    def connect(self) -> VllmEngine:
        """Return the engine; its first request opens the connection."""
        return VllmEngine(self)


class VllmEngine:
    """Sends requests to an engine that ``serve_engine.py`` serves; see ``workers.generate.engine_protocol.Engine``.

    Args:
        address: where it takes requests.
    """

    def __init__(self, address: VllmAddress) -> None:
        self.name, self._address = f"{address.host}:{address.port}", address
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Sampled]] = {}
        self._on_part: dict[int, Callable[[Sampled], None]] = {}
        self._parameters: dict[Any, tuple[dict[str, Any], float]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._lost, self._was_silent = "", False

    async def generate(
        self, prompt: array[int], sampling: Mapping[str, Any], on_part: Callable[[Sampled], None] | None = None
    ) -> Sampled:
        """Generate a response; see ``Engine.generate``."""
        writer = self._writer or await self._connected()
        if self._lost:
            raise self._loss()
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        parameters, temperature = self._parameters_of(sampling)
        self._waiting[number] = future
        head = {"id": number, "sampling": parameters, "temperature": temperature}
        if on_part is not None:
            self._on_part[number], head["parts"] = on_part, True
        try:
            writer.write(packed(head, prompt))
            response: Sampled = await future
            return response
        except _Rejected as error:
            text = f"engine {self.name} rejected a request of {len(prompt)} tokens: {error}"
            raise RequestFailed(text, engine=self.name, length=len(prompt)) from None
        except asyncio.CancelledError:
            writer.write(packed({"abort": number}))
            raise
        finally:
            self._waiting.pop(number, None)
            self._on_part.pop(number, None)

    async def close(self) -> None:
        """Close the connection."""
        self._lose("its connection was closed")

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._lost:  # another request has tried
                raise self._loss()
            if self._writer is None:
                try:
                    connection = asyncio.open_connection(self._address.host, self._address.port)
                    reader, writer = await asyncio.wait_for(connection, _CONNECT_S)
                    writer.write(packed({"token": self._address.token}))
                    await asyncio.wait_for(read_message(reader), _CONNECT_S)
                except (TimeoutError, OSError, EOFError) as error:
                    self._lose(f"it takes no connection: {type(error).__name__}: {error}")
                    raise self._loss() from error
                self._writer, self._receiver = writer, asyncio.ensure_future(self._receive(reader))
            return self._writer

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        self._watch(loop)
        while True:
            try:
                head, arrays = await read_message(reader)
            except EOFError as error:
                return self._lose(str(error))
            self._heard = loop.time()
            future = self._waiting.get(head.get("id", -1))
            if future is None or future.done():
                continue
            if "error" in head:
                future.set_exception(_Rejected(head["error"]))
                continue
            if "reason" not in head:
                self._on_part[head["id"]](Sampled(arrays[0], arrays[1], head["versions"]))
                continue
            tokens, log_probs, *experts_of_tokens = arrays
            experts = None
            if experts_of_tokens:
                experts = torch.from_numpy(np.array(experts_of_tokens[0]).reshape(head["experts"]))
            future.set_result(
                Sampled(tokens, log_probs, head["versions"], is_partial=head["reason"] == "abort", experts=experts)
            )

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up an engine that was silent for too long while requests wait for it."""
        silence = self._address.config.vllm.silence_timeout_s
        if not self._waiting:
            self._heard = loop.time()
        if loop.time() - self._heard > silence:
            self._was_silent = True
            self._lose(f"it was silent for {silence:g} s: see rollout.vllm.silence_timeout_s")
        elif not self._lost:
            loop.call_later(silence / 10, self._watch, loop)

    def _lose(self, why: str) -> None:
        self._lost = why
        if self._writer is not None:
            self._writer.close()
        if self._receiver is not None:
            self._receiver.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._loss())

    def _loss(self) -> EngineLost:
        text = f"engine {self.name} was lost: {self._lost}"
        return EngineLost(text, engine=self.name, was_silent=self._was_silent)

    def _parameters_of(self, sampling: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the arguments of ``vllm.SamplingParams``, and the temperature that logits are divided by."""
        changing = ("response_length", "seed")
        key = repr([item for item in sampling.items() if item[0] not in changing])
        if key not in self._parameters:
            settings = {name: value for name, value in sampling.items() if name not in changing}
            whole = Sampling.of(self._address.config, {**settings, "pad_token_id": 0})  # vLLM pads nothing
            seeded = self._address.config.vllm.seeds
            self._parameters[key] = sampling_parameters(whole, seeded=seeded), whole.temperature
        parameters, temperature = self._parameters[key]
        changes = {"max_tokens": sampling["response_length"]}
        if "seed" in parameters:
            changes["seed"] = sampling["seed"] & _SEED_BITS
        return {**parameters, **changes}, temperature


def sampling_parameters(sampling: Sampling, *, seeded: bool) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams`` of a request.

    The temperature is not among them: ``PolicyReceiver`` divides the logits by it. vLLM takes a seed below 0 for none,
    so the sign is dropped.

    Args:
        sampling: how its tokens are generated.
        seeded: whether it has a seed. vLLM draws the tokens of such requests one row at a time, and of others together.
    """
    common: dict[str, Any] = {
        "max_tokens": sampling.response_length,
        "stop_token_ids": list(sampling.eos_token_ids),
        "repetition_penalty": sampling.repetition_penalty,
        "temperature": 0.0,
    }
    if not sampling.do_sample:
        return common
    filters = {"temperature": 1.0, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return common | filters | ({"seed": sampling.seed & _SEED_BITS} if seeded else {})


class _Rejected(Exception):
    """The engine answered a request with an error."""
