"""What the roles of a run need together on a GPU that they share, at each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel_state.dry_run.outcome import CONTEXT, GIB, Outcome, Use
from trainer.run.config import MAIN_POOL, RunConfig
from trainer.run.pools import pool_names
from workers.role_calls import GENERATION as IN_WORKER

GENERATION = "generation, without the engine"


@dataclass(frozen=True)
class SharedGpus:
    """Bytes on the GPU that needs the most, with a CUDA context for each role, by pool and phase.

    Attributes:
        handed_over: if roles are in host memory while others compute, and parts of a role that a call does not need.
        kept: if every role keeps what it has.
    """

    handed_over: dict[tuple[str, str], int]
    kept: dict[tuple[str, str], int]

    def peak(self, offload: str) -> int:
        """Return the most bytes with a value of ``trainer.offload``."""
        return max((self.kept if offload == "never" else self.handed_over).values())

    def as_json(self) -> list[dict[str, Any]]:
        """Return an object for each pool and phase, with the bytes for each value of ``trainer.offload``."""
        return [
            {"pool": pool, "phase": phase, "auto": self.handed_over[pool, phase], "never": kept}
            for (pool, phase), kept in self.kept.items()
        ]

    def lines(self, gpu: int) -> list[str]:
        """Return the report; ``gpu`` is the memory of a GPU in bytes."""
        lines = ["GiB on the GPU that needs the most, all roles of its pool and their CUDA contexts together:"]
        lines.append(f"{'pool':16}{'phase':40}{'offload=auto':>14}{'offload=never':>15}")
        for (pool, phase), kept in self.kept.items():
            handed_over = self.handed_over[pool, phase]
            lines.append(f"{pool:16}{phase:40}{handed_over / GIB:>14.2f}{kept / GIB:>15.2f}")
        for offload in ("auto", "never"):
            margin = (gpu - self.peak(offload)) / GIB
            what = f"fits with a margin of {margin:.1f} GiB" if margin >= 0 else f"{-margin:.1f} GiB TOO MUCH"
            lines.append(f"trainer.offload={offload}: {self.peak(offload) / GIB:.2f} of {gpu / GIB:.1f} GiB, {what}")
        return lines


def shared_gpus(
    outcomes: Mapping[str, Outcome], offload: str = "auto", pools: Mapping[str, str] | None = None, engine: str = ""
) -> SharedGpus:
    """Return what the roles of each GPU need together.

    Args:
        outcomes: of every call, by the role's key and the method with a dot between them.
        offload: ``trainer.offload``.
        pools: the pool of each role by its key; by default, all are in one.
        engine: the pool of an engine in a separate group; empty if there is none.
    """
    handed_over: dict[tuple[str, str], int] = {}
    kept: dict[tuple[str, str], int] = {}
    by_pool: dict[str, dict[str, Outcome]] = {}
    for name, outcome in outcomes.items():
        by_pool.setdefault((pools or {}).get(name.partition(".")[0], MAIN_POOL), {})[name] = outcome
    in_worker = any(name.endswith(f".{IN_WORKER}") for name in outcomes)
    for pool, of_pool in by_pool.items():
        roles = {name.partition(".")[0]: one for name, one in reversed(of_pool.items())}
        hands_over = offload == "always" or len(roles) + (engine == pool) > 1
        for gpu in range(next(iter(roles.values())).layout.world_size):
            idle = {key: sum(_use(outcome, gpu).idle.values()) for key, outcome in roles.items()}
            contexts = len(roles) * CONTEXT
            moments = {} if in_worker else {GENERATION: (contexts, contexts + sum(idle.values()))}
            for name, outcome in of_pool.items():
                use, others = _use(outcome, gpu), sum(idle.values()) - idle[name.partition(".")[0]]
                moments[name] = use.peak - use.unneeded + contexts, use.peak + others + contexts
            for phase, (least, most) in moments.items():
                least = least if hands_over else most
                handed_over[pool, phase] = max(least, handed_over.get((pool, phase), 0))
                kept[pool, phase] = max(most, kept.get((pool, phase), 0))
    return SharedGpus(handed_over, kept)


def shared_gpus_of_run(config: RunConfig, outcomes: Mapping[str, Outcome]) -> SharedGpus:
    """Return what the roles of each GPU of a run need together; see ``shared_gpus``."""
    pools = pool_names(config)
    return shared_gpus(outcomes, config.trainer.offload, pools, "" if config.rollout is None else pools["rollout"])


def _use(outcome: Outcome, gpu: int) -> Use:
    """Return what the rank on a GPU uses: as the rank of its stage that ran and needs the most."""
    return outcome.uses[outcome.stages[outcome.layout.coordinates(gpu)["pp"]]]
