"""Adam with the interface of the fused GPU optimizers that Megatron expects.

With Transformer Engine's or Apex's ``FusedAdam``, Megatron keeps the step in the parameter group, and only ``exp_avg``
and ``exp_avg_sq`` in a parameter's state. With PyTorch's AdamW, it cannot load a checkpoint of the distributed
optimizer (megatron-core 0.16). With this optimizer, Megatron runs the same code with and without Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam by torch's fused kernel: one pass over each parameter, without temporaries of its size.

    Args:
        params: parameters, or parameter groups, as for any torch optimizer.
        lr: learning rate.
        bias_correction: must be True.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        adam_w_mode: whether weight decay is decoupled (Loshchilov and Hutter, arXiv:1711.05101).
        weight_decay: weight decay.
        fused_only: arguments of the GPU kernels, ignored.

    Raises:
        ValueError: ``bias_correction=False``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **fused_only: Any,
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction=False is not supported; expected True")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            states = [self._state_of(param) for param in params]
            self._update(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(group["step"] - 1.0, device=param.device) for param in params],  # the update adds 1
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state
