"""The arguments of vLLM's functions that engines call, of the version in ``constraints/vllm.txt``.

``signatures.json`` has them for tests without vLLM. To write it again, with the interpreter of ``make test-vllm``::

    .venv-vllm/bin/python tests/workers/generate/vllm/signatures.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")
SIGNATURES: dict[str, list[str]] = json.loads(_FILE.read_text())
"""Function -> the names of its arguments."""


def check_arguments(function: str, names: Iterable[str]) -> None:
    """Raise TypeError if vLLM's function has no argument of one of these names."""
    unknown = sorted(set(names) - set(SIGNATURES[function]))
    if unknown:
        raise TypeError(f"vLLM's {function} has no argument {', '.join(unknown)}")


def installed_signatures() -> dict[str, list[str]]:
    """Return ``SIGNATURES`` of the installed vLLM."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    methods = [AsyncLLM.generate, AsyncLLM.is_paused, AsyncLLM.resume_generation]
    methods += [AsyncMPClient.pause_scheduler_async]
    methods += [AsyncLLM.sleep, AsyncLLM.wake_up, AsyncLLM.collective_rpc, AsyncLLM.add_lora]
    return {
        "AsyncEngineArgs": sorted(field.name for field in dataclasses.fields(AsyncEngineArgs)),
        "SamplingParams": argument_names(SamplingParams),
        "LoRARequest": argument_names(LoRARequest),
        **{method.__qualname__: argument_names(method) for method in methods},
    }


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function, a method or a class."""
    return sorted(set(inspect.signature(function).parameters) - {"self"})


if __name__ == "__main__":
    lines = (f"  {json.dumps(name)}: {json.dumps(names)}" for name, names in installed_signatures().items())
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
