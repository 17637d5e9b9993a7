"""The manifests of ``launch/kuberay/``: their documents, and the parts that the core of Kubernetes defines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "launch" / "kuberay").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a manifest."""
    return list(yaml.safe_load_all(path.read_text()))


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of the Ray cluster in a RayCluster or RayJob."""
    return document["spec"] if document["kind"] == "RayCluster" else document["spec"]["rayClusterSpec"]


def ray_documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield file name and document of every RayCluster and RayJob."""
    for path in FILES:
        for document in documents(path):
            if document["apiVersion"] == "ray.io/v1":
                yield path.name, document


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates of head and workers as core objects."""
    spec = cluster_spec(document)
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        for group in groups
    ]
