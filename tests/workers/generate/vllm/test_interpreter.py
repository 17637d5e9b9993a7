"""Engines run with an interpreter of their own, which has vLLM and nothing of this project."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from mcontroller import RayClassWithInitArgs
from mcontroller.errors import ConfigError
from tests.workers.generate.vllm.test_checks import config
from workers import ActorRolloutRefWorker
from workers.generate.vllm.checks import check_installed, check_vllm
from workers.generate.vllm.engine_process import EngineProcess
from workers.generate.vllm.start import engine_environment
from workers.planning import planning

pytestmark = pytest.mark.processes

Interpreter = Callable[[Mapping[str, str]], str]

VLLM = """
import importlib, json, os, sys
from types import ModuleType, SimpleNamespace

def module(name, **members):
    parent, _, last = name.rpartition(".")
    sys.modules[name] = made = ModuleType(name)
    made.__path__, _ = [], made.__dict__.update(members)
    if parent not in sys.modules:
        module(parent)
    setattr(sys.modules[parent], last, made)

class AsyncLLM:
    def __init__(self, arguments):
        file, _, name = arguments["worker_extension_cls"].rpartition(".")
        extension = getattr(importlib.import_module(file), name)
        packages = {name.partition(".")[0] for name in sys.modules}
        here = [os.environ.get(name) for name in ("PYTHONPATH", "PYTHONHOME", "CUDA_DEVICE_MAX_CONNECTIONS")]
        project = sorted(packages & {"mcontroller", "parallel_state", "workers"})
        with open(arguments["model"], "w") as file:
            json.dump([extension.__name__, project, here, sys.path], file)
    @classmethod
    def from_engine_args(cls, arguments, usage_context):
        return cls(arguments)
    def shutdown(self):
        pass

module("vllm.engine.arg_utils", AsyncEngineArgs=dict)
module("vllm.usage.usage_lib", UsageContext=SimpleNamespace(LLM_CLASS=None))
module("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)
module("vllm.config", set_current_vllm_config=None)
inside = "vllm.model_executor"
module(f"{inside}.layers.vocab_parallel_embedding", ParallelLMHead=None)
module(f"{inside}.model_loader.reload.layerwise", finalize_layerwise_reload=None, initialize_layerwise_reload=None)
module("vllm.platforms", current_platform=None)
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    """Make a script that runs this interpreter with the given modules on its path."""

    def make(modules: Mapping[str, str]) -> str:
        site = tmp_path / "site"
        site.mkdir()
        for name, text in modules.items():
            (site / f"{name}.py").write_text(text)
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nexport PYTHONPATH={site}\nexec {sys.executable} "$@"\n')
        script.chmod(0o755)
        return str(script)

    return make


def test_what_runs_in_the_engine_imports_nothing_of_this_project(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("PYTHONPATH", "/of/the/worker"), ("PYTHONHOME", "/of/the/worker")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    python = interpreter({"vllm": VLLM})
    file, limits = tmp_path / "facts.json", {"start_timeout_s": 60.0, "silence_timeout_s": 60.0}
    EngineProcess({"model": str(file)}, engine_environment([]), **limits, python=python).close()
    extension, imported, variables, path = json.loads(file.read_text())
    assert (extension, imported) == ("PolicyReceiver", [])
    assert variables == [str(tmp_path / "site"), None, None]
    assert "/of/the/worker" not in path


def test_the_chosen_interpreter_is_asked_for_vllm_where_it_is(interpreter: Interpreter) -> None:
    python = interpreter({"vllm": ""})
    check_vllm(config(rollout={"vllm": {"python": python}}))
    with pytest.raises(ConfigError) as caught:
        check_vllm(config(rollout={"vllm": {"python": python, "tp": 3}}))
    assert caught.value.key == "rollout.vllm.tp"


@pytest.mark.parametrize("is_cpu", [True, False])
def test_experts_of_tokens_are_not_asked_of_vllm_s_cpu_build(interpreter: Interpreter, is_cpu: bool) -> None:
    build = f"""
import sys, types
sys.modules["vllm.platforms"] = types.ModuleType("vllm.platforms")
sys.modules["vllm.platforms"].current_platform = types.SimpleNamespace(is_cpu=lambda: {is_cpu})
__path__ = []
"""
    mixture = {"num_moe_experts": 4, "qk_layernorm": True, "transformer": {"moe_router_load_balancing_type": "none"}}
    vllm = {"python": interpreter({"vllm": build})}
    settings = config(model=mixture, router_replay="rollout", rollout={"vllm": vllm})
    with pytest.raises(ConfigError) if is_cpu else nullcontext() as caught:
        check_vllm(settings)
    if caught is not None:
        assert (caught.value.key, caught.value.value) == ("router_replay", "rollout")


def test_an_interpreter_without_vllm_is_rejected_before_a_process_starts(interpreter: Interpreter) -> None:
    python = interpreter({})
    with pytest.raises(ConfigError) as caught:
        RayClassWithInitArgs(ActorRolloutRefWorker, config(rollout={"vllm": {"python": python}}), role="actor_rollout")
    assert (caught.value.key, caught.value.value) == ("rollout.vllm.python", python)


def test_an_interpreter_that_fails_is_reported_with_what_it_printed(interpreter: Interpreter) -> None:
    python = interpreter({"sitecustomize": "import os, sys\nprint('no libpython')\nsys.stdout.flush()\nos._exit(3)"})
    with pytest.raises(ConfigError) as caught:
        check_vllm(config(rollout={"vllm": {"python": python}}))
    assert caught.value.key == "rollout.vllm.python" and caught.value.output == "no libpython"


def test_the_controller_may_lack_the_interpreter_and_the_node_of_an_engine_may_not() -> None:
    elsewhere = config(rollout={"vllm": {"python": "/opt/vllm/bin/python"}})
    check_vllm(elsewhere)
    with pytest.raises(ConfigError) as caught:
        check_installed(elsewhere)
    assert (caught.value.key, caught.value.value) == ("rollout.vllm.python", "/opt/vllm/bin/python")


def test_a_planned_run_asks_no_interpreter_of_this_machine(interpreter: Interpreter) -> None:
    with planning():
        check_vllm(config(rollout={"vllm": {"python": interpreter({})}}))
