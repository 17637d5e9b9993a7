"""The bounds of packed rows, on the device and on the host."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's parameters of packed rows, with the bounds as numbers, so that no layer reads them from the device.

    Attributes:
        bounds: the start of every row, and last the end of the sequence.
    """

    bounds: tuple[int, ...] = ()


def bounds_on_host(packed: PackedSeqParams) -> tuple[int, ...]:
    """Return the bounds of the rows, with their padding; the host waits for the device if only that has them."""
    if isinstance(packed, PackedRows):
        return packed.bounds
    padded = packed.cu_seqlens_q_padded
    return tuple((packed.cu_seqlens_q if padded is None else padded).tolist())
