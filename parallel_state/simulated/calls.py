"""What a rank can wait for: its part in a collective or a transfer, or keys of the store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_state.hangs.lines import SourceLine, call_text, group_label, group_text
from parallel_state.simulated.errors import KeyNotSet


@dataclass(eq=False, slots=True)
class SharedGroup:
    """What the members of a process group share.

    Attributes:
        name: the name that torch gave it, the same on all members.
        description: ``group_desc`` of ``new_group``; Megatron's name of the group.
        ranks: the global ranks of the members, by rank in the group.
        creator: the rank that created it first.
        line: the line that created it there.
        axis: the axes that its members differ on, such as ``"tp"`` or ``"dp-cp"``; empty if unknown.
        created_by: the members that have created it.
        last_calls: the last collective of each member, by global rank.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    creator: int
    line: SourceLine
    axis: str = ""
    created_by: set[int] = field(default_factory=set)
    last_calls: dict[int, Call] = field(default_factory=dict)

    def __str__(self) -> str:
        return group_text(self.name, self.description, self.ranks, self.axis)

    @property
    def label(self) -> str:
        """The description, or the name if there is none."""
        return group_label(self.name, self.description)


def shape_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape, such as ``float32[4, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(eq=False, slots=True)
class Call:
    """One rank's part in a collective or a transfer.

    Attributes:
        operation: the name in torch.distributed.
        rank: the global rank.
        index: the rank in the group.
        group: the group.
        number: the number of the call among the collectives of the group; of a transfer, which of its route it is, as
            a negative number: -1 for the first.
        key: what must be equal on all members: reduction, root, sizes and dtypes.
        inputs: the tensors that are read; of a collective in place, also written.
        outputs: the tensors that are written.
        line: the line that made the call.
        options: what messages show and the computation needs: ``op``, ``root``, ``tag``, split sizes.
        peer: of a transfer, the global rank of the other side; None for any.
        done: whether it is complete.
        is_async: whether the program goes on without waiting.
        waited: whether the program has waited for it.
        guarded: copies of the tensors that an asynchronous call uses, to find changes before the wait.
    """

    operation: str
    rank: int
    index: int
    group: SharedGroup
    number: int
    key: tuple[Any, ...]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    line: SourceLine
    options: dict[str, Any] = field(default_factory=dict)
    peer: int | None = None
    done: bool = False
    is_async: bool = False
    waited: bool = False
    guarded: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_transfer(self) -> bool:
        """Whether this is a send or a receive."""
        return self.number < 0

    @property
    def payload(self) -> int:
        """The bytes that this rank passes to the operation: its inputs, or what it receives."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.inputs or self.outputs)

    def __str__(self) -> str:
        details = [f"{name}={self.options[name]}" for name in ("op", "root", "tag", "sends", "receives")
                   if self.options.get(name) is not None]  # fmt: skip
        tensors = [shape_text(tensor) for tensor in self.inputs or self.outputs]
        return call_text(self.operation, tensors, details, str(self.group), self.number, self.peer)


@dataclass(eq=False, slots=True)
class KeyWait:
    """A rank that waits for keys of the store.

    Attributes:
        keys: the keys.
        line: the line of the program that waits.
        seconds: the timeout; if no rank can go on, the wait with the shortest ends.
        done: whether all of them are set.
        error: what the wait raises, if no rank will set them.
    """

    keys: Sequence[str]
    line: SourceLine
    seconds: float = math.inf  # of a rank that polls
    done: bool = False
    error: KeyNotSet | None = None

    def __str__(self) -> str:
        return f"store.wait({list(self.keys)})"
