"""One cluster for the whole session, and the check that a test leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from distributed import Client, LocalCluster

from ddp_core import LaunchOptions, launch


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        # torch's event loop keeps two descriptors from the first store on; that is no leak.
        with Client(cluster) as client:
            launch(client, dist.get_rank).result(60)
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of two healthy workers, which afterwards are as they were before."""
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=30)
        yield client


@pytest.fixture
def fresh() -> Iterator[Client]:
    """A client of a cluster of its own, whose workers may be killed."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def fast() -> LaunchOptions:
    return LaunchOptions(grace_s=2, rendezvous_timeout_s=40)


def worker_state(dask_worker: Any) -> dict[str, Any]:
    """What a launch must not change in a worker."""
    import psutil

    ours = [t.name for t in threading.enumerate() if t.name.startswith("ddp-")]
    process = psutil.Process()
    return {
        "environ": dict(os.environ),
        "threads": ours,
        "children": [c.pid for c in process.children(recursive=True)],
        "pipes": sum("pipe:" in _target(fd) or "memfd" in _target(fd) for fd in _fds()),
    }


def _fds() -> list[str]:
    return os.listdir("/proc/self/fd")


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.fixture
def untouched(client: Client) -> Iterator[None]:
    """The workers' environment, children, threads and pipes are afterwards what they were."""
    before = client.run(worker_state)
    yield
    wait_until(
        lambda: not changes(before, client.run(worker_state)),
        10,
        lambda: changes(before, client.run(worker_state)),
    )


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Any]:
    return [
        (worker, key, before[worker][key], value)
        for worker, state in after.items()
        for key, value in state.items()
        if before.get(worker, state)[key] != value
    ]


def wait_until(
    condition: Callable[[], object], bound_s: float = 20, seen: Callable[[], object] | None = None
) -> None:
    deadline = time.monotonic() + bound_s * slack()
    while not condition():
        assert time.monotonic() < deadline, f"not within {bound_s} s; now: {seen and seen()}"
        time.sleep(0.05)


def slack() -> float:
    """How much longer things may take because the machine is busy with something else."""
    return max(3.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def pid_is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
