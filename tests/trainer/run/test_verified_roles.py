"""Actor with reference, critic and reward model: each trains and scores on every rank what one process does.

Compared are scores, metrics, every gradient, the norm, and every weight after a step and after an update of several
mini-batches and epochs, from the run's own loss and update rules.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mcontroller.cli.main import main
from mcontroller.config.load import load_config
from parallel_state.layout import ParallelLayout
from parallel_state.verify import Verifier
from parallel_state.verify.layouts import ONE_PROCESS
from trainer.run.config import read_run_config
from trainer.run.model_roles import role_programs
from workers.actor import ActorRolloutRefWorker
from workers.config import ActorConfig, CriticConfig
from workers.critic import CriticWorker
from workers.model.value_head import ValueHead
from workers.parity.cases import MODELS, SMALL
from workers.train import scorer, trainer
from workers.verify.roles import ModelRole, RoleProgram
from workers.verify.sizes import small_layout

pytestmark = pytest.mark.simulated

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "distributed_optimizer": True}
_LEARNED_POSITIONS = {"position_embedding_type": "learned_absolute", "qk_layernorm": True}
BY_TOKENS = {"ppo_max_tokens_per_micro_batch": 1}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "dense": (
        "dense",
        {},
        ["tp=2,sp", "pp=4", "pp=2,vpp=2", "cp=4,pp=2", "tp=2,pp=2,dp=2", "dp=2,distopt"],
    ),
    "recomputation": ("dense", {"model": {"transformer": _RECOMPUTE}}, ["tp=2"]),
    "overlap": ("dense", {"optim": _OVERLAP}, ["pp=2,dp=2,distopt"]),
    "by tokens": ("dense", BY_TOKENS, ["tp=2,pp=2,dp=2", "pp=2,vpp=2,dp=2"]),
    "packed": ("dense", {"packed": True}, ["tp=2,sp"]),
    "packed, by tokens": ("dense", BY_TOKENS | {"packed": True}, ["cp=2,dp=2"]),
    "tied embeddings": ("tied embeddings", {}, ["tp=2,pp=2", "pp=2,vpp=2"]),
    "layer norm": ("biases, GELU", {"model": _LEARNED_POSITIONS}, ["tp=2,pp=2,sp"]),
    "experts": ("experts", {}, ["ep=2", "tp=2,ep=2,sp,etp=1", "tp=2,ep=2,sp", "tp=2,sp,etp=1"]),
    "router losses": ("router losses", {}, ["cp=2,ep=2"]),
}


def program(worker: Any, model: str = "dense", changes: dict[str, Any] | None = None, **more: Any) -> RoleProgram:
    """Return a role with the sizes of the parity tests."""
    base = {"model": {**SMALL, "vocab_size": 64, **MODELS[model]}, "ppo_epochs": 2}
    of_actor = {"use_kl_loss": True, "entropy_coeff": 0.01} if worker is ActorRolloutRefWorker else {}
    config: Any = load_config(ActorConfig if of_actor else CriticConfig, base | of_actor, changes or {}, more)
    return RoleProgram.of(ModelRole(worker, config, "actor_ref" if of_actor else "", ONE_PROCESS), 4)


@functools.cache
def verifier_of(worker: Any, case: str) -> Verifier:
    """Return the verifier of a case of a role, which has trained it in one process."""
    model, changes, _ = CASES[case]
    return Verifier(program(worker, model, changes), steps=1)


@pytest.mark.parametrize(
    ("case", "worker"),
    [(case, ActorRolloutRefWorker) for case in CASES] + [("packed, by tokens", CriticWorker)],
)
def test_a_role_trains_and_scores_as_in_one_process(case: str, worker: Any) -> None:
    verifier = verifier_of(worker, case)
    assert verifier.reference.steps[0].scores and verifier.reference.steps[0].norm > 0.01
    for layout in CASES[case][2]:
        outcome = verifier.verify(layout)
        assert outcome.equal, (layout, outcome.lines())


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
def test_a_policy_loss_trains_as_in_one_process(loss: str) -> None:
    verifier = Verifier(program(ActorRolloutRefWorker, policy_loss=loss), steps=1)
    for layout in ("cp=2", "dp=2,mbs=2"):
        outcome = verifier.verify(layout)
        assert outcome.equal, (layout, outcome.lines())


def test_in_float64_a_role_differs_by_rounding_alone() -> None:
    outcome = Verifier(program(CriticWorker), steps=1, exact=True).verify("tp=2,pp=2,sp")
    assert outcome.equal and outcome.largest < 1e-12, outcome.lines()


def without_mark(self: Any, *args: Any, init: Any = ValueHead.__init__) -> None:
    init(self, *args)
    self.weight.sequence_parallel = False


@pytest.mark.parametrize(
    ("worker", "layout", "owner", "name", "fault", "report"),
    [
        (CriticWorker, "tp=2,sp", ValueHead, "__init__", without_mark, "gradient output_layer.weight, step 1"),
        (ActorRolloutRefWorker, "cp=2", scorer, "sum_over_context", lambda column, pg: column, "scores old_log_probs"),
        (ActorRolloutRefWorker, "dp=2", trainer.dist, "all_reduce", lambda *_, **__: None, "loss actor/pg_loss"),
    ],
    ids=["gradient of the value head", "scores over cp", "count of tokens"],
)
def test_a_fault_of_a_worker_is_found(worker: Any, layout: str, owner: Any, name: str, fault: Any, report: str) -> None:
    verifier = verifier_of(worker, "dense")
    verifier.records(1)
    with mock.patch.object(owner, name, fault):
        outcome = verifier.verify(layout)
    assert report in "\n".join(map(str, outcome.differences)), outcome.lines()


RUN = """
pool: {process_on_nodes: [32], use_gpu: false}
model: {hf_path: HF, dtype: bfloat16}
data: {train: {path: problems.jsonl}}
algorithm: {adv_estimator: gae}
actor_rollout_ref:
  model: ${model}
  parallel: {tp: 4, pp: 4}
  optim: {lr: 1.0e-6, warmup_steps: 10}
  use_kl_loss: true
critic: {model: "${model}", parallel: {tp: 2, sequence_parallel: true}}
reward_model: {model: "${model}", parallel: {cp: 2}}
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("HF", str(tmp_path)))
    return str(path)


def test_every_role_of_a_run_is_verified_in_its_layout(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", run, "--steps", "1"]) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["actor_rollout_ref", "tp=2,pp=2,dp=2,distopt", "8", "yes"] in rows
    assert ["critic", "tp=2,dp=4,sp,distopt", "8", "yes"] in rows
    assert ["reward_model", "cp=2,dp=4", "8", "yes"] in rows


def test_a_model_of_a_run_is_small_and_has_the_structure_of_the_large_one(run: str) -> None:
    model = role_programs(read_run_config(run))["actor_rollout_ref"].role.config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.num_query_groups) == (2, 32, 4, 2)
    assert (model.vocab_size, model.tie_embeddings, model.rotary_base, model.hf_path) == (64, True, 500000, None)
    assert model.dtype == "float32"


@pytest.mark.parametrize(
    ("layout", "most", "small"),
    [
        (ParallelLayout(4096, tp=8, pp=16, vpp=4), 8, {"tp": 2, "pp": 2, "dp": 2}),
        (ParallelLayout(64, tp=4, cp=2, ep=8, etp=1), 8, {"tp": 2, "cp": 2, "dp": 2, "ep": 4}),
        (ParallelLayout(16, tp=2, pp=2, cp=2, ep=2), 4, {"tp": 2, "pp": 2, "cp": 2, "dp": 2, "ep": 2}),
        (ParallelLayout(4, tp=4), 8, {"tp": 4}),
    ],
)
def test_the_axes_of_a_layout_are_halved(layout: ParallelLayout, most: int, small: dict[str, int]) -> None:
    sizes = small_layout(layout, most).sizes
    assert {axis: sizes[axis] for axis in ("tp", "pp", "cp", "dp", "ep") if sizes[axis] > 1} == small
