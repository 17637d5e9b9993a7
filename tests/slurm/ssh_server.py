"""An ssh server on this machine, with separate keys, that stands for a second machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PORT = 17022


@contextmanager
def ssh_server(directory: Path, host: str) -> Iterator[str]:
    """Yield an ssh command that reaches the server as ``host``, as long as the context lasts."""
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    (directory / "sshd_config").write_text(
        f"Port {PORT}\nListenAddress 127.0.0.1\nHostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nPidFile none\n"
    )
    (directory / "ssh_config").write_text(
        f"Host {host}\nHostName 127.0.0.1\nPort {PORT}\nUser root\nIdentityFile {directory}/user\nBatchMode yes\n"
        f"StrictHostKeyChecking accept-new\nUserKnownHostsFile {directory}/known_hosts\nLogLevel ERROR\n"
    )
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin") or "/usr/sbin/sshd"
    log = directory / "sshd.log"
    server = subprocess.Popen([program, "-D", "-f", directory / "sshd_config", "-E", log])
    try:
        yield f"ssh -F {directory / 'ssh_config'}"
    finally:
        server.terminate()
        server.wait()
