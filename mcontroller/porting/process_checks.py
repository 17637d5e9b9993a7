"""What is different in the process of a worker: its devices, torch.distributed, Megatron's groups, its imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import mcontroller
import mcontroller.porting
from mcontroller.porting.rules import PortCheck, PortContext, PortFinding, attribute_of, dotted, finding, keyword_of

__all__ = ["PROCESS_CHECKS"]

DEVICE = re.compile(r"(cuda|npu):\d+")
INITIALIZERS = frozenset({"init_process_group", "initialize_model_parallel", "initialize_megatron"})
REGISTER_CENTER = frozenset({"register_center", "_configure_before_init", "create_worker_group_register_center"})
DEVICE_NAMES: Mapping[str, str] = {
    "get_device_id": "self.device, the device of this rank",
    "get_device_name": "self.device.type",
    "get_torch_device": "torch.cuda",
    "get_nccl_backend": "nothing: MegatronWorker joins torch.distributed",
}
WORKERS: Mapping[str, str] = {
    "MegatronWorker": "workers",
    "ActorRolloutRefWorker": "workers",
    "CriticWorker": "workers",
    "RewardModelWorker": "workers",
    "NVMegatronRayWorkerGroup": "mcontroller",
    "MegatronWorkerGroup": "mcontroller",
    "RayPPOTrainer": "mcontroller.ppo",
    "compute_advantage": "mcontroller.ppo",
}
RENAMED: Mapping[str, str] = {
    "NVMegatronRayWorkerGroup": "MegatronRayWorkerGroup as NVMegatronRayWorkerGroup",
    "MegatronWorkerGroup": "WorkerGroup as MegatronWorkerGroup",
}
CONTROLLER = ("verl.protocol", "verl.single_controller", "verl.utils.seqlen_balancing", "verl.utils.ray_utils")
PROGRAMS = ("verl.workers", "verl.trainer.ppo.ray_trainer")


def check_imports(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find imports of names that this project has in another module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name == "verl" or alias.name.startswith(CONTROLLER):
                yield finding(node, "import", "import mcontroller")
        return
    module = node.module or "" if isinstance(node, ast.ImportFrom) and node.level == 0 else ""
    if not isinstance(node, ast.ImportFrom) or module.partition(".")[0] != "verl":
        return
    if module == "verl.utils.device":
        known = [DEVICE_NAMES[alias.name] for alias in node.names if alias.name in DEVICE_NAMES]
        yield finding(node, "import", "; ".join(known) or "torch.cuda")
    elif module == "verl" or module.startswith((*CONTROLLER, *PROGRAMS)):
        yield finding(node, "import", "; ".join(_import_of(module, alias) for alias in node.names))


def _import_of(module: str, alias: ast.alias) -> str:
    source = _module_of(alias.name)
    if source:
        renamed = RENAMED.get(alias.name, alias.name)
        return f"from {source} import {f'{alias.name} as {alias.asname}' if alias.asname else renamed}"
    if module.startswith("verl.workers"):
        return f"{alias.name} of {module}: port that file too, and import it from there"
    return f"{alias.name} has no counterpart: see docs/porting.md"


def _module_of(name: str) -> str:
    if name in WORKERS:
        return WORKERS[name]
    return next((each.__name__ for each in (mcontroller, mcontroller.porting) if name in each.__all__), "")


def check_devices(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find devices that are named by a fixed index, and uses of the list of visible ones."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if DEVICE.fullmatch(node.value):
            yield finding(node, "device-index", f"{node.value.partition(':')[0]!r}, or self.device of a MegatronWorker")
        elif node.value == "CUDA_VISIBLE_DEVICES":
            yield finding(
                node, "visible-devices", "RayResourcePool(..., isolate_gpus=True) for the one GPU of the rank"
            )
    elif isinstance(node, ast.Call):
        name = attribute_of(node)
        if name == "get_cuda_visible_devices":
            yield finding(
                node, "visible-devices", "RayResourcePool(..., isolate_gpus=True) for the one GPU of the rank"
            )
        index = node.args[1 if name == "device" and len(node.args) > 1 else 0] if node.args else None
        fixed = isinstance(index, ast.Constant) and type(index.value) is int
        if fixed and name in ("set_device", "cuda", "to", "device") and isinstance(node.func, ast.Attribute):
            yield finding(node, "device-index", "the index is LOCAL_RANK: self.local_rank, or self.device")


def check_distributed(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find code that joins torch.distributed or makes Megatron's groups, which ``MegatronWorker`` has done."""
    if not isinstance(node, ast.Call) or "MegatronWorker" not in context.bases:
        return
    if attribute_of(node) in INITIALIZERS:
        yield finding(node, "distributed", "super().__init__(ParallelConfig(tp=..., pp=..., cp=...)), and no more")
    if _is_init_without_sizes(node):
        yield finding(node, "super-init", "super().__init__(ParallelConfig(tp=..., pp=..., cp=...))")


def _is_init_without_sizes(call: ast.Call) -> bool:
    """Return whether a call is ``super().__init__()`` or ``MegatronWorker.__init__(self)``, without more arguments."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "__init__") or keyword_of(call, "parallel"):
        return False
    through_super = attribute_of(call.func.value) == "super"
    expected = 0 if through_super else 1
    return (through_super or dotted(call.func.value) == "MegatronWorker") and len(call.args) == expected


def check_rendezvous(node: ast.AST, context: PortContext) -> Iterator[PortFinding]:
    """Find uses of the rendezvous: the port's type, and the register center, which does not exist here."""
    if isinstance(node, ast.Call) and attribute_of(node) == "get_master_addr_port":
        yield finding(node, "port-number", "str(port), if it is compared with a string or joined to one")
    name = attribute_of(node) if isinstance(node, ast.Call) else node.attr if isinstance(node, ast.Attribute) else ""
    if name in REGISTER_CENTER and not isinstance(context.parent, ast.Call):
        yield finding(node, "register-center", "nothing: remove it")
    if isinstance(node, ast.Constant) and node.value == "DISABLE_WORKER_INIT":
        yield finding(node, "register-center", "nothing: remove it")


PROCESS_CHECKS: tuple[PortCheck, ...] = (check_imports, check_devices, check_distributed, check_rendezvous)
