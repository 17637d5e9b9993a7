"""The command that Ray starts the worker processes of a group with."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from mcontroller.ray.warm_start import client

OF_ANOTHER_INTERPRETER = ("pip", "conda", "uv", "container", "image_uri", "py_executable", "worker_process_setup_hook")
"""Fields of a runtime environment whose processes run another interpreter, or code of the user before Ray's."""

_NODE_PYTHON = r'tr "\0" "\n" < /proc/$PPID/cmdline | sed -n "s/^--python_worker_command=\([^ ]*\) .*/\1/p"'
"""The interpreter of the node's raylet, which is the parent process; the path of the driver's may differ."""


def with_warm_start(options: Mapping[str, Any], imports: Iterable[str] = ()) -> dict[str, Any]:
    """Return Ray's options for an actor whose process is forked from the warm parent of its node.

    A node that does not have this package at the same path starts the process as Ray does.

    Args:
        options: Ray's options.
        imports: modules that the parent imports too, from the files that this process has imported them from.

    Options whose runtime environment has another interpreter are returned unchanged, as are all options on a
    system other than Linux.
    """
    environment = dict(options.get("runtime_env") or {})
    inherited = ray.get_runtime_context().runtime_env
    fields = {**inherited, **environment}
    if not sys.platform.startswith("linux") or any(fields.get(field) for field in OF_ANOTHER_INTERPRETER):
        return dict(options)
    threads = str(max(int(options.get("num_cpus") or 1), 1))
    # Ray logs the command of every process, so it names the client's file rather than its text.
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in imports}
    warm = ",".join(sorted(f"{name}:{os.path.abspath(file)}" for name, file in files.items() if file))
    script = (
        f'export {client.WARM_IMPORTS}={shlex.quote(warm)}; P=$({_NODE_PYTHON}); P="${{P:-{sys.executable}}}"; '
        f'if [ -f "$0" ]; then exec "$P" -S -P "$0" {threads} "$@"; fi; exec "$P" "$@"'
    )
    environment["py_executable"] = f"sh -c {shlex.quote(script)} {shlex.quote(os.path.abspath(client.__file__))}"
    return {**options, "runtime_env": environment}
