"""Count the frames and types of this project that one call passes, from the group's method to Megatron's forward.

    python -m tests.count_call

A real Ray group of one rank runs ``compute_log_prob`` on a tiny Megatron model. The frames are those on the stack of
the controller when it sends to ZeroMQ, and on that of the worker process when ``GPTModel.forward`` is called. The
functions and types are those of this project that are called and instantiated meanwhile: in the controller during the
whole call, in the process until ``GPTModel.forward``. The call's payload is listed, but not counted: batches in all
their forms, how their rows are split, and how values are serialized.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from mcontroller import Dispatch, MegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool, register
from mcontroller.channel.wire import send_frames
from tests.workers.roles import MODEL, OPTIM, PROMPT, RESPONSE, experience
from workers import ActorConfig, ActorRolloutRefWorker
from workers.config import load_config

PACKAGES = ("parallel_state", "mcontroller", "workers", "trainer")
PAYLOAD = (
    "mcontroller.data.",
    "mcontroller.partition.",
    "mcontroller.ray.values.references.",
    "mcontroller.ray.values.wire.",
    "workers.config.roles.MicroBatchSize",
    "workers.distinct_tokens",
    "workers.train.batches.",
    "workers.train.micro_batches.",
)


class Count(NamedTuple):
    """What one call passed: frames as ``module.function``, outermost first; types in the order of their creation.

    The functions are pairs of a module and a name.
    """

    controller: list[str]
    process: list[str]
    types: list[str]
    payload: list[str]
    functions: set[tuple[str, str]]


class Recorder:
    """Records project frames, functions and types through ``sys.setprofile``, the frames when ``stop_at`` is called.

    Args:
        stop_at: a function in Python.
        whole_call: whether functions and types are recorded after that too.
    """

    def __init__(self, stop_at: Callable[..., Any], *, whole_call: bool) -> None:
        self.frames: list[str] = []
        self.types: list[str] = []
        self.functions: set[tuple[str, str]] = set()
        self._stop_at: CodeType = stop_at.__code__
        self._whole_call = whole_call

    def start(self) -> None:
        sys.setprofile(self._record)

    def stop(self) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        if not self.frames and frame.f_code is self._stop_at:
            self.frames = _project_frames(frame)
            if not self._whole_call:
                self.stop()
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        generated = code.co_name.startswith("<") or code.co_filename.startswith("<")  # expressions, dataclasses
        if _is_ours(module) and not generated and not f"{module}.".startswith(PAYLOAD):
            self.functions.add((module, code.co_qualname))
        created = _created_type(frame)
        if created is not None and created not in self.types:
            self.types.append(created)


class Counted(ActorRolloutRefWorker):
    """An actor that records its next call up to Megatron's forward."""

    @register(Dispatch.ONE_TO_ALL)
    def start_count(self) -> None:
        from megatron.core.models.gpt import GPTModel

        self.recorder = Recorder(GPTModel.forward, whole_call=False)
        self.recorder.start()

    @register(Dispatch.ONE_TO_ALL)
    def get_count(self) -> tuple[list[str], list[str], set[tuple[str, str]]]:
        self.recorder.stop()
        return self.recorder.frames, self.recorder.types, self.recorder.functions


def count_call() -> Count:
    """Run one ``compute_log_prob`` on a group of one rank; needs a Ray cluster."""
    config = load_config(
        ActorConfig,
        {
            "model": MODEL,
            "optim": OPTIM,
            "rollout": {"prompt_length": PROMPT, "response_length": RESPONSE},
            "ppo_mini_batch_size": 8,
            "ppo_micro_batch_size": 2,
        },
    )
    with (
        RayResourcePool([1], use_gpu=False, warm_start=False) as pool,
        MegatronRayWorkerGroup(pool, RayClassWithInitArgs(Counted, config), name_prefix="actor") as group,
    ):
        group.init_model()
        batch = experience(4)
        group.compute_log_prob(batch)  # plans and what else is cached after a first call
        group.start_count()
        controller = Recorder(send_frames, whole_call=True)
        controller.start()
        group.compute_log_prob(batch)
        controller.stop()
        [(frames, types, functions)] = group.get_count()
    created = list(dict.fromkeys([*controller.types, *types]))
    carriers = [name for name in created if not name.startswith(PAYLOAD)]
    payload = [name for name in created if name.startswith(PAYLOAD)]
    return Count(controller.frames, frames, carriers, payload, controller.functions | functions)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _project_frames(frame: FrameType) -> list[str]:
    frames: list[str] = []
    outer: FrameType | None = frame
    while outer is not None:
        module = outer.f_globals.get("__name__", "")
        if _is_ours(module):
            frames.append(f"{module}.{outer.f_code.co_qualname}")
        outer = outer.f_back
    return frames[::-1]


def _created_type(frame: FrameType) -> str | None:
    """The class that a constructor's frame creates; None for other frames, and for classes of other projects."""
    code = frame.f_code
    if code.co_name not in ("__init__", "__new__", "<lambda>") or not code.co_argcount:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    if code.co_name == "<lambda>" and code.co_varnames[0] != "_cls":  # the constructor of a NamedTuple
        return None
    cls = first if isinstance(first, type) else type(first)
    return f"{cls.__module__}.{cls.__qualname__}" if _is_ours(cls.__module__) else None


def main() -> None:
    import ray

    from tests import count_call as module  # the worker process imports the class from there

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=200_000_000, logging_level="ERROR")
    count = module.count_call()
    ray.shutdown()
    lines = [f"{len(count.controller) + len(count.process)} frames", "controller:"]
    lines += [f"  {frame}" for frame in count.controller]
    lines += ["worker process:", *(f"  {frame}" for frame in count.process)]
    lines += [f"{len(count.types)} types", *(f"  {name}" for name in count.types)]
    lines += ["payload, not counted:", *(f"  {name}" for name in count.payload)]
    for packages in (PACKAGES, ("mcontroller",)):
        found = [(module, name) for module, name in sorted(count.functions) if module.partition(".")[0] in packages]
        lines.append(f"{len(found)} functions in {len({module for module, _ in found})} files of {', '.join(packages)}")
    lines += [f"  {module}.{name}" for module, name in found]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
