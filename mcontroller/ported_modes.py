"""The functions of the predefined modes by the names that ported custom modes build on.

``mcontroller.get_predefined_dispatch_fn`` returns the same functions by mode.
"""

from __future__ import annotations

from mcontroller.dispatch.modes import Dispatch
from mcontroller.mode_functions import get_predefined_dispatch_fn

__all__ = [
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_megatron_compute",
    "collect_megatron_compute_data_proto",
    "collect_megatron_pp_as_dp",
    "collect_megatron_pp_as_dp_data_proto",
    "collect_megatron_pp_only",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_megatron_compute",
    "dispatch_megatron_compute_data_proto",
    "dispatch_megatron_pp_as_dp",
    "dispatch_megatron_pp_as_dp_data_proto",
    "dispatch_one_to_all",
]

dispatch_one_to_all = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"]
dispatch_all_to_all = get_predefined_dispatch_fn(Dispatch.ALL_TO_ALL)["dispatch_fn"]
dispatch_megatron_compute, collect_megatron_compute = get_predefined_dispatch_fn(Dispatch.MEGATRON_COMPUTE).values()
dispatch_megatron_compute_data_proto, collect_megatron_compute_data_proto = get_predefined_dispatch_fn(
    Dispatch.MEGATRON_COMPUTE_PROTO
).values()
dispatch_megatron_pp_as_dp, collect_megatron_pp_as_dp = get_predefined_dispatch_fn(Dispatch.MEGATRON_PP_AS_DP).values()
dispatch_megatron_pp_as_dp_data_proto, collect_megatron_pp_as_dp_data_proto = get_predefined_dispatch_fn(
    Dispatch.MEGATRON_PP_AS_DP_PROTO
).values()
collect_megatron_pp_only = get_predefined_dispatch_fn(Dispatch.MEGATRON_PP_ONLY)["collect_fn"]
dispatch_dp_compute, collect_dp_compute = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE).values()
dispatch_dp_compute_data_proto, collect_dp_compute_data_proto = get_predefined_dispatch_fn(
    Dispatch.DP_COMPUTE_PROTO
).values()
dispatch_dp_compute_data_proto_with_func = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)[
    "dispatch_fn"
]
