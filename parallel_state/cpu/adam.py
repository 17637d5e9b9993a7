"""Adam in the shape of the fused GPU optimizers that Megatron expects.

Megatron keeps the step in the parameter group and finds ``exp_avg`` and ``exp_avg_sq`` as a parameter's state when
the optimizer is Transformer Engine's or Apex's ``FusedAdam``; with PyTorch's AdamW in its place, a checkpoint of the
distributed optimizer cannot be loaded again (megatron-core 0.16). This one takes the GPU's path through Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam, with decoupled weight decay when ``adam_w_mode`` (Loshchilov and Hutter, arXiv:1711.05101).

    By torch's fused kernel: one pass over each parameter, without temporaries of its size.
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
        **fused_only: Any,  # what only a GPU kernel has a use for
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction=False: the CPU's Adam always corrects the bias of its moments")
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
                [torch.tensor(group["step"] - 1.0) for _ in params],  # counted up by the update itself
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
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state
