"""What ranks communicated: every collective and transfer by axis, group, operation, bytes and line of code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from parallel_state.hangs.lines import calling_line, members_text
from parallel_state.simulated.calls import Call
from parallel_state.simulated.collectives import clones


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rank's part in a collective or a transfer.

    Attributes:
        rank: the global rank.
        operation: the name in torch.distributed, such as ``"all_reduce"`` or ``"send"``.
        axis: the axes that the members of the group differ on, such as ``"tp"`` or ``"dp-cp"``.
        group: the description of the group, such as Megatron's name of it.
        members: the global ranks of the group.
        nbytes: the bytes that the rank passed to the operation: its inputs; of a receive, what it received.
        line: the line of the program that made the call.
        through: the line of Megatron that called torch for it; None if the program did.
        inputs: copies of what the rank passed, if the trace keeps values.
        outputs: copies of what it received, if the trace keeps values and the operation is complete.
    """

    rank: int
    operation: str
    axis: str
    group: str
    members: tuple[int, ...]
    nbytes: int
    line: str
    through: str | None
    inputs: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)
    outputs: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)


class CommunicationTrace:
    """A list of transfers, in the order in which they were made.

    Pass one to ``run_ranks(..., trace=trace)``; then read it:

        assert len(trace.select(operation="all_reduce", axis="tp", rank=0)) == 1
        assert trace.select(axis="dp").nbytes <= 4 * parameters
        print(trace.table())

    Args:
        transfers: the transfers.
        values: whether to keep copies of what ranks pass to operations and receive.
    """

    def __init__(self, transfers: Iterable[Transfer] = (), *, values: bool = False) -> None:
        self._transfers = list(transfers)
        self._values = values
        self._pending: dict[Call, int] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers)

    def begin(self, call: Call) -> None:
        """Append the record of a call that begins."""
        if self._values:
            self._pending[call] = len(self._transfers)
        transfer = Transfer(
            rank=call.rank,
            operation=call.operation,
            axis=call.group.axis,
            group=call.group.label,
            members=call.group.ranks,
            nbytes=call.payload,
            line=call.line.line,
            through=call.line.through,
            inputs=tuple(clones(call.inputs)) if self._values else (),
        )
        self._transfers.append(transfer)

    def complete(self, call: Call) -> None:
        """Add copies of what a complete call received to its record, if values are kept."""
        index = self._pending.pop(call, None)
        if index is not None:
            self._transfers[index] = replace(self._transfers[index], outputs=tuple(clones(call.outputs or call.inputs)))

    def wait(self, call: Call) -> None:
        """Note that the program has waited for a call; a list of transfers has no use for it."""

    def clear(self) -> None:
        """Forget all transfers, to record the next part of a program alone."""
        self._transfers.clear()
        self._pending.clear()

    @property
    def nbytes(self) -> int:
        """The bytes of all transfers."""
        return sum(transfer.nbytes for transfer in self._transfers)

    def select(
        self,
        *,
        operation: str | None = None,
        axis: str | None = None,
        group: str | None = None,
        rank: int | None = None,
        line: str | None = None,
    ) -> CommunicationTrace:
        """Return the transfers that have all of these values.

        Args:
            operation: the operation.
            axis: the axes, such as ``"tp"``.
            group: the description of the group.
            rank: the global rank.
            line: a part of the line of the program or of Megatron's, such as a file or a function.
        """
        return CommunicationTrace(
            transfer
            for transfer in self._transfers
            if operation in (None, transfer.operation)
            and axis in (None, transfer.axis)
            and group in (None, transfer.group)
            and rank in (None, transfer.rank)
            and (line is None or line in transfer.line or line in (transfer.through or ""))
        )

    def table(self) -> str:
        """Return calls and bytes by axis, operation and group, the most bytes first."""
        calls: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for transfer in self._transfers:
            row = (transfer.axis or "-", transfer.operation, transfer.group)
            calls[row] += 1
            sizes[row] += transfer.nbytes
        lines = [f"{'axis':12}{'operation':24}{'calls':>8}{'bytes':>14}  group"]
        for row in sorted(calls, key=lambda call: (-sizes[call], call)):
            lines.append(f"{row[0]:12}{row[1]:24}{calls[row]:>8}{sizes[row]:>14}  {row[2]}")
        return "\n".join(lines)

    def lines(self) -> str:
        """Return one line of text for each transfer."""
        return "\n".join(
            f"rank {transfer.rank}: {transfer.operation} {transfer.nbytes} bytes over {transfer.axis or '-'} "
            f"{transfer.group} {members_text(transfer.members)} at {transfer.line}"
            for transfer in self._transfers
        )


class LinesOfOperations(TorchFunctionMode):
    """A context in which torch's operations keep the line that called them, for ``line_of_operation``.

    It is in this package, whose frames are left out of the lines of collectives: it calls all operations.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and write the line on the operations that it leaves in autograd's graph."""
        result = func(*args, **(kwargs or {}))
        left: list[Any] = [result.grad_fn] if isinstance(result, torch.Tensor) and result.grad_fn is not None else []
        line = calling_line() if left else None
        while left:
            node = left.pop()
            if line is not None and "line" not in node.metadata:
                node.metadata["line"] = line.through or line.line
                left += [following for following, _ in node.next_functions if following is not None]
        return result


def line_of_operation(node: Any) -> str:
    """Return the line that called an operation of autograd's graph, of Megatron if it did; empty if unknown."""
    return str(node.metadata.get("line", ""))
