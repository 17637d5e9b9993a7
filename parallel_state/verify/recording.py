"""The outputs of modules in one step, and the gradients of these outputs, by module and micro-batch."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_state.hangs.lines import path_text
from parallel_state.simulated import CommunicationTrace
from parallel_state.simulated.trace import line_of_operation

_LAYER = re.compile(r"(.*\blayers)\.(\d+)(.*)")

ModuleCall = tuple[str, int, int]
"""Module, micro-batch of the step, and number of the module's call for this micro-batch."""


@dataclass
class StepRecords:
    """What one rank computed in a step.

    Attributes:
        outputs: the first floating-point tensor that each call of a module returned, in the order of the returns.
        gradients: the gradients of these tensors.
        sources: module -> class, file and line of its ``forward``.
        began: the number of calls in the trace of the ranks when a module was called.
        ended: the same when the call began, and when it returned.
        computed: the same when the gradient of a call's output was computed.
        consumers: call -> the modules that got its output, in whose backward pass its gradient is computed, each with
            the operations that do it and their lines.
        containers: the names of the modules that contain all layers of a stage, whose output other stages do not have.
    """

    outputs: dict[ModuleCall, torch.Tensor] = field(default_factory=dict)
    gradients: dict[ModuleCall, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    began: dict[str, int] = field(default_factory=dict)
    ended: dict[ModuleCall, tuple[int, int]] = field(default_factory=dict)
    computed: dict[ModuleCall, int] = field(default_factory=dict)
    consumers: dict[ModuleCall, list[tuple[str, tuple[str, ...]]]] = field(default_factory=dict)
    containers: set[str] = field(default_factory=set)


def record_step(models: Sequence[torch.nn.Module], trace: CommunicationTrace) -> StepRecords:
    """Return records that fill as the chunks of a model run; call it right before the step.

    Args:
        models: the chunks.
        trace: the trace of the ranks.
    """
    records = StepRecords()
    for model in models:
        current = _MicroBatch(records, trace)
        model.register_forward_pre_hook(current.begin)
        for path, module in model.named_modules():
            name = module_name(model, path)
            records.sources[name] = source_of(module)
            if _has_layers(module):
                records.containers.add(name)
            module.register_forward_pre_hook(lambda _m, _i, name=name, current=current: current.enter(name))
            module.register_forward_hook(lambda _m, _i, output, name=name, current=current: current.add(name, output))
        model.register_forward_hook(current.end)
    return records


class _MicroBatch:
    """The micro-batch that a chunk computes; in a backward pass, that whose activations it computes again."""

    def __init__(self, records: StepRecords, trace: CommunicationTrace) -> None:
        self._records, self._trace = records, trace
        self._forward, self._backward, self._is_forward = -1, 0, False
        self._calls: Counter[tuple[str, int]] = Counter()
        self._last: torch.Tensor | None = None
        self._nodes: dict[Any, ModuleCall] = {}  # of the graph of autograd: what computed the output of a call

    def begin(self, *_: Any) -> None:
        self._forward += 1
        self._is_forward = True
        self._last, self._nodes = None, {}

    def end(self, *_: Any) -> None:
        self._is_forward = False

    def enter(self, name: str) -> None:
        self._records.began[name] = len(self._trace)

    def add(self, name: str, output: Any) -> None:
        values = list(output.values()) if isinstance(output, dict) else output
        values = values if isinstance(values, tuple | list) else [values]
        tensor = next(
            (value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None
        )
        if tensor is None:
            return
        index = self._forward if self._is_forward else self._backward
        call = name, index, self._calls[name, index]
        self._calls[name, index] += 1
        self._records.outputs[call] = tensor.detach().clone()
        self._records.ended[call] = self._records.began[name], len(self._trace)
        # not without gradients, as before a recomputation, nor for a module that returns what its last part returned
        if tensor.requires_grad and torch.is_grad_enabled() and tensor is not self._last:
            self._last = tensor
            tensor.register_hook(lambda gradient: self._add_gradient(call, gradient))  # type: ignore[no-untyped-call]
            if tensor.grad_fn is not None:  # else what another stage has sent
                self._add_consumer(name, tensor.grad_fn)
                self._nodes.setdefault(tensor.grad_fn, call)

    def _add_consumer(self, name: str, node: Any) -> None:
        """Add the operations between the output of a module and the outputs that it got."""
        nodes, producers, left = [node], set(), [node]
        while left:
            for following, _ in left.pop().next_functions:
                if following in self._nodes:
                    producers.add(self._nodes[following])
                elif following is not None and following not in nodes and "Accumulate" not in following.name():
                    nodes.append(following)
                    left.append(following)
        names: dict[str, list[str]] = {}  # of the operations of a line
        for output in nodes:
            names.setdefault(_line(output), []).append(re.sub(r"Backward\d*$", "", output.name()))
        operations = tuple(f"{', '.join(dict.fromkeys(of_line))}{line}" for line, of_line in names.items())
        for producer in producers:
            self._records.consumers.setdefault(producer, []).append((name, operations))

    def _add_gradient(self, call: ModuleCall, gradient: torch.Tensor) -> None:
        self._backward = call[1]
        self._records.gradients[call] = gradient.detach().clone()
        self._records.computed[call] = len(self._trace)


def _line(node: Any) -> str:
    """Return the line of an operation's backward pass if it is in Python, or else the line that called it."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        code = type(node)._forward_cls.backward.__code__  # type: ignore[attr-defined]
        return f" at {path_text(code.co_filename)}:{code.co_firstlineno} in backward"
    line = line_of_operation(node)
    return f" at {line}" if line else ""


def module_name(model: Any, path: str) -> str:
    """Return the name of a module, its layer counted over the whole model; the class for the model itself."""
    match = _LAYER.match(path)
    if match:
        number = getattr(model.get_submodule(f"{match[1]}.{match[2]}"), "layer_number", None)
        if isinstance(number, int):
            return f"{match[1]}.{number - 1}{match[3]}"
    return path or type(model).__name__


def _has_layers(module: torch.nn.Module) -> bool:
    lists = [child for child in module.modules() if isinstance(child, torch.nn.ModuleList)]
    return any(len(layers) and hasattr(layers[0], "layer_number") for layers in lists)


def source_of(module: torch.nn.Module) -> str:
    """Return the class of a module, and the file and line of its ``forward``."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return type(module).__name__
    return f"{type(module).__name__}, {path_text(code.co_filename)}:{code.co_firstlineno}"
