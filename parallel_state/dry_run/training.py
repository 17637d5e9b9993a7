"""One training step of a program on a rank whose device has no memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from parallel_state.dry_run.counting import CountingMode
from parallel_state.dry_run.one_layer import fields_of_one_layer
from parallel_state.dry_run.outcome import Use
from parallel_state.dry_run.transformer_engine import check_counted, workspace
from parallel_state.verify.layouts import Variant
from parallel_state.verify.program import Program
from parallel_state.verify.training import Training, config_for


class ShapeTraining(Training):
    """The model and the optimizer of this rank, without data; see ``Training``.

    Args:
        program: the program.
        variant: the layout.
        dtype: of the weights.
        mode: counts what the rank uses.
    """

    def __init__(self, program: Program, variant: Variant, dtype: torch.dtype, mode: CountingMode) -> None:
        self.program, self.variant, self._mode = program, variant, mode
        memory = mode.memory
        self.config = config_for(program, variant, dtype, is_random=True)
        check_counted(vars(self.config))
        memory.kind = "parameters"
        self.models = self.build()
        memory.kind = "optimizer"
        self.optimizer = self.make_optimizer()
        initialize_state(self.optimizer)
        for model in self._wrapped:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                memory.change_kind([buffer.grad_data], "gradients")
                memory.change_kind([buffer.param_data], "parameters")
        memory.kind = "activations"
        self._kept = workspace(self._wrapped) if mode.transformer_engine else []

    def build(self) -> list[torch.nn.Module]:
        """Return the chunks of the model on the device."""
        return [model.cuda() for model in super().build()]

    def step(self) -> None:
        """Make one step."""
        self.run_schedule(0)
        self._mode.memory.kind = "optimizer"
        self.optimizer.step()
        self._mode.memory.kind = "activations"

    def batches(self, parts: Sequence[range]) -> Iterator[Any]:
        """Yield micro-batches on the device, each made when the schedule takes it."""
        return (_on_device(self.program.merged_batch(part)) for part in parts)


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {name: _on_device(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_device, value))
    return value


def one_layer_a_stage(program: Program, variant: Variant) -> Program:
    """Return a program with the last layer of each stage, and as few micro-batches as the layout allows."""
    micro_batches = variant.layout.pp if variant.layout.vpp else 1

    def config(**parallel: Any) -> Any:
        made = program.config(**parallel)
        for name, value in fields_of_one_layer(vars(made), made.num_layers, variant.layout).items():
            setattr(made, name, value)
        return made

    return replace(program, config=config, micro_batches=micro_batches * variant.layout.dp * variant.merged)


def initialize_state(optimizer: Any) -> None:
    """Create the state of Megatron's optimizer, which else is created in its first step."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(one, "optimizer", None) is not None and getattr(one, "init_state_fn", None) is not None:
            one.init_state_fn(one.optimizer, one.config)


def train(program: Program, variant: Variant, dtype: torch.dtype, layers: str, mode: CountingMode) -> Use:
    """Build the model of this rank, make one step, and return what was used."""
    from parallel_state.megatron import MegatronContext

    mode.transformer_engine = layers == "transformer_engine"
    with MegatronContext(variant.layout).activate():
        training = ShapeTraining(program, variant, dtype, mode)
        idle = begin(mode)
        training.step()
        use = used(mode, idle, training.models)
    free(training.models)
    return use


def free(models: list[torch.nn.Module]) -> None:
    """Delete all attributes of modules, so that the models of many ranks do not stay in memory.

    A dispatcher of tokens keeps a tensor of its last step, whose graph has the weights' nodes, whose hooks have the
    model: a circle through C++ that no collection finds.
    """
    for module in [module for model in models for module in model.modules()]:
        vars(module).clear()


def begin(mode: CountingMode) -> dict[str, int]:
    """Return the bytes of each kind now, and begin to count."""
    mode.memory.reset_peak()
    mode.flops = 0
    return dict(mode.memory.by_kind)


def used(mode: CountingMode, idle: dict[str, int], models: list[torch.nn.Module]) -> Use:
    """Return what was used since ``begin``."""
    memory = mode.memory
    names = {id(module): name for model in models for name, module in model.named_modules()}
    module = "" if memory.module is None else type(memory.module).__name__
    if name := names.get(id(memory.module)):
        module = f"{name} ({module})"
    parameters = [parameter for model in models for parameter in model.parameters()]
    experts = [parameter for parameter in parameters if not getattr(parameter, "allreduce", True)]
    return Use(
        weights=sum(parameter.numel() for parameter in parameters),
        idle=idle,
        peak=memory.peak,
        by_kind=memory.peak_by_kind,
        module=module,
        line=memory.line,
        flops=mode.flops,
        read=dict(mode.read),
        experts=sum(parameter.numel() for parameter in experts),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        trained_experts=sum(parameter.numel() for parameter in experts if parameter.requires_grad),
        layers="transformer_engine" if mode.transformer_engine else "local",
    )
