"""The routers of a model: what each chooses in a pass is recorded, or given to it.

Megatron's router asks an object for its choice of experts (``TopKRouter.router_replay``). Megatron's own object for
this, ``RouterReplay``, belongs to a list of all routers of a process, which all do the same. In this project every
model of a process has separate objects: recording one does not affect the reference, the copy for generation or the
critic.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from mcontroller.errors import ConfigError
from parallel_state.agreement import all_gather_values
from parallel_state.releases import release

NOT_RECORDED = -1
"""In place of every expert of a token for which none were recorded: its router chooses."""


class ModelRouters:
    """The routers of one model on this rank; the constructor is a collective over pp.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        pg: the process groups of their layout.

    Attributes:
        experts: number of experts of a layer.
        topk: number of experts that compute a token.
        layers: number of layers with experts in the whole model.
        local: for each router of this rank, in the order of the chunks, the index of its layer among the layers with
            experts.
        dtype: of the indices of experts: int8, or int16 if there are more than 128 experts.

    Raises:
        ConfigError: the model has no router of Megatron's.
    """

    def __init__(self, chunks: Sequence[nn.Module], pg: ProcessGroupCollection) -> None:
        self._pg = pg
        self._of_chunk: dict[int, list[_Router]] = {}
        for chunk in map(unwrap_model, chunks):
            named = ((name, module) for name, module in chunk.named_modules() if isinstance(module, TopKRouter))
            self._of_chunk[id(chunk)] = [_Router(*one) for one in named if not one[0].startswith("mtp.")]
        routers = [router for chunk_routers in self._of_chunk.values() for router in chunk_routers]
        numbers = sorted({number for stage in all_gather_values([r.layer for r in routers], pg.pp) for number in stage})
        if not numbers:
            raise ConfigError(
                "router_replay is set, and the model has no TopKRouter of Megatron's", key="router_replay"
            )
        config: Any = get_model_config(chunks[0])
        self.experts: int = config.num_moe_experts
        self.topk: int = config.moe_router_topk
        self.layers = len(numbers)
        self.local = [numbers.index(router.layer) for router in routers]
        self.dtype = torch.int8 if self.experts <= 128 else torch.int16

    def places(self, chunk: nn.Module) -> slice:
        """Return which of ``local`` are the routers of an unwrapped chunk."""
        start = 0
        for key, routers in self._of_chunk.items():
            if key == id(chunk):
                return slice(start, start + len(routers))
            start += len(routers)
        raise KeyError(f"a {type(chunk).__name__} that is no chunk of this model")

    @contextlib.contextmanager
    def in_pass(self, chunk: nn.Module, given: Tensor | None = None, *, again: bool = False) -> Iterator[list[Tensor]]:
        """Context manager of one pass through an unwrapped chunk, in which its routers choose the experts given.

        Its value is a list that has the choice of each of them at the end, int64 ``[tokens, topk]``.

        Args:
            chunk: the chunk.
            given: ``[tokens, routers of the chunk, topk]``; a token's router chooses if they are ``NOT_RECORDED``.
                None: routers choose.
            again: whether the backward pass may compute layers again, which must choose the same: they get the experts
                of the forward passes in their order, until ``forget``.

        Raises:
            ConfigError: a router has chosen without Megatron's ``router_replay``.
        """
        routers, chosen = self._of_chunk[id(chunk)], list[Tensor]()
        for index, router in enumerate(routers):
            router.choice.begin(None if given is None else given[:, index], again=again)
        try:
            yield chosen
        finally:
            ends = [router.choice.end() for router in routers]
        for router, end in zip(routers, ends, strict=True):
            if end is None:
                raise ConfigError(
                    f"router_replay is set, but {router.name}, a {router.kind} of megatron-core {release()}, "
                    "chose its experts without asking its router_replay, as Megatron's TopKRouter does from 0.16.1 on "
                    "if moe_router_fusion is off and its load balancing is none, aux_loss, seq_aux_loss or "
                    "global_aux_loss: set router_replay to none",
                    key="router_replay",
                )
            chosen.append(end)

    def forget(self) -> None:
        """End the backward passes; layers that were not computed again have experts left."""
        for routers in self._of_chunk.values():
            for router in routers:
                router.choice.again.clear()

    def largest(self, values: Tensor, *groups: dist.ProcessGroup) -> Tensor:
        """Return the largest of every element over the ranks of groups (a collective): what any of them recorded."""
        groups = tuple(group for group in groups if group.size() > 1)
        if not groups:
            return values
        sent = values if values.dtype == torch.int8 else values.int()  # there is no collective of int16
        for group in groups:
            dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
        return sent.to(values.dtype)

    def of_all_stages(self, local: Tensor) -> Tensor:
        """Return the experts of all layers ``[..., layers, topk]`` (a collective over pp).

        Args:
            local: the experts that this rank's routers chose, ``[..., routers, topk]``.
        """
        everything = local.new_full((*local.shape[:-2], self.layers, self.topk), NOT_RECORDED)
        everything[..., self.local, :] = local
        return self.largest(everything, self._pg.pp)


class _Router:
    """A router, and what it asks for its choice."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.kind, self.layer = name, type(module).__name__, int(module.layer_number)
        if not isinstance(getattr(module, "router_replay", None), _Choice):
            module.router_replay = _Choice()
        self.choice: _Choice = module.router_replay


class _Choice:
    """What a router asks for its choice, in place of Megatron's ``RouterReplay``."""

    def __init__(self) -> None:
        self.again: deque[Tensor] = deque()
        self.layer_number: int | None = None  # which Megatron sets
        self._in_pass = False
        self._given: Tensor | None = None
        self._chosen: Tensor | None = None

    def begin(self, given: Tensor | None, *, again: bool) -> None:
        self._in_pass, self._given, self._chosen = True, given, None
        if again and given is not None:
            self.again.append(given)

    def end(self) -> Tensor | None:
        chosen, self._in_pass, self._given, self._chosen = self._chosen, False, None, None
        return chosen

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts and their indices, both ``[tokens, topk]``.

        Outside of a pass, a layer is computed again for its backward pass: schedules run the backward passes of a chunk
        in the order of its forward passes.
        """
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self._given
        if not self._in_pass and self.again:
            given = self.again.popleft()
        if given is not None:
            chosen = torch.where(given != NOT_RECORDED, given.long(), chosen)
            values = scores.gather(1, chosen)
        if self._in_pass:
            self._chosen = chosen
        return values, chosen
