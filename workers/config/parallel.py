"""ParallelConfig: the layout of one role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mcontroller.config.fields import strict_fields
from mcontroller.errors import ConfigError
from parallel_state import ParallelLayout

_DP = "dp follows from the world size: dp = world size / (tp x cp x pp); leave it out"

_MEGATRON_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}


@strict_fields
@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the axes of one role; dp is the world size divided by the others."""

    field_hints: ClassVar[Mapping[str, str]] = {
        "dp": _DP,
        "edp": "edp follows from the world size: edp = world size / (etp x ep x pp); leave it out",
        "data_parallel_size": _DP,
        "tensor_model_parallel_size": "did you mean tp?",
        "pipeline_model_parallel_size": "did you mean pp?",
        "context_parallel_size": "did you mean cp?",
        "expert_model_parallel_size": "did you mean ep?",
    }

    tp: int = 1
    """[ranks] Tensor parallelism: ranks that share each layer's matrices."""
    pp: int = 1
    """[ranks] Pipeline parallelism: stages that the layers are divided into."""
    cp: int = 1
    """[ranks] Context parallelism: ranks that share each sequence."""
    ep: int = 1
    """[ranks] Expert parallelism: ranks that the experts of a layer are divided over."""
    etp: int | None = None
    """[ranks] Tensor parallelism inside experts. None: the same as tp."""
    vpp: int | None = None
    """[chunks] Model chunks of each pipeline stage, for the interleaved schedule. None: one, without interleaving."""
    order: str = "tp-cp-ep-dp-pp"
    """Megatron's order of the axes over the ranks, fastest first, joined by ``-``."""
    sequence_parallel: bool = False
    """Divide activations outside attention and MLP along the sequence over tp. Experts with tp > 1 require it."""

    @classmethod
    def from_megatron_args(cls, args: Any) -> ParallelConfig:
        """Return the layout of Megatron-LM's arguments, or of a TransformerConfig.

        Args:
            args: with Megatron's names, such as ``tensor_model_parallel_size``. Axes that it does not have are 1.
                Virtual stages are taken as Megatron-LM's ``validate_args`` has computed them.

        Raises:
            ConfigError: virtual stages are given in layers, and were not converted to a number of stages.
        """
        sizes = {axis: getattr(args, name, None) for axis, name in _MEGATRON_NAMES.items()}
        sizes["tp"] = args.tensor_model_parallel_size  # every source has it; a dict has no attributes
        layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
        if sizes["vpp"] is None and layers is not None:
            raise ConfigError(
                f"num_layers_per_virtual_pipeline_stage is {layers}, but virtual_pipeline_model_parallel_size is not "
                "set: pass the arguments after Megatron-LM's validate_args",
                key="parallel.vpp",
                value=layers,
            )
        given = {axis: size for axis, size in sizes.items() if size is not None}
        stages_first = bool(getattr(args, "use_tp_pp_dp_mapping", False))
        order = "tp-cp-ep-pp-dp" if stages_first else "tp-cp-ep-dp-pp"
        return cls(**given, order=order, sequence_parallel=bool(getattr(args, "sequence_parallel", False)))

    def layout(self, world_size: int) -> ParallelLayout:
        """Return the axes over ``world_size`` ranks.

        Raises:
            LayoutError: the axes do not divide the world size; the message contains the arithmetic.
        """
        axes = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "order")}
        return ParallelLayout(world_size, **axes)
