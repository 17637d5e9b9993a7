"""What vLLM cannot run is reported before any process starts, with the field."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcontroller import RayClassWithInitArgs
from mcontroller.errors import ConfigError
from workers import ActorConfig, ActorRolloutRefWorker, load_config
from workers.generate.engines import ROLLOUT_ENGINES
from workers.generate.vllm.checks import check_settings
from workers.generate.vllm.start import policy_folder

MODEL = {
    "vocab_size": 131,
    "max_sequence_length": 256,
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}
ROLLOUT = {"engine": "vllm", "prompt_length": 16, "response_length": 16}


def config(**changes: Any) -> ActorConfig:
    return load_config(ActorConfig, {"model": MODEL, "rollout": ROLLOUT}, changes)


LORA = {"rank": 4, "alpha": 8.0}
ALONE = {"vllm": {"adapter_alone": True}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"parallel": {"tp": 2, "cp": 2}, "rollout": {"vllm": {"tp": 3}}}, "rollout.vllm.tp"),
        ({"rollout": ALONE}, "rollout.vllm.adapter_alone"),
        (
            {"rollout": ALONE, "model": {"lora": LORA, "train_only": ["*norm.weight"]}},
            "rollout.vllm.adapter_alone",
        ),
        ({"rollout": ALONE, "model": {"lora": LORA | {"rank": 600}}}, "rollout.vllm.adapter_alone"),
        (
            {"rollout": ALONE, "model": {"lora": LORA, "num_moe_experts": 4, "qk_layernorm": True}},
            "rollout.vllm.adapter_alone",
        ),
        ({"model": {"max_sequence_length": 31}}, "model.max_sequence_length"),
        ({"model": {"gated_linear_unit": False}}, "model.gated_linear_unit"),
    ],
)
def test_settings_that_an_engine_cannot_run_are_rejected(changes: dict[str, Any], key: str) -> None:
    check_settings(config())
    with pytest.raises(ConfigError) as caught:
        check_settings(config(**changes))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("vllm", "key"),
    [
        ({"tp": 0}, "rollout.vllm.tp"),
        ({"bucket_bytes": 0}, "rollout.vllm.bucket_bytes"),
        ({"silence_timeout_s": 0}, "rollout.vllm.silence_timeout_s"),
        ({"options": {"max_num_seqs": 3}}, "rollout.vllm.options.max_num_seqs"),
        ({"options": {"nnodes": 2}}, "rollout.vllm.options.nnodes"),
        ({"options": {"seed": 2}}, "rollout.vllm.options.seed"),
        ({"options": {"hf_overrides": {"vocab_size": 7}}}, "rollout.vllm.options.hf_overrides"),
        ({"options": {"enable_batch_sharded_sampling": True}}, "rollout.vllm.options.enable_batch_sharded_sampling"),
    ],
)
def test_wrong_values_are_rejected_with_their_field(vllm: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(rollout={"vllm": vllm})
    assert caught.value.key == key


def test_an_unknown_engine_is_rejected_before_a_process_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(ActorRolloutRefWorker, config(rollout={"engine": "vlm"}), role="actor_rollout")
    assert caught.value.key == "rollout.engine"


@pytest.mark.processes
def test_a_missing_vllm_is_reported_at_the_start_to_those_who_generate() -> None:
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(ActorRolloutRefWorker, config(), role="actor_rollout")
    assert caught.value.key == "rollout.engine"
    RayClassWithInitArgs(ActorRolloutRefWorker, config(), role="ref")


def test_an_adapter_goes_alone_only_to_an_engine_of_the_actors_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLLOUT_ENGINES._entries, "vllm", replace(ROLLOUT_ENGINES["vllm"], check=lambda config: None))
    alone = config(model={"lora": LORA}, rollout=ALONE)
    RayClassWithInitArgs(ActorRolloutRefWorker, alone, role="actor_rollout")
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(ActorRolloutRefWorker, alone, role="rollout")
    assert caught.value.key == "rollout.vllm.adapter_alone"


def test_a_cache_folder_that_is_full_does_not_stop_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "replace", is_full)
    folder = policy_folder(config())
    assert folder.parent == tmp_path and json.loads((folder / "config.json").read_text())["vocab_size"]
