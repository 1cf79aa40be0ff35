"""What a launch must leave as it was, in the processes of a Dask cluster."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from distributed import Client

from ddp_core._coordinator import Coordinator

# Pools of Dask's own, which it fills when it likes.
_DASKS = ("Dask-", "TCP-Executor", "Profile", "IO loop", "AsyncProcess", "asyncio_", "Offload")


def look(client: Client, ports: Iterable[int] = ()) -> dict[str, dict[str, Any]]:
    """The state of the scheduler and of every worker.

    Args:
        client: Of the cluster.
        ports: More ports of Dask's own processes, as of such that have gone.
    """
    ports = client.run_on_scheduler(dask_ports).union(ports)
    seen = {"scheduler": client.run_on_scheduler(scheduler_state)}
    return {**seen, **client.run(worker_state, ports)}


def changes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> list[tuple[Any, ...]]:
    """What differs; a worker that was not there before is compared with one that was."""
    pattern = next(state for name, state in before.items() if name != "scheduler")
    return [
        (where, what, before.get(where, pattern)[what], now)
        for where, state in after.items()
        for what, now in state.items()
        if before.get(where, pattern)[what] != now and (where in before or what not in _OWN)
    ]


def survivors(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What was seen now of the scheduler and of those processes that were there before."""
    return {
        name: state
        for name, state in after.items()
        if name in before and state.get("pid") == before[name].get("pid")
    }


# What one worker has in its own way.
_OWN = ("pid", "environ", "files", "listening")


def scheduler_state(dask_scheduler: Any) -> dict[str, Any]:
    plugin = dask_scheduler.plugins.get(Coordinator.name)
    return {
        "tasks": sorted(map(str, dask_scheduler.tasks)),
        "jobs": sorted(plugin.jobs) if plugin else [],
        "keys": sorted(plugin.keys) if plugin else [],
        "leaving": sorted(plugin.leaving) if plugin else [],
    }


def dask_ports(dask_scheduler: Any) -> set[int]:
    """The ports at which Dask's own processes are connected with one another."""
    addresses = [dask_scheduler.address]
    for worker in dask_scheduler.workers.values():
        addresses += [worker.address, worker.nanny or worker.address]
    return {int(address.rpartition(":")[2]) for address in addresses}


def worker_state(ports: set[int], dask_worker: Any) -> dict[str, Any]:
    process = psutil.Process()
    connections = process.net_connections("inet")
    names = Counter(re.sub(r"[\d._-]+", "-", t.name) for t in threading.enumerate())
    return {
        "pid": process.pid,
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "tasks": sorted(map(str, dask_worker.state.tasks)),
        "data": sorted(map(str, dask_worker.data)),
        "threads": {n: count for n, count in names.items() if not n.startswith(_DASKS)},
        "children": [c.pid for c in process.children(recursive=True) if not _is_nursery(c)],
        "files": Counter(kind for fd in _descriptors() if (kind := _kind(fd)) != "socket"),
        "unix sockets": len(process.net_connections("unix")),
        "listening": sorted(c.laddr for c in connections if c.status == psutil.CONN_LISTEN),
        "connected": sorted(
            (c.laddr, c.raddr)
            for c in connections
            if c.raddr and not {c.laddr.port, c.raddr.port} & ports
        ),
        "process group": _has_process_group(),
    }


def _is_nursery(process: psutil.Process) -> bool:
    """Whether it is the process that may stay, or has gone since it was listed."""
    try:
        return any("_nursery" in word for word in process.cmdline())
    except psutil.Error:
        return True


def _descriptors() -> list[str]:
    return [str(fd) for fd in Path("/proc/self/fd").iterdir()]


def _kind(fd: str) -> str:
    """What a descriptor leads to: a path, or the kind of what has none."""
    try:
        target = os.readlink(fd)
    except OSError:
        return "socket"
    return re.sub(r":\[\d+\]$", "", target)


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_initialized())
