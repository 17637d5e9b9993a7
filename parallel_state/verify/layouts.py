"""Layouts that are verified: their text, their arguments for Megatron, and those that fit a program."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from parallel_state.errors import LayoutError
from parallel_state.layout import ParallelLayout
from parallel_state.verify.program import Program, VerifyError

_SIZES = ("tp", "pp", "cp", "dp", "ep", "etp", "vpp", "mbs")
_FLAGS = ("sp", "distopt")


@dataclass(frozen=True, slots=True)
class Variant:
    """A layout with what Megatron does in it beside the axes.

    Attributes:
        text: as the user wrote it, such as ``"tp=2,sp"``.
        layout: the axes.
        sequence_parallel: whether tensor-parallel ranks divide the sequence between their layers.
        distributed_optimizer: whether data-parallel ranks divide the optimizer's state.
        merged: the number of the program's micro-batches that are merged into one.
    """

    text: str
    layout: ParallelLayout
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    merged: int = 1


ONE_PROCESS = Variant("one process", ParallelLayout(1))
"""The reference."""


def parse_layout(text: str) -> Variant:
    """Return the layout of a text such as ``"tp=2,pp=2,dp=2,distopt"``, with the fewest ranks that it allows.

    Raises:
        VerifyError: an unknown axis or flag, a size that is no number, or a layout that Megatron cannot have.
    """
    sizes: dict[str, int] = {}
    flags = set()
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, separator, size = part.partition("=")
        if (name not in _SIZES) if separator else (name not in _FLAGS):
            close = difflib.get_close_matches(name, [*_SIZES, *_FLAGS], n=1)
            hint = f"; did you mean {close[0]}?" if close and close[0] != name else ""
            raise VerifyError(
                f"layout {text!r}: {part!r} is not one of {'=N, '.join(_SIZES)}=N, {', '.join(_FLAGS)}{hint}", text=text
            )
        if name in sizes or name in flags:
            raise VerifyError(f"layout {text!r} names {name} twice; leave one out", text=text)
        if not separator:
            flags.add(name)
        elif not size.isdecimal() or not int(size):
            raise VerifyError(f"layout {text!r}: {name} is {size!r}; expected a number of at least 1", text=text)
        else:
            sizes[name] = int(size)
    if "sp" in flags and sizes.get("tp", 1) == 1:
        raise VerifyError(f"layout {text!r}: sp divides the sequence over tp ranks, and tp is 1; add tp=2", text=text)
    merged = sizes.pop("mbs", 1)
    return Variant(text, _smallest(text, sizes), "sp" in flags, "distopt" in flags, merged)


def _smallest(text: str, sizes: dict[str, int]) -> ParallelLayout:
    """Return the layout with the given dp, or with the smallest that the other axes allow."""
    axes: dict[str, Any] = {name: size for name, size in sizes.items() if name != "dp"}
    tp, pp, cp, ep = (sizes.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    dense, experts = tp * pp * cp, sizes.get("etp", tp) * ep * pp
    try:
        return ParallelLayout(dense * sizes["dp"] if "dp" in sizes else math.lcm(dense, experts), **axes)
    except LayoutError as error:
        raise VerifyError(f"layout {text!r}: {error}", text=text) from error


def parallel_arguments(variant: Variant, dtype: Any) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that follow from a layout."""
    layout = variant.layout
    arguments: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": variant.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    if layout.ep > 1 or layout.etp is not None:
        arguments |= {
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.tp if layout.etp is None else layout.etp,
        }
    if layout.vpp is not None:
        # Megatron sends a batch of stages only to different ranks; with pp=2 both neighbours are the same rank.
        arguments |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return arguments


def check_divisible(program: Program, variant: Variant) -> None:
    """Raise if a program cannot be divided as a layout asks.

    Raises:
        VerifyError: with the numbers.
    """
    layout, length, rows = variant.layout, program.seq_length, program.micro_batches // variant.merged
    parts = layout.tp if variant.sequence_parallel else 1
    pieces = 2 * layout.cp * parts if layout.cp > 1 else parts
    reason = ""
    if program.micro_batches % variant.merged:
        reason = f"{program.micro_batches} micro-batches cannot be merged by mbs={variant.merged}; set micro_batches"
    elif rows % layout.dp:
        reason = f"{rows} micro-batches are not divisible by dp={layout.dp}; set micro_batches"
    elif layout.vpp is not None and rows // layout.dp % layout.pp:
        reason = (
            f"interleaved stages need a multiple of pp={layout.pp} micro-batches on each data-parallel rank, and "
            f"have {rows // layout.dp}; set micro_batches"
        )
    elif length % pieces:
        reason = f"rows of {length} tokens are not divisible into {pieces} pieces; set seq_length"
    if reason:
        raise VerifyError(f"layout {variant.text!r} does not fit: {reason}", layout=variant.text)


def default_layouts(config: Any) -> list[str]:
    """Return the smallest layouts that have every axis of a model, alone and in pairs."""
    dense = [
        "tp=2", "tp=2,sp", "pp=2", "pp=2,vpp=2", "cp=2", "dp=2", "dp=2,distopt", "mbs=2", "dp=2,mbs=2",
        "tp=2,pp=2,sp", "tp=2,cp=2", "tp=2,dp=2,sp,distopt", "pp=2,cp=2", "cp=2,dp=2,distopt",
    ]  # fmt: skip
    if config.num_moe_experts is None:
        return dense
    experts = ["ep=2", "ep=2,distopt", "tp=2,ep=2,etp=1,sp", "tp=2,ep=2,sp", "cp=2,ep=2", "pp=2,ep=2"]
    return [text for text in dense if "tp=2" not in text or "sp" in text] + experts


def all_layouts(config: Any, most_ranks: int) -> Iterator[str]:
    """Yield the texts of all layouts of powers of two up to a number of ranks, with every flag that applies to them."""
    powers = [1 << index for index in range(most_ranks.bit_length()) if 1 << index <= most_ranks]
    experts = config.num_moe_experts
    for tp, pp, cp, dp in itertools.product(powers, repeat=4):
        if not 1 < tp * pp * cp * dp <= most_ranks:
            continue
        sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
        for ep in (
            power for power in powers if power == 1 or (experts and experts % power == 0 and power <= tp * cp * dp)
        ):
            base = ",".join(f"{name}={size}" for name, size in (sizes | {"ep": ep}).items() if size > 1)
            if ep > 1 and tp > 1:
                base += ",etp=1"
            yield from (base + flags for flags in _flags(tp, pp, cp * dp, bool(experts)))


def _flags(tp: int, pp: int, replicas: int, experts: bool) -> Iterator[str]:
    for sp in ((",sp",) if experts else ("", ",sp")) if tp > 1 else ("",):
        yield sp
        if replicas > 1:
            yield f"{sp},distopt"
        if pp > 1:
            yield f"{sp},vpp=2"
