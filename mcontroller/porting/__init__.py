"""Names and functions for ported workers: those of verl 0.4 that this project has under another name or not at all.

New code does not need them: docs/porting.md lists, for each, what this project uses instead. Everything that only
ported code uses is exported here, and `python -m mcontroller port` reports what is still to change. The functions of
the modes are in `mcontroller/mode_functions.py`, because they build on groups, and groups on this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel_state.lazy import lazy_exports

if TYPE_CHECKING:
    from mcontroller.mode_functions import collect_dp_compute as collect_dp_compute
    from mcontroller.mode_functions import collect_dp_compute_data_proto as collect_dp_compute_data_proto
    from mcontroller.mode_functions import collect_megatron_compute as collect_megatron_compute
    from mcontroller.mode_functions import (
        collect_megatron_compute_data_proto as collect_megatron_compute_data_proto,
    )
    from mcontroller.mode_functions import collect_megatron_pp_as_dp as collect_megatron_pp_as_dp
    from mcontroller.mode_functions import (
        collect_megatron_pp_as_dp_data_proto as collect_megatron_pp_as_dp_data_proto,
    )
    from mcontroller.mode_functions import collect_megatron_pp_only as collect_megatron_pp_only
    from mcontroller.mode_functions import dispatch_all_to_all as dispatch_all_to_all
    from mcontroller.mode_functions import dispatch_dp_compute as dispatch_dp_compute
    from mcontroller.mode_functions import dispatch_dp_compute_data_proto as dispatch_dp_compute_data_proto
    from mcontroller.mode_functions import (
        dispatch_dp_compute_data_proto_with_func as dispatch_dp_compute_data_proto_with_func,
    )
    from mcontroller.mode_functions import dispatch_megatron_compute as dispatch_megatron_compute
    from mcontroller.mode_functions import (
        dispatch_megatron_compute_data_proto as dispatch_megatron_compute_data_proto,
    )
    from mcontroller.mode_functions import dispatch_megatron_pp_as_dp as dispatch_megatron_pp_as_dp
    from mcontroller.mode_functions import (
        dispatch_megatron_pp_as_dp_data_proto as dispatch_megatron_pp_as_dp_data_proto,
    )
    from mcontroller.mode_functions import dispatch_one_to_all as dispatch_one_to_all
    from mcontroller.porting.gathering import all_gather_data_proto as all_gather_data_proto
    from mcontroller.porting.object_store import parallel_put as parallel_put
    from mcontroller.porting.sequence_lengths import ceildiv as ceildiv
    from mcontroller.porting.sequence_lengths import get_reverse_idx as get_reverse_idx
    from mcontroller.porting.sequence_lengths import get_seqlen_balanced_partitions as get_seqlen_balanced_partitions
    from mcontroller.porting.sequence_lengths import greedy_partition as greedy_partition
    from mcontroller.porting.sequence_lengths import karmarkar_karp as karmarkar_karp
    from mcontroller.porting.sequence_lengths import log_seqlen_unbalance as log_seqlen_unbalance
    from mcontroller.porting.sequence_lengths import rearrange_micro_batches as rearrange_micro_batches
    from mcontroller.porting.sequence_lengths import roundup_divisible as roundup_divisible
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
