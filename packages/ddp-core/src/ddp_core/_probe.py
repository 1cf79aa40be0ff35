"""What doctor asks of other processes. Sent by value: imports nothing of this package."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "dask", "distributed", "cloudpickle", "ddp-core")


def versions() -> dict[str, str]:
    """Versions in this process, ``"-"`` where a package is missing."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def listen(host: str, peers: int, seconds: float) -> int:
    """Accept one connection of each peer, or wait so long for the next; returns the port."""
    server = socket.create_server((host, 0), family=_family(host))
    server.settimeout(seconds)

    def accept() -> None:
        with server:
            try:
                for _ in range(peers):
                    server.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=accept, name="ddp-doctor-listen", daemon=True).start()
    return int(server.getsockname()[1])


def reach(host: str, port: int, seconds: float) -> str:
    """Connect; the empty string, or why it failed."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as exc:
        return str(exc)
    return ""


def devices() -> str:
    """CUDA devices that torch sees here, asked in a process of its own."""
    code = "import torch; print(torch.cuda.device_count(), torch.distributed.is_nccl_available())"
    return _python(code)


def imports(module: str) -> str:
    """Import a module as a rank would; ``"ok"``, or the error."""
    return _python(f"import {module}; print('ok')")


def _python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    text = done.stdout if done.returncode == 0 else done.stderr
    return text.strip().splitlines()[-1] if text.strip() else f"exit code {done.returncode}"


def _family(host: str) -> Any:
    return socket.getaddrinfo(host, None)[0][0]
