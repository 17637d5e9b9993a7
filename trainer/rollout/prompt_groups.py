"""Groups of responses in flight, and their rows in a checkpoint."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mcontroller.data.batch import DataProto
from mcontroller.errors import DataError
from trainer.columns import columns
from trainer.rollout.made_tokens import FAILURE_KINDS, Turn
from trainer.rollout.trajectory import Trajectory
from trainer.saving.run_record import BatchInFlight
from workers.columns import ROUTED_EXPERTS, TOKEN_TEMPERATURES

STATE = "trajectory_state"
"""Column of a saved batch, int64 ``[rows, 15]``: of the group its number, row, version, attempt and ``completed``; the
index of the response in it, its place among the episodes, -1 if it is none or has ended; the request of an episode, -1
for the response itself, and its tokens before; its place among those in flight, -1 if it is none; its prompt, tokens,
last turn's first one, and turns; why it ended, of ``ENDS``."""
ENDS = ("", "stop", "turn", "length", "environment", *FAILURE_KINDS, "max_tokens")


@dataclasses.dataclass(eq=False)
class Group:
    """The responses to one problem.

    Attributes:
        number: of the problem in the run, its ``uid``.
        problems: the batch that it was drawn with.
        batch: the number of that batch in the data set, if it has one.
        row: of the problem in the batch.
        version: of the policy when it was submitted.
        attempt: how often it was dropped.
        completed: its place in the order in which groups were completed; -1 while it is not.
        responses: so far.
    """

    number: int
    problems: DataProto
    batch: int | None
    row: int
    version: int
    attempt: int = 0
    completed: int = -1
    responses: list[Trajectory] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all responses have ended."""
        return self.completed >= 0


@dataclasses.dataclass
class Unfinished:
    """A response of a saved group that has not ended.

    Attributes:
        group: its group.
        index: its index in the group.
        order: its place among those in flight, or of its episode among the episodes.
        turns: of its episode, by request.
        places: of its trajectories among those in flight, by their keys.
    """

    group: Group
    index: int
    order: int
    turns: dict[int, Turn] = dataclasses.field(default_factory=dict)
    places: dict[Any, int] = dataclasses.field(default_factory=dict)


def saved_groups(
    groups: Sequence[Group], n: int, episodes: Mapping[int, Mapping[int, Turn]], places: Mapping[Any, int]
) -> tuple[list[Trajectory], dict[str, torch.Tensor]]:
    """Return the trajectories of groups, a row each, and the columns ``STATE`` and ``sample_seed`` for them.

    Args:
        groups: of one batch.
        n: the number of responses of a group.
        episodes: the turns of the episodes that have not ended, by response, in their order.
        places: of the trajectories in flight, by their keys.
    """
    order = {key: place for place, key in enumerate(episodes)}
    rows: list[Trajectory] = []
    state: list[tuple[int, ...]] = []
    for group in groups:
        for index, response in enumerate(group.responses):
            key = group.number * n + index
            of = group.number, group.row, group.version, group.attempt, group.completed, index, order.get(key, -1)
            responses: list[tuple[int, int, Any, Trajectory]] = [(-1, 0, key, response)]
            turns = episodes.get(key, {}).items()
            responses += [(request, turn.before, f"{key}/{request}", turn.trajectory) for request, turn in turns]
            for request, before, name, expected in responses:
                rows.append(expected)
                sizes = len(expected.prompt), len(expected.tokens), expected.turn, expected.turns
                state.append((*of, request, before, places.get(name, -1), *sizes, ENDS.index(expected.ended)))
    seeds = torch.tensor([row.seed or 0 for row in rows])  # a response that has failed may have none
    return rows, {STATE: torch.tensor(state), "sample_seed": seeds}


def restored_groups(
    batch: BatchInFlight, problems: DataProto, n: int, *, has_prompts: bool
) -> tuple[list[Group], list[Unfinished]]:
    """Return the groups of a saved batch, and their responses that have not ended.

    Args:
        batch: rows of ``saved_groups``.
        problems: of the batch.
        n: the number of responses of a group.
        has_prompts: whether responses that have ended have the prompts of the problems; an episode may write another.

    Raises:
        DataError: a response has another prompt than its problem.
    """
    ids, mask = columns(problems, "input_ids", "attention_mask")
    groups: dict[int, Group] = {}
    unfinished: dict[int, Unfinished] = {}
    for state, trajectory in _rows(batch.responses, problems):
        number, at, version, attempt, completed, index, order, request, before, place, *_ = state
        group = groups.setdefault(number, Group(number, problems, batch.number, at, version, attempt, completed))
        key = number * n + index
        if request >= 0:
            unfinished[key].turns[request] = Turn(trajectory, before)
        else:
            expected = has_prompts or not trajectory.ended
            if expected and trajectory.prompt.tolist() != ids[at][mask[at].bool()].tolist():
                raise DataError(
                    f"the checkpoint has responses in flight to problem {at} of batch {batch.number}, which is another "
                    "one now: resume with the same data and data.seed",
                    batch=batch.number,
                    row=at,
                )
            group.responses.append(trajectory)
            if not trajectory.ended:
                unfinished[key] = Unfinished(group, index, max(order, place))
        if place >= 0:
            unfinished[key].places[key if request < 0 else f"{key}/{request}"] = place
    return list(groups.values()), list(unfinished.values())


def _rows(batch: DataProto, problems: DataProto) -> Iterator[tuple[list[int], Trajectory]]:
    """Yield the state and the trajectory of each row."""
    states, seeds, prompts = (column.tolist() for column in columns(batch, STATE, "sample_seed", "prompts"))
    made = columns(batch, "responses", "response_mask", "rollout_log_probs", "token_versions")
    experts, temperatures = batch.tensors().get(ROUTED_EXPERTS), batch.tensors().get(TOKEN_TEMPERATURES)
    for row, (state, seed) in enumerate(zip(states, seeds, strict=True)):
        prompt, length, turn, turns, ended = state[-5:]
        start = len(prompts[row]) - prompt
        tokens, mask, log_probs, versions = (column[row, :length].tolist() for column in made)
        others = other_columns(problems, state[1])
        trajectory = Trajectory(prompts[row][start:], others, tokens, mask, log_probs, versions)  # type: ignore[arg-type]
        trajectory.seed, trajectory.turn, trajectory.turns, trajectory.ended = seed or None, turn, turns, ENDS[ended]
        if temperatures is not None:
            trajectory.temperatures = array("d", temperatures[row, :length].tolist())
        if experts is not None:
            known = experts[row, start:]
            trajectory.experts = [known[(known >= 0).flatten(1).all(1)]] if bool((known >= 0).any()) else []
        yield state, trajectory


def other_columns(problems: DataProto, row: int) -> dict[str, Any]:
    """Return the other columns of a problem, which an environment can read."""
    return {name: column[row] for name, column in problems.non_tensor_batch.items()}
