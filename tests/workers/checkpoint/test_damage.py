"""A damaged checkpoint, or one that would run code, is rejected on every rank before anything changes."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mcontroller.errors import DataError
from tests.ranks import run_ranks
from tests.workers.roles import critic, largest_difference, weights

pytestmark = pytest.mark.simulated

RANKS = 2


class RunsCode:
    """An object that creates a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def save_twice(path: str) -> None:
    worker = critic({"tp": RANKS})
    worker.save_checkpoint(path, global_step=1)
    with torch.no_grad():
        for parameter in worker.model[0].parameters():
            parameter.add_(1)
    worker.save_checkpoint(path, global_step=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    run_ranks(save_twice, RANKS, str(path))
    return path


def shard(step: Path) -> Path:
    return sorted(step.glob("*.distcp"))[0]


def flip_bytes(step: Path) -> None:
    content = bytearray(shard(step).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 16] = bytes(byte ^ 0xFF for byte in content[middle : middle + 16])
    shard(step).write_bytes(content)


def rewrite(name: str, content: bytes) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        (step / name).write_bytes(content)

    return change


def change_manifest(**values: Any) -> Callable[[Path], None]:
    """Change values and make the checksum match: only their types are left to find the damage."""

    def change(step: Path) -> None:
        manifest = json.loads((step / "manifest.json").read_text())
        del manifest["sha256"]
        manifest |= values
        checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        (step / "manifest.json").write_text(json.dumps(manifest | {"sha256": checksum}))

    return change


def forge(name: str, content: bytes, step: Path) -> None:
    """Replace a file as one who also writes its checksum into the manifest."""
    (step / name).write_bytes(content)
    files = json.loads((step / "manifest.json").read_text())["files"]
    files[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change_manifest(files=files)(step)


def forge_metadata(step: Path) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    metadata.planner_data = RunsCode(step / "ran")
    forge(".metadata", pickle.dumps(metadata), step)


def forge_common(step: Path) -> None:
    torch.save({"iteration": RunsCode(step / "ran")}, step / "common.pt")
    forge("common.pt", (step / "common.pt").read_bytes(), step)


def forge_object(step: Path) -> None:
    """Replace the random state of a rank, in a shard, by an object that runs code."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    index, place = next(
        (index, place)
        for index, place in metadata.storage_data.items()
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata) and "random" in index.fqn
    )
    torch.save([RunsCode(step / "ran")], step / "object")
    content = (step / "object").read_bytes()
    (step / "object").unlink()
    whole = (step / place.relative_path).read_bytes()
    metadata.storage_data[index].offset, metadata.storage_data[index].length = len(whole), len(content)
    forge(place.relative_path, whole + content, step)
    forge(".metadata", pickle.dumps(metadata), step)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bytes in a shard": (flip_bytes, "__0_0.distcp"),
    "truncated shard": (lambda step: os.truncate(shard(step), 1000), "__0_0.distcp"),
    "deleted shard": (lambda step: shard(step).unlink(), "__0_0.distcp"),
    "shard of another step": (
        lambda step: shutil.copy(shard(step.with_name("global_step_1")), shard(step)),
        "__0_0.distcp",
    ),
    "manifest is an empty object": (rewrite("manifest.json", b"{}"), "manifest.json"),
    "manifest of another format": (rewrite("manifest.json", b'{"format": 2}'), "manifest.json"),
    "manifest is a list": (rewrite("manifest.json", b"[]"), "manifest.json"),
    "manifest is deep": (rewrite("manifest.json", b"[" * 100_000), "manifest.json"),
    "manifest is binary": (rewrite("manifest.json", b"\x80\x04\xff"), "manifest.json"),
    "manifest was changed": (
        lambda step: (step / "manifest.json").write_text(
            (step / "manifest.json").read_text().replace('"step": 2', '"step": 3')
        ),
        "manifest.json",
    ),
    "manifest is missing": (lambda step: (step / "manifest.json").unlink(), "manifest.json"),
    "common.pt": (rewrite("common.pt", b"broken"), "common.pt"),
    "metadata.json": (rewrite("metadata.json", b"{}"), "metadata.json"),
    "metadata.json of another format": (lambda step: forge("metadata.json", b"[]", step), "metadata.json"),
    ".metadata": (lambda step: forge(".metadata", b"\x80\x04K\x01.", step), ".metadata"),
    "latest is binary": (rewrite("../latest", b"\xff\x00"), "latest"),
    "latest is empty": (rewrite("../latest", b""), "latest"),
    "latest leaves the directory": (rewrite("../latest", b"../../etc"), "latest"),
    "code in .metadata": (forge_metadata, ".metadata"),
    "code in common.pt": (forge_common, "common.pt"),
    "code in an object": (forge_object, "random/shard_0_2 in __0_0.distcp"),
}
"""By damage, what makes it, and the file that the error names."""


def load_all(paths: dict[str, str]) -> dict[str, tuple[str, DataError, float]]:
    """Load each checkpoint; return what verifying returned, what loading raised, and how far the weights are off."""
    worker = critic({"tp": RANKS})
    before = weights(worker)
    results = {}
    for name, path in paths.items():
        damage = worker.verify_checkpoint(path)
        with pytest.raises(DataError) as caught:
            worker.load_checkpoint(path)
        results[name] = (damage, caught.value, largest_difference(before, weights(worker)))
    return results


def test_damage_is_found_on_every_rank_before_anything_changes(saved: Path, tmp_path: Path) -> None:
    paths = {}
    for name, (damage, _) in CASES.items():
        run = shutil.copytree(saved, tmp_path / name.replace(" ", "_").replace(".", ""), symlinks=True)
        damage(run / "global_step_2")
        paths[name] = str(run)
    ranks = run_ranks(load_all, RANKS, paths)
    for name, (_, damaged) in CASES.items():
        for rank in ranks:
            returned, error, difference = rank[name]
            assert error.fields.get("file", Path(error.path).name) == damaged, (name, error)
            assert returned == str(error) and difference == 0, name
    assert not list(tmp_path.glob("*/*/ran")), "code of a checkpoint ran"
