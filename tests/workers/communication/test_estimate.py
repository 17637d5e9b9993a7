"""The bytes of a training step on paper equal the simulator's trace, by axis, operation and group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcontroller import DataProto
from mcontroller.cli.main import main
from mcontroller.errors import ConfigError
from parallel_state.simulated import CommunicationTrace, Simulation
from workers.actor import ActorRolloutRefWorker
from workers.communication.estimate import StepRows, communication_of_step
from workers.config import ActorConfig, load_config

ROWS, PROMPT, RESPONSE = 8, 6, 10
MODEL = {"num_layers": 4, "vocab_size": 60, "hidden_size": 32, "num_attention_heads": 8, "num_query_groups": 4,
         "max_sequence_length": 16}  # fmt: skip
EXPERTS = MODEL | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "transformer": {"moe_router_load_balancing_type": "none"},
}
SHARDED = {"distributed_optimizer": True}
TIED = MODEL | {"tie_embeddings": True}
WITH_SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp": (2, {"tp": 2}, MODEL, {}),
    "tp with sp": (2, WITH_SP, MODEL, {}),
    "pp x dp": (4, {"pp": 2}, MODEL, {}),
    "pp with vpp": (2, {"pp": 2, "vpp": 2}, MODEL, {}),
    "dp, distributed optimizer": (4, {}, MODEL, SHARDED),
    "cp x pp x dp, tied embeddings": (8, {"cp": 2, "pp": 2}, TIED, {}),
    "ep x dp": (4, {"ep": 2}, EXPERTS, {}),
    "ep x dp, distributed optimizer": (4, {"ep": 2}, EXPERTS, SHARDED),
    "tp with sp x pp x ep": (8, WITH_SP | {"pp": 2, "ep": 2, "etp": 1}, EXPERTS, {}),
    "tp with sp x pp x dp, distributed optimizer": (8, WITH_SP | {"pp": 2}, MODEL, SHARDED),
}


def actor_config(parallel: dict[str, Any], model: dict[str, Any], optim: dict[str, Any]) -> ActorConfig:
    rollout = {"prompt_length": PROMPT, "response_length": RESPONSE}
    optim = {"distributed_optimizer": False} | optim  # the default depends on the device
    fields = {"model": model, "parallel": parallel, "optim": optim, "rollout": rollout, "ppo_micro_batch_size": 2}
    return load_config(ActorConfig, fields, {})


def traced(config: ActorConfig, ranks: int) -> Counter[tuple[str, str, str]]:
    """Return the bytes of one step of ``update_sft`` on simulated ranks, in groups of several ranks."""
    trace, layout = CommunicationTrace(), config.parallel.layout(ranks)
    simulation = Simulation(layout, trace=trace)

    def build() -> Callable[[], None]:
        worker: Any = ActorRolloutRefWorker(config, "actor")
        with worker.call_context("init_model"):
            worker.init_model()

        def step() -> None:
            ids = torch.randint(0, 60, (ROWS // layout.dp, PROMPT + RESPONSE))
            mask = (torch.arange(PROMPT + RESPONSE) >= PROMPT).long().expand_as(ids)
            with worker.call_context("update_sft"):
                columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask}
                worker.update_sft(DataProto.from_dict(columns))

        return step

    steps = simulation.run(dict.fromkeys(range(ranks), build))
    trace.clear()
    simulation.run(steps)
    simulation.close()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for each in trace:
        if len(each.members) > 1:
            sizes[each.axis, each.operation, each.group] += each.nbytes
    return sizes


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bytes_on_paper_are_those_of_the_trace(name: str) -> None:
    ranks, parallel, model, optim = LAYOUTS[name]
    config = actor_config(parallel, model, optim)
    step = StepRows(ROWS, PROMPT + RESPONSE, RESPONSE)
    counted = {(each.axis, each.operation, each.group): each.nbytes
               for each in communication_of_step(config, ranks, step)}  # fmt: skip
    assert counted == dict(traced(config, ranks))


def test_a_setting_that_is_not_counted_is_rejected() -> None:
    config = actor_config({}, MODEL | {"transformer": {"recompute_granularity": "selective"}}, {})
    with pytest.raises(ConfigError, match="recompute_granularity='selective' is not counted"):
        communication_of_step(config, 1, StepRows(8, 16, 10))


def test_rows_that_do_not_fill_micro_batches_are_rejected() -> None:
    with pytest.raises(ConfigError, match="6 rows on 4 data-parallel ranks"):
        communication_of_step(actor_config({}, MODEL, {}), 4, StepRows(6, 16, 10))


def test_the_verb_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "actor.yaml"
    sizes = "{num_layers: 4, vocab_size: 60, hidden_size: 32, num_attention_heads: 8, max_sequence_length: 1024}"
    file.write_text(f"model: {sizes}\nppo_mini_batch_size: 16\nppo_micro_batch_size: 2")
    command = ["communication", str(file), "parallel.tp=2", "--role", "actor_rollout_ref", "--world-size", "4"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 ranks, tp 2 x dp 2 x pp 1")
    assert any(line.split()[:2] == ["tp", "all_reduce"] for line in lines)
    assert lines[-1].startswith("all ")
