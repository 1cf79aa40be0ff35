"""A Dask cluster as its users start one by hand: ``dask scheduler`` and ``dask worker``."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from distributed import Client


@contextmanager
def cluster_with_fixed_ports(
    stderr: int | IO[bytes] | None = subprocess.DEVNULL,
) -> Iterator[tuple[Client, Callable[[int], object]]]:
    """A scheduler and two workers without nannies.

    Args:
        stderr: That of the workers; ``None`` for workers in which it is closed.

    Yields:
        A client, and what starts another worker on a port.
    """
    port = free_port()
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started: list[subprocess.Popen[bytes]] = []

    def spawn(what: str, *arguments: str, stderr: int | IO[bytes] | None) -> None:
        module = f"from distributed.cli.dask_{what} import main; main()"
        command = [sys.executable, "-c", module, "--host", "127.0.0.1", *arguments]
        if stderr is None:
            command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
        started.append(subprocess.Popen(command, env=env, stderr=stderr))

    def start_worker(worker_port: int) -> None:
        spawn(
            "worker", f"tcp://127.0.0.1:{port}", "--no-nanny", "--nthreads", "1",
            "--worker-port", str(worker_port), "--no-dashboard", "--death-timeout", "30",
            stderr=stderr,
        )  # fmt: skip

    try:
        spawn("scheduler", "--port", str(port), "--no-dashboard", stderr=subprocess.DEVNULL)
        start_worker(free_port())
        start_worker(free_port())
        with Client(f"tcp://127.0.0.1:{port}", timeout=30) as client:
            client.wait_for_workers(2, timeout=30)
            yield client, start_worker
    finally:
        for process in started:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port below those that the system gives to outgoing connections, so that it stays free."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
