"""The state of this process that simulated ranks may not change, to compare it before and after."""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d as c10d

_PATCHED = ("_new_process_group_helper", "rendezvous", "_warn_not_in_group", "_unregister_all_process_groups")


def state_of_this_process() -> dict[str, Any]:
    """Return threads, environment, random states, torch's and Megatron's globals, and functions, by name."""
    world = c10d._world
    megatron = {name: value for name, value in vars(parallel_state).items() if name.startswith("_")}
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "stack size of threads": threading.stack_size(),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "directory": os.getcwd(),
        "random": random.getstate(),
        "numpy.random": [str(part) for part in np.random.get_state()],
        "torch.random": torch.get_rng_state().tolist(),
        "random states of Megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
        "default device and dtype": (torch.get_default_device(), torch.get_default_dtype()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "threads of torch": torch.get_num_threads(),
        "default group": world.default_pg,
        "groups": [len(table) for table in (world.pg_map, world.pg_names, world.tags_to_pg, world.pg_group_ranks)],
        "count of groups": world.group_count,
        "megatron.core.parallel_state": {name: repr(value) for name, value in megatron.items()},
        "functions of torch": [getattr(c10d, name) for name in _PATCHED],
        "streams": torch.cuda.Stream.__new__,
        "functions of os": (os.fork, os.forkpty),
        "hooks": (sys.excepthook, threading.excepthook, list(sys.meta_path)),
    }
