"""Pack what a GPU machine without a network needs: ``python launch/offline/pack.py FOLDER [base te vllm ray]``.

For Python 3.12 on x86-64 with torch 2.11 and CUDA 13 already there, on a machine whose pip reaches an index. Each name
becomes ``FOLDER/NAME.tar.xz.00``, ``.01`` and so on, of at most ``--part-mb`` each; ``unpack.sh`` there joins them into
a folder for PYTHONPATH. Kernels for other GPU architectures than ``--arch``, and symbols for debuggers, are left out of
libraries: the core of Transformer Engine takes 25 MB instead of 276, vLLM's libraries 27 instead of 290.

``te`` needs ``--te-wheel``, a wheel of transformer_engine_torch for that torch, which pip compiles where the compiler
of CUDA is: ``NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_CUDA_ARCHS=90 pip wheel --no-deps --no-build-isolation
transformer_engine_torch==2.20.2``.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = {
    "base": (
        "megatron-core==0.16.1 tensordict==0.15.3 pyvers orjson cloudpickle omegaconf==2.4.0"
        " antlr4-python3-runtime==4.13.2 pyzmq rich psutil"
    ),
    "te": (
        "transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 pydantic pydantic-core annotated-types"
        " typing-inspection importlib-metadata zipp nvdlfw-inspect nvidia-cudnn-frontend"
    ),
    "vllm": (
        "vllm==0.26.0 cloudpickle cachetools cbor2 fastapi starlette msgspec openai jiter distro sniffio"
        " openai-harmony partial-json-parser pybase64 pyzmq xgrammar==0.2.2 apache-tvm-ffi==0.1.10"
        " opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions"
        " opentelemetry-semantic-conventions-ai blake3 lm-format-enforcer interegular llguidance"
        " outlines-core==0.2.14 lark==1.2.2 compressed-tensors==0.17.0 loguru depyf==0.20.0 astor dill"
        " watchfiles python-json-logger ijson setproctitle gguf prometheus-fastapi-instrumentator pydantic"
        " pydantic-core annotated-types typing-inspection jsonschema jsonschema-specifications referencing"
        " rpds-py mcp python-dotenv model-hosting-container-standards pydantic-settings sse-starlette"
        " docstring-parser httpx-sse httpx2 uvicorn python-multipart httptools nvtx cuda-python diskcache psutil"
    ),
    "ray": "ray==2.60.0 msgpack jsonschema jsonschema-specifications referencing rpds-py",
}
UNUSED = {
    "vllm": (
        "vllm/vllm-rs vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
        " xgrammar/lib/libxgrammar.a"
    ),
    "te": "transformer_engine/jax",
    "ray": "ray/jars ray/dashboard/client ray/rllib ray/llm ray/serve ray/tune",
}
TARGET = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
VERSIONS = ("_2_39", "_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")
FAT_BINARY = struct.pack("<I", 0xBA55ED50)


def keep_architecture(library: Path, architecture: int) -> None:
    """Fill the kernels for all other GPU architectures with zeros, which take no room in an archive."""
    data, at = bytearray(library.read_bytes()), 0
    while (at := data.find(FAT_BINARY, at)) >= 0:
        _, version, head, size = struct.unpack_from("<IHHQ", data, at)
        if version != 1 or head != 16 or size > len(data) - at:
            at += 4
            continue
        entry, end = at + head, at + head + size
        while entry < end:
            _, _, header, payload = struct.unpack_from("<HHIQ", data, entry)
            if struct.unpack_from("<I", data, entry + 28)[0] != architecture:
                data[entry + header : entry + header + payload] = bytes(payload)
            entry += header + payload
        at = end
    library.write_bytes(data)


def install(name: str, site: Path) -> None:
    """Install the packages of a name into a folder, each without what it depends on."""
    platforms = [f"--platform=manylinux{version}_x86_64" for version in VERSIONS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([*pip, *TARGET, *platforms, *PACKAGES[name].split()], check=True)


def shrink(name: str, site: Path, architecture: int) -> None:
    """Leave out what a machine with this architecture does not use."""
    for path in UNUSED.get(name, "").split():
        shutil.rmtree(site / path, ignore_errors=True) if (site / path).is_dir() else (site / path).unlink(True)
    for library in site.rglob("*.so*"):
        if library.stat().st_size > 300_000:
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False, stderr=subprocess.DEVNULL)
            keep_architecture(library, architecture)


def main() -> None:
    """Write the archives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(PACKAGES), help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--arch", type=int, default=90, help="compute capability x 10")
    parser.add_argument("--part-mb", type=int, default=50)
    parser.add_argument("--te-wheel", type=Path, help="transformer_engine_torch, for te")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - PACKAGES.keys()):
        parser.error(f"there is no {', '.join(unknown)}: the names are {', '.join(PACKAGES)}")
    if "te" in options.names and options.te_wheel is None:
        parser.error("te needs --te-wheel: see --help")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        with tempfile.TemporaryDirectory() as temporary:
            site = Path(temporary)
            install(name, site)
            if name == "te":
                shutil.unpack_archive(str(options.te_wheel), str(site), "zip")
            shrink(name, site, options.arch)
            pack = f'tar -C "{site}" --exclude=__pycache__ -c . | xz -T0 -6 | split -b {options.part_mb}m -d - "$0"'
            subprocess.run(["bash", "-o", "pipefail", "-c", pack, f"{options.folder / name}.tar.xz."], check=True)
        parts = sorted(options.folder.glob(f"{name}.tar.xz.*"))
        sys.stdout.write(f"{name}: {len(parts)} parts, {sum(part.stat().st_size for part in parts) / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
