"""Models, optimizers, schedules and checkpoints get the groups of their context; nothing reads Megatron's globals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection

from parallel_state.megatron import MegatronContext
from tests.forking import run_ranks
from tests.training import SMALL_GPT, new_context
from tests.workers.roles import MODEL, actor, critic, experience, own_shard
from workers.config import ParallelConfig
from workers.model.build import build_model

pytestmark = pytest.mark.processes

# From megatron-core 0.19 on, layers read these two from the globals, and have no parameter for them.
WITHOUT_PARAMETER = {"gtp_remat", "expt_gtp_remat"}
# Functions, as opposed to constructors, that read a group from the globals if they do not get one.
WITH_FALLBACK = ("schedules.py", "finalize_model_grads.py", "optimizer/__init__.py")


def record_global_groups() -> list[str]:
    """Patch what reads Megatron's global groups, in this process; return the list of the callers, which grows."""
    callers: list[str] = []

    def caller() -> str:
        code = sys._getframe(2).f_code
        return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}"

    collect = ProcessGroupCollection.use_mpu_process_groups

    def recorded_collection(required_pgs: list[str] | None = None) -> ProcessGroupCollection:
        if required_pgs is None or not WITHOUT_PARAMETER.issuperset(required_pgs):
            callers.append(caller())
        return collect(required_pgs)

    def recorded(getter: Callable[..., Any]) -> Callable[..., Any]:
        def group(*args: Any, **kwargs: Any) -> Any:
            name = caller()
            if name.endswith(":__init__") or name.partition(":")[0].endswith(WITH_FALLBACK):
                callers.append(name)
            return getter(*args, **kwargs)

        return group

    def of_collection(method: Callable[..., Any]) -> Callable[..., Any]:
        def groups(pg_collection: Any, *args: Any, **kwargs: Any) -> Any:
            if pg_collection is None:
                callers.append(caller())
            return method(pg_collection, *args, **kwargs)

        return groups

    for name in ("setup_process_groups_for_ddp", "setup_process_groups_for_optimizer"):
        setattr(ProcessGroupCollection, name, staticmethod(of_collection(getattr(ProcessGroupCollection, name))))
    for name, getter in list(vars(mpu).items()):
        if name.startswith("get_") and name.endswith("_group"):
            setattr(mpu, name, recorded(getter))
    ProcessGroupCollection.use_mpu_process_groups = staticmethod(recorded_collection)  # type: ignore[method-assign]
    return callers


def readers_of_globals(parallel: dict[str, Any], model: dict[str, Any], directory: str) -> list[str]:
    """Return who read Megatron's globals while an actor and a critic were built, trained, scored, saved and loaded."""
    optim = {"lr": 1e-2, "distributed_optimizer": True}
    context = MegatronContext.__init__

    def without_its_own_call(self: MegatronContext, *args: Any, **kwargs: Any) -> None:
        context(self, *args, **kwargs)
        callers.clear()  # a context collects its groups once, from the globals that it has just set

    MegatronContext.__init__ = without_its_own_call  # type: ignore[method-assign]
    callers = record_global_groups()
    worker = actor(parallel, "actor", model=MODEL | model, optim=optim)
    worker.update_actor(own_shard(experience(8), worker))
    worker.compute_log_prob(own_shard(experience(8), worker))
    worker.save_checkpoint(directory, 1)
    worker.load_checkpoint(directory)
    before = list(callers)
    critic(parallel, model=MODEL | model, optim=optim)
    return sorted({*before, *callers})


LAYOUTS = {
    "tp2-sp-pp2": ({"tp": 2, "sequence_parallel": True, "pp": 2}, {}),
    "ep2-pp2-vpp2": ({"ep": 2, "pp": 2, "vpp": 2}, {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_falls_back_to_megatrons_global_groups(layout: str, tmp_path: Path) -> None:
    parallel, model = LAYOUTS[layout]
    assert run_ranks(readers_of_globals, 4, parallel, model, str(tmp_path)) == [[]] * 4


def groups_of_a_provider() -> bool:
    """Whether a provider with a parameter for them gets the groups of its context, and others nothing."""
    context, collections = new_context(ParallelConfig()), []
    model = build_model(SMALL_GPT, ParallelConfig(), context)[0]

    def with_groups(
        pre_process: bool, post_process: bool, vp_stage: int | None, pg_collection: ProcessGroupCollection
    ) -> torch.nn.Module:
        collections.append(pg_collection)
        return model

    def without(pre_process: bool, post_process: bool, vp_stage: int | None) -> torch.nn.Module:
        return model

    for provider in (with_groups, without):
        build_model(SMALL_GPT, ParallelConfig(), context, model_provider=provider)
    return collections == [context.pg]


def test_a_model_provider_gets_the_groups_if_it_has_a_parameter_for_them() -> None:
    assert run_ranks(groups_of_a_provider, 1) == [True]
