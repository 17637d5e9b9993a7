"""Validate the manifests against KubeRay's own schemas.

python -m tests.launch.kuberay_schemas                     downloads the schemas, and checks their digests
python -m tests.launch.kuberay_schemas --folder FOLDER     reads the downloaded files from a folder
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.launch.manifests import ray_documents

RELEASE = "v1.7.0"
URL = f"https://raw.githubusercontent.com/ray-project/kuberay/{RELEASE}/ray-operator/config/crd/bases/"
DIGESTS = {
    "ray.io_rayclusters.yaml": "c44704442eef0c6721ad40c1d66782c8bd3fdab9d3344306a5820910a679baa1",
    "ray.io_rayjobs.yaml": "01a5cf3b17c1769fda44af7e82debcd98722f0c27b9ab84d084681c6649121f5",
}
FILE_OF_KIND = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}


def main(arguments: list[str]) -> int:
    """Print a line for every document, and its errors; return 1 if there are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder with the files of the schemas")
    folder = parser.parse_args(arguments).folder
    schemas = {kind: schema_of(read(file, folder)) for kind, file in FILE_OF_KIND.items()}
    failed = False
    for name, document in ray_documents():
        errors = list(errors_of(document, schemas[document["kind"]]))
        failed |= bool(errors)
        sys.stdout.write(f"{name}: {document['kind']} of KubeRay {RELEASE}: {len(errors)} errors\n")
        sys.stdout.writelines(f"  {error}\n" for error in errors)
    return 1 if failed else 0


def read(file: str, folder: Path | None) -> bytes:
    """Return a file of the release, from the network or a folder; raise ValueError if its digest is another."""
    if folder is None:
        with urllib.request.urlopen(URL + file, timeout=60) as response:
            content = response.read()
    else:
        content = (folder / file).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != DIGESTS[file]:
        raise ValueError(f"{file} has the digest {digest}; expected {DIGESTS[file]}, that of KubeRay {RELEASE}")
    return bytes(content)


def schema_of(definition: bytes) -> dict[str, Any]:
    """Return the schema of version v1 of a custom resource, in which an unknown field is an error."""
    versions = yaml.load(definition, yaml.CSafeLoader)["spec"]["versions"]
    [schema] = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    schema = without_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # every object has its fields
    return schema


def without_unknown_fields(schema: Any) -> Any:
    """Return the schema with ``additionalProperties: false`` wherever it lists the fields of an object."""
    if isinstance(schema, list):
        return [without_unknown_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: without_unknown_fields(value) for key, value in schema.items()}
    if isinstance(strict.get("properties"), dict) and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def errors_of(document: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """Yield the path and message of every error."""
    for error in jsonschema.Draft7Validator(schema).iter_errors(document):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
