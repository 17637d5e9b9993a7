"""The router before the engines of a rollout: a request goes where its prefix is, and where load is least."""

from __future__ import annotations

import asyncio
import threading
import weakref
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from mcontroller.errors import MControllerError
from workers.generate.engine_protocol import Engine, EngineLost, Sampled

BLOCK_TOKENS = 64
"""[tokens] A prefix is known in whole blocks of this many."""
BLOCKS_KNOWN = 1 << 16
"""The most blocks that are known of an engine; the oldest are forgotten."""
UNEVEN = 8
"""[requests] How many more than the idlest engine one may have to get a request for its prefix."""
_STOP_S = 5.0


class NoEngineLeft(MControllerError):
    """All engines of a rollout were lost.

    Attributes:
        engines: their names.
        cause: the error of the last one.
    """

    engines: Sequence[str]
    cause: str


class _Routed:
    """An engine with the number of its requests in flight, and the blocks of the prompts that it has had."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.in_flight = engine, 0
        self.blocks: dict[int, None] = {}

    def known(self, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks of a prompt the engine has had."""
        return next((count for count, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def learn(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > BLOCKS_KNOWN:
            del self.blocks[next(iter(self.blocks))]


class Router:
    """Sends requests to engines. Its methods run on one event loop.

    Args:
        engines: of one policy.

    Attributes:
        lost: the names of the engines that were lost.
        moved: how many requests were sent to another engine because theirs was lost.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._routed = [_Routed(engine) for engine in engines]
        self.lost: list[str] = []
        self.moved = 0

    async def generate(
        self, prompt: array[int], sampling: Mapping[str, Any], on_part: Callable[[Sampled], None] | None = None
    ) -> Sampled:
        """Return the response of an engine; if that is lost meanwhile, the response of another one.

        If it is lost after ``on_part`` was called, what is returned has no tokens and ``is_partial``.

        Raises:
            NoEngineLeft: all engines were lost.
            RequestFailed: an engine rejects the request.
        """
        blocks, cause, has_parts = prefix_blocks(prompt), "there was none", False

        def hand_out(part: Sampled) -> None:
            nonlocal has_parts
            has_parts = True
            assert on_part is not None
            on_part(part)

        while self._routed:
            routed = self._chosen(blocks)
            routed.learn(blocks)
            routed.in_flight += 1
            try:
                return await routed.engine.generate(prompt, sampling, on_part and hand_out)
            except EngineLost as error:
                cause = str(error)
                if routed in self._routed:
                    self._routed.remove(routed)
                    self.lost.append(routed.engine.name)
                self.moved += bool(self._routed)
                if has_parts:
                    return Sampled(array("q"), array("d"), (), is_partial=True)
            finally:
                routed.in_flight -= 1
        raise NoEngineLeft(
            f"no engine is left of {', '.join(self.lost)}: {cause}. Start the rollout's group again, as "
            "RayPPOTrainer.fit does by itself",
            engines=tuple(self.lost),
            cause=cause,
        )

    async def close(self) -> None:
        """Close the connections to all engines."""
        for routed in self._routed:
            await routed.engine.close()

    def _chosen(self, blocks: Sequence[int]) -> _Routed:
        least = min(routed.in_flight for routed in self._routed)
        free = [routed for routed in self._routed if routed.in_flight <= least + UNEVEN]
        return max(free, key=lambda routed: (routed.known(blocks), -routed.in_flight))


def prefix_blocks(prompt: array[int]) -> list[int]:
    """Return a number for every whole block of a prompt, which depends on all tokens before its end."""
    content, size = memoryview(prompt).cast("B"), BLOCK_TOKENS * prompt.itemsize
    blocks, before = [], 0
    for end in range(size, len(content) + 1, size):
        before = hash((before, bytes(content[end - size : end])))
        blocks.append(before)
    return blocks


class RequestLoop:
    """An event loop on a thread of its own, for requests that nobody drives; both end with this object."""

    def __init__(self) -> None:
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_until_stopped, args=(loop,), name="requests", daemon=True)
        thread.start()
        weakref.finalize(self, _stop, loop, thread)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the loop, and return its future, which can be cancelled."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # which cancels the tasks that are left
        runner.get_loop().run_forever()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(_STOP_S)
