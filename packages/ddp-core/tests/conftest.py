"""One cluster for the whole session, and the check that a test leaves nothing behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from distributed import Client, LocalCluster
from leaks import changes, dask_ports, look, survivors

from ddp_core import LaunchOptions, launch


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        # The first launch starts the nursery, which may stay.
        with Client(cluster) as client:
            launch(client, dist.get_rank).result(60)
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of two healthy workers, which afterwards are exactly as they were before."""
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=30)
        before = look(client)
        yield client
    with Client(cluster) as after:
        wait_until(
            lambda: not changes(before, look(after)), 10, lambda: changes(before, look(after))
        )


@pytest.fixture
def fresh() -> Iterator[Client]:
    """A client of a cluster of its own, whose workers may be killed.

    The scheduler, and the workers that survive, are afterwards exactly as they were before.
    """
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        # The first launch starts the nursery, which may stay.
        launch(client, dist.get_rank).result(60)
        before, ports = look(client), client.run_on_scheduler(dask_ports)
        yield client
        with Client(cluster) as after:

            def left() -> list[Any]:
                gc.collect()  # an error that was raised holds frames, and these hold futures
                try:
                    return changes(before, survivors(before, look(after, ports)))
                except OSError as exc:
                    # A worker goes while it is looked at.
                    return [exc]

            wait_until(lambda: not left(), 10, left)


@pytest.fixture
def fast() -> LaunchOptions:
    return LaunchOptions(grace_s=2, rendezvous_timeout_s=40)


@pytest.fixture
def untouched(client: Client) -> None:
    """For a test that does not take the client itself: the workers are checked all the same."""


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
