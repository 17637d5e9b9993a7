"""The groups of a run: started in their pools, found by what they do, and which rows each rank of them gets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import ray
import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import GroupError
from mcontroller.group import GroupMethod, WorkerGroup
from mcontroller.ray.resource_pool import ResourcePoolManager
from trainer.columns import PROMPTS, STAGE_COLUMNS, TOKENS, columns
from trainer.config import PPOConfig
from trainer.reserved_memory import reserved_for_others
from trainer.roles import GroupSpec, Role, reads_reference, role_workers
from trainer.stages import Stages
from workers.columns import MINI_BATCHES
from workers.config import ActorConfig, RoleConfig
from workers.generate.engines import ROLLOUT_ENGINES

TRAINED = ("actor", "critic")
"""The names of the groups that have weights to save."""

NOTICE_SECONDS = 30.0
"""Time in which Ray notices that a node is gone; by default about 14 s."""


class RunGroups:
    """The groups of a run.

    Args:
        config: the configuration of the run.
        mapping: the worker class of every role.
        pools: the pools, and the pool of each role.
        group_cls: called with ``(pool, class with arguments, name_prefix=...)`` to start a group.
        stages: the stage ``start`` gets the seconds; its devices get the groups.
        starting: called with a description of what starts.

    Attributes:
        mapping: as passed.
        workers: the groups to start, the actor's first.
        by_name: the groups that have started.
    """

    def __init__(
        self,
        config: PPOConfig,
        mapping: Mapping[Role, Any],
        pools: ResourcePoolManager,
        group_cls: Callable[..., WorkerGroup],
        stages: Stages,
        starting: Callable[[str], None],
    ) -> None:
        self.workers = reserved_for_others(role_workers(config, mapping), pools, config.trainer.offload)
        check_engines_fit(self.workers, pools)
        self.by_name: dict[str, WorkerGroup] = {}
        self._pools, self._group_cls, self._stages, self._starting = pools, group_cls, stages, starting
        self.mapping, self._config, self._options = mapping, config, config.trainer
        self._lost: set[str] = set()
        self._reference_in_actor = Role.RefPolicy not in mapping and reads_reference(config, mapping)

    def start(self) -> None:
        """Start the group of every role in its pool, and build the models of all workers.

        Raises:
            ResourceError: the cluster does not have the resources of the pools; raised before any process starts.
        """
        self._pools.create_resource_pool()
        for worker in self.workers:
            self._start_group(worker)
        self._build_models(self.by_name.values())

    def restart(self, names: Iterable[str]) -> None:
        """Restart groups, and build their models; they have no weights of the run yet.

        Args:
            names: of the groups that are broken, or are to begin again.
        """
        groups = [self.by_name[name] for name in names]
        with self._stages("start"):
            self.end(groups)
            for group in groups:
                self._starting(f"restarting {group.name}")
                group.restart()
        self._build_models(groups)

    def _build_models(self, groups: Iterable[WorkerGroup]) -> None:
        """Build the models of groups; last, those of the group that generates: an engine takes what others leave."""
        for group in sorted(groups, key=lambda group: group is self.rollout):
            with self._stages("start", group.init_model):
                group.init_model()

    def broken(self) -> list[str]:
        """Return the names of the groups that are broken, or have lost a node and do not know it yet."""
        lost = self.lost_nodes()
        return [name for name, group in self.by_name.items() if group.broken is not None or lost & {*group.node_ids}]

    def lost_nodes(self) -> Set[str]:
        """Return Ray's ids of the nodes that groups have lost so far."""
        self._lost.update(*(group.lost_nodes for group in self.by_name.values()))
        return self._lost

    def end(self, groups: Iterable[WorkerGroup]) -> None:
        """End groups on lost nodes, so that they free their slots, and take spare bundles of other nodes.

        Without spare bundles, wait until Ray has noticed these losses: before, it would place bundles on a lost node.
        """
        lost = self.lost_nodes()
        for group in groups:
            if group.broken is None and lost & {*group.node_ids}:
                with contextlib.suppress(GroupError):
                    group.shutdown(0.0)
        for pool in self._pools.resource_pool_dict.values():
            pool.replace_lost(lost)
        end = time.monotonic() + (0.0 if self._pools.spare_bundles else NOTICE_SECONDS)
        while lost and time.monotonic() < end and lost & {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            time.sleep(0.1)

    def _start_group(self, worker: GroupSpec) -> None:
        pool = self._pools.get_resource_pool(worker.role)
        with self._stages("start"):
            self._starting(f"starting {worker.name}: {worker.init.cls.__name__}")
            group = self._group_cls(pool, worker.init, name_prefix=worker.name)
            if group.timeout is None and isinstance(worker.config, RoleConfig):
                group.timeout = worker.config.timeout_s
            self._stages.devices.add(group, pool)
        self.by_name[worker.name] = group

    def spec_of(self, group: WorkerGroup) -> GroupSpec:
        """Return the worker class and configuration that a group was started with."""
        return next(spec for spec in self.workers if self.by_name.get(spec.name) is group)

    def columns_unread(self, group: WorkerGroup) -> frozenset[str]:
        """Return the columns of ``STAGE_COLUMNS`` that the update of a group does not read: they are not sent."""
        spec = self.spec_of(group)
        read = spec.init.cls.columns_read(spec.config)
        return frozenset() if read is None else STAGE_COLUMNS - set(read)

    def updates_once(self, rows: int, n: int) -> bool:
        """Return whether the update makes one optimizer step, and only this step reads ``old_log_probs``.

        Args:
            rows: responses of the batch.
            n: responses to each prompt.
        """
        algorithm, actor = self._config.algorithm, self.spec_of(self.actor)
        if algorithm.kl_in_reward or algorithm.importance.is_on:
            return False
        return actor.init.cls.updates_once(actor.config, rows, n)

    @property
    def actor(self) -> WorkerGroup:
        """The group that is trained."""
        return self.by_name["actor"]

    @property
    def rollout(self) -> WorkerGroup:
        """The group that generates: the actor's, if no other does."""
        return self.by_name.get("rollout", self.actor)

    @property
    def critic(self) -> WorkerGroup | None:
        """The critic, if the run needs one."""
        return self.by_name.get("critic")

    @property
    def reference(self) -> WorkerGroup | None:
        """The group with the reference policy, if anything reads it."""
        return self.actor if self._reference_in_actor else self.by_name.get("ref")

    @property
    def reward_model(self) -> WorkerGroup | None:
        """The reward model, if there is one."""
        return self.by_name.get("reward")

    @contextlib.contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Profile the trained groups in a step, if ``trainer.profile`` has chosen it."""
        profile = self._options.profile
        groups = self.trained() if step in profile.steps else {}
        for name, group in groups.items():
            directory = Path(self._options.default_local_dir, "profiles", f"step-{step}", name)
            group.start_profile(str(directory), profile.at, profile.nsys)
        yield
        for group in groups.values():
            group.stop_profile()

    def trained(self) -> dict[str, WorkerGroup]:
        """Return the groups that have weights to save, by name."""
        return {name: group for name, group in self.by_name.items() if name in TRAINED}


def check_engines_fit(workers: Sequence[GroupSpec], pools: ResourcePoolManager) -> None:
    """Raise ConfigError if no engine fits the pool of the group that generates."""
    generating = next((worker for worker in workers if worker.name == "rollout"), workers[0])
    config = generating.config
    engine = ROLLOUT_ENGINES.get(config.rollout.engine) if isinstance(config, ActorConfig) else None
    if engine is not None and engine.place is not None:
        counts = pools.resource_pool_spec[pools.mapping[generating.role]]
        engine.place(config, [f"node{node}" for node, count in enumerate(counts) for _ in range(count)])


class TokenBalance:
    """Makes calls split their rows by tokens. Results are the same as without, up to rounding.

    A rank that has more tokens than the others makes them wait in every optimizer step, so rows that are in the same
    mini-batches, in all epochs, are balanced by themselves. Mini-batches are the same as without, unless a step made
    no update: ``mini_batches`` of the worker draws them by the number of the step, and without by that of the update.
    Methods that are registered with another ``balance`` keep it.

    Args:
        groups: the groups of the run.
        enabled: ``trainer.balance_tokens``.
    """

    def __init__(self, groups: RunGroups, enabled: bool) -> None:
        self._groups, self._enabled = groups, enabled

    def split(self, method: GroupMethod[..., Any, Any]) -> GroupMethod[..., Any, Any]:
        """Return a method that splits its batch, which has the columns ``TOKENS`` and ``PROMPTS``, by tokens."""
        if not self._enabled or method.registration.rows.balance is not None or method.plan().shard_count == 1:
            return method
        spec = self._groups.spec_of(method.group)
        shares = spec.init.cls.shares_prompts(spec.config)
        return method.options(balance=TOKENS, group_by=PROMPTS if shares else None)

    def split_update(
        self, method: GroupMethod[..., Any, Any], batch: DataProto, update: int
    ) -> tuple[GroupMethod[..., Any, Any], DataProto]:
        """Return an update that splits each of its mini-batches by tokens, and the batch with these mini-batches.

        Args:
            method: of actor or critic.
            batch: with ``TOKENS``, ``PROMPTS`` and ``response_mask``.
            update: number of the update, which the draw of the mini-batches depends on.
        """
        balanced = self.split(method)
        (mask,) = columns(batch, "response_mask")
        counted = mask.bool().any(1)
        if balanced is method or not bool(counted.any()):
            return balanced, batch
        spec, rows, n = self._groups.spec_of(method.group), int(counted.sum()), batch.meta_info.get("n", 1)
        mini_batches = spec.init.cls.mini_batches(spec.config, rows, n, update)
        if mini_batches is None:
            return balanced, batch
        numbers = torch.full((len(batch), mini_batches.size(1)), -1)
        numbers[counted] = mini_batches
        return balanced.options(within=MINI_BATCHES), batch.with_tensors({MINI_BATCHES: numbers})
