"""Clusters at addresses other than 127.0.0.1, encrypted ones, and many small workers."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from certificates import certificate
from distributed import Client, LocalCluster

from ddp_core import LaunchOptions, current_rank, launch

pytestmark = pytest.mark.xdist_group("cluster")

PAIR = LaunchOptions(n_ranks=2, ranks_per_worker=2, grace_s=2)


@contextmanager
def cluster_at(host: str, n_workers: int = 1, **more: Any) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            host=f"[{host}]" if ":" in host else host,
            dashboard_address=":0",
            **more,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def outer_address() -> str:
    """An address of this machine that others could reach; the empty string without a network."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            is_v4 = address.family == socket.AF_INET
            if is_v4 and psutil.net_if_stats()[name].isup:
                found = ipaddress.ip_address(address.address)
                if not found.is_loopback and not found.is_link_local:
                    return str(found)
    return ""


def train() -> Any:
    """Take a step with a real DDP model; tell where this rank and its store listen."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    port = int(os.environ["MASTER_PORT"])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    store = [c.laddr.ip for c in listening if c.laddr.port == port]
    own = [c.laddr.ip for c in listening if c.pid == os.getpid()]
    dist.barrier()
    return current_rank().host, os.environ["MASTER_ADDR"], store, own


@pytest.mark.parametrize("host", ["::1", "127.0.0.2", outer_address()])
def test_ranks_and_their_store_listen_where_the_worker_does(host: str) -> None:
    if not host:
        pytest.skip("this machine has no address but the loopback")
    with cluster_at(host) as client:
        found = launch(client, train, options=PAIR).result(60)
    interface = next(
        addresses
        for addresses in psutil.net_if_addrs().values()
        if any(a.address == ("127.0.0.1" if host == "127.0.0.2" else host) for a in addresses)
    )
    for rank_host, master, store, own in found:
        assert (rank_host, master, store) == (host, host, [host])
        # Gloo takes the first address of the worker's interface.
        assert set(own) <= {a.address for a in interface} | {host}


def test_a_rank_reaches_an_encrypted_scheduler(tmp_path: Path) -> None:
    def ask() -> tuple[str, int]:
        with Client() as inner:
            return inner.scheduler.address, dist.get_world_size()

    with cluster_at("127.0.0.1", security=certificate(tmp_path), protocol="tls://") as client:
        address = client.scheduler.address
        assert address.startswith("tls://")
        assert launch(client, ask, options=PAIR).result(60) == [(address, 2)] * 2


@pytest.fixture(scope="module")
def six() -> Iterator[Client]:
    with cluster_at("127.0.0.1", 6, memory_limit=None) as client:
        yield client


def addresses_of(client: Client) -> dict[str, str]:
    untyped: Any = client
    known = untyped.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return {str(info["name"]): address for address, info in known.items()}


def test_six_thin_workers_give_a_world_of_six(six: Client) -> None:
    assert launch(six, dist.get_rank).result(90) == list(range(6))


def test_workers_are_chosen_by_name_address_or_host(six: Client) -> None:
    def worker() -> str:
        return os.environ["WORLD_SIZE"]

    known = addresses_of(six)
    for wanted, size in (
        (["1", 2], 2),
        ([known["3"], known["4"].removeprefix("tcp://"), "3"], 2),
        (["127.0.0.1"], 6),
    ):
        job = launch(six, worker, options=LaunchOptions(workers=wanted))
        assert job.result(90) == [str(size)] * size


def test_a_cluster_started_inside_a_rank_has_ranks_of_its_own() -> None:
    def outer() -> tuple[Any, ...]:
        def inner() -> tuple[int, str]:
            return current_rank().world_size, current_rank().job_id

        with cluster_at("127.0.0.2") as client:
            ((size, job),) = launch(client, inner).result(60)
        return size, job != current_rank().job_id, current_rank().world_size

    with cluster_at("127.0.0.1") as client:
        assert launch(client, outer, options=PAIR).result(90) == [(1, True, 2)] * 2
