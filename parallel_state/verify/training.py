"""Training of one rank, as Megatron trains: its schedule, data parallelism, finalized gradients and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parallel_state.verify.layouts import Variant, parallel_arguments
from parallel_state.verify.program import Program, VerifyError
from parallel_state.verify.seeds import InitialPart, initial_parts
from parallel_state.verify.weights import ModelTensors, NamedTensor, named_tensors

LEARNING_RATE = 0.1
ADAM_EPS = 1.0  # an update is in proportion to its gradient: with a small value, it jumps where the gradient is 0


@dataclasses.dataclass
class StepValues:
    """What one step computed on this rank.

    Attributes:
        gradients: the finalized gradient of each parameter and the range of its elements that this rank has, in the
            order of ``Training.named``; None for buffers.
        losses: reported value by name, averaged as Megatron's training loop does; empty but on the last stage.
        scores: computed value of each row by name, on the last stage, and the range of rows that this rank has.
    """

    gradients: list[tuple[torch.Tensor, slice] | None]
    losses: dict[str, float]
    scores: dict[str, tuple[torch.Tensor, slice]] = dataclasses.field(default_factory=dict)


def config_for(program: Program, variant: Variant, dtype: torch.dtype, *, is_random: bool = False) -> Any:
    """Return the program's config for a layout.

    Args:
        program: the program.
        variant: the layout.
        dtype: of the weights.
        is_random: whether the program may draw random numbers.

    Raises:
        VerifyError: the program ignores the layout, or draws random numbers and must not.
    """
    arguments = parallel_arguments(variant, dtype)
    try:
        config = program.config(**arguments)
    except (AssertionError, ValueError) as error:
        raise VerifyError(f"layout {variant.text!r} does not fit the model: {error}", layout=variant.text) from error
    _check_stages(config, variant)
    for name, value in arguments.items():
        if getattr(config, name) != value:
            raise VerifyError(
                f"the config has {name}={getattr(config, name)!r} in the layout {variant.text!r}, which asks for "
                f"{value!r}; pass the arguments of the function config on to TransformerConfig",
                field=name,
            )
    for name in () if is_random else ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"):
        if getattr(config, name, None):
            raise VerifyError(
                f"{name} is {getattr(config, name)}: every layout draws other numbers; set it to 0", field=name
            )
    return config


def _check_stages(config: Any, variant: Variant) -> None:
    stages = variant.layout.pp * (variant.layout.vpp or 1)
    uneven = (
        "pipeline_model_parallel_layout",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    )
    if config.num_layers % stages and all(getattr(config, name, None) is None for name in uneven):
        raise VerifyError(
            f"layout {variant.text!r} does not fit: {config.num_layers} layers are not divisible into {stages} stages; "
            "set num_layers",
            layout=variant.text,
        )


class Training:
    """The model and the optimizer of this rank.

    Args:
        program: the program.
        variant: the layout that the rank is a part of.
        dtype: the type of the weights.
        start: weights and buffers of the whole model; None to keep those of the program.

    Attributes:
        models: the chunks of the model.
        named: their parameters and buffers.
        initial: what the program initialized the parameters with.
    """

    def __init__(self, program: Program, variant: Variant, dtype: torch.dtype, start: ModelTensors | None) -> None:
        self.program, self.variant = program, variant
        self.config = config_for(program, variant, dtype)
        self.models = self.build()
        self.named = named_tensors(self.models)
        self.initial: dict[str, InitialPart] = {}
        if start is not None:
            self.initial = initial_parts(self.named, start)
            for parameter in self.named:
                parameter.tensor.detach().copy_(parameter.of(start))
        self.optimizer = self.make_optimizer()

    def _check_inputs(self, model: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Check the tokens, positions and labels that a model gets; a hook of its forward pass."""
        merges_itself = self.variant.merged > 1 and self.program.merge is not None
        packed = keywords.get("packed_seq_params") is not None
        if merges_itself or packed or getattr(self.config, "variable_seq_lengths", False):
            return
        inputs = dict(zip(("input_ids", "position_ids"), arguments, strict=False)) | keywords
        checked = ("input_ids", "labels", "position_ids")
        known: dict[str, Any] = {name: inputs[name] for name in checked if name in inputs}
        rows = self.program.micro_batch_size * self.variant.merged
        self.program.check_inputs(rows, self.variant.layout.cp, known)

    def build(self) -> list[torch.nn.Module]:
        """Return the chunks of the model, with the program's weights."""
        from megatron.core import tensor_parallel

        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        models = list(self._stages())
        return [model.bfloat16() for model in models] if self.config.bf16 else models

    def make_optimizer(self) -> Any:
        """Return the optimizer of the chunks, after they are wrapped to be trained."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.transformer.module import Float16Module

        distributed = self.variant.distributed_optimizer
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=self.config.bf16)
        models = [Float16Module(self.config, model) for model in self.models] if self.config.bf16 else self.models
        self._wrapped = [DistributedDataParallel(self.config, ddp, model) for model in models]
        optimizer = _optimizer(self._wrapped, distributed, self.config)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = optimizer.scale_loss
        return optimizer

    def _stages(self) -> Iterator[Any]:
        from megatron.core import parallel_state as mpu

        for index in range(self.variant.layout.vpp or 1):
            stage = index if self.variant.layout.vpp else None
            first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
            last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
            model = self.program.model_provider(self.config, first, last, stage)
            if not isinstance(model, torch.nn.Module):
                raise VerifyError(f"model_provider returned {type(model).__name__}; expected a torch.nn.Module")
            yield model

    def micro_batches(self, step: int) -> range:
        """Return the global indices of this rank's micro-batches in a step."""
        from megatron.core import parallel_state as mpu

        count = self.program.micro_batches // mpu.get_data_parallel_world_size()  # before they are merged
        first = step * self.program.micro_batches + mpu.get_data_parallel_rank() * count
        return range(first, first + count)

    def forward_backward(self, step: int) -> StepValues:
        """Compute the gradients of a step, counted from 0."""
        hooks = [model.register_forward_pre_hook(self._check_inputs, with_kwargs=True) for model in self._wrapped]
        reports = self.run_schedule(step)
        for hook in hooks:
            hook.remove()
        return StepValues(self.gradients(), _mean_reports(reports))

    def batches(self, parts: Sequence[range]) -> Iterator[Any]:
        """Return the micro-batches of some indices, each part merged into one."""
        return iter([self.program.merged_batch(part) for part in parts])

    def run_schedule(self, step: int) -> list[dict[str, Any]] | None:
        """Run Megatron's schedule of a step, counted from 0; return what the loss reports of each micro-batch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        program, indices, merged = self.program, self.micro_batches(step), self.variant.merged
        parts = [indices[start : start + merged] for start in range(0, len(indices), merged)]
        for wrapped in self._wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = [self.batches(parts) for _ in self._wrapped]
        interleaved = self.variant.layout.vpp is not None
        reports: list[dict[str, Any]] | None = get_forward_backward_func()(
            forward_step_func=program.forward_step,
            data_iterator=data if interleaved else data[0],
            model=self._wrapped if interleaved else self._wrapped[0],
            num_microbatches=len(parts),
            seq_length=program.seq_length,
            micro_batch_size=program.micro_batch_size * merged,
            forward_only=False,
        )
        return reports

    def update(self, step: int) -> dict[str, float]:
        """Make a step of the optimizer, counted from 0; return the gradient norm first, and what else it reports."""
        _, norm, _ = self.optimizer.step()
        return {"of all parameters": float(norm)}

    def gradients(self) -> list[tuple[torch.Tensor, slice] | None]:
        """Return the finalized gradients, as ``StepValues`` has them."""
        return [self._gradient(parameter) for parameter in self.named]

    def _gradient(self, named: NamedTensor) -> tuple[torch.Tensor, slice] | None:
        """Return the gradient of a parameter, flat, and the range of elements that this rank has the sums of."""
        if not isinstance(named.tensor, torch.nn.Parameter) or not named.tensor.requires_grad:
            return None
        flat = named.tensor.main_grad.reshape(-1)  # type: ignore[attr-defined]
        if not self.variant.distributed_optimizer:
            return flat, slice(0, flat.numel())
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            ranges = getattr(optimizer, "model_param_gbuf_map", {})
            if named.tensor in ranges:
                of_param = optimizer._get_model_param_range_map(named.tensor)["param"]
                return flat[of_param.start : of_param.end], slice(of_param.start, of_param.end)
        return flat[:0], slice(0, 0)


def training_of(program: Program, variant: Variant, dtype: torch.dtype, start: ModelTensors | None) -> Training:
    """Return what trains this rank of a program, with the arguments of ``Training``."""
    training: Training = (program.trained_by or Training)(program, variant, dtype, start)
    return training


def _optimizer(wrapped: list[Any], distributed: bool, model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        adam_eps=ADAM_EPS,
        weight_decay=0.0,
        clip_grad=1.0,
        use_distributed_optimizer=distributed,
        bf16=model.bf16,
        fp16=False,
        params_dtype=model.params_dtype,
    )
    return get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)


def _mean_reports(reports: list[dict[str, Any]] | None) -> dict[str, float]:
    """Return the reported values as Megatron's ``train_step`` averages them.

    A value of two elements is a sum and its count, over all data; another one is a mean over the rank's micro-batches.
    """
    from megatron.core import parallel_state as mpu

    means: dict[str, float] = {}
    for name in reports[0] if reports else ():
        values = torch.stack([torch.as_tensor(report[name]).detach().double().reshape(-1) for report in reports or ()])
        total = values.sum(0)
        if total.numel() == 2:
            torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
            means[name] = float(total[0] / total[1])
        else:
            means[name] = float(values.mean())
    return means
