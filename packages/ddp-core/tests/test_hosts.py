"""Several hosts, as network namespaces with a switch between them; one of them vanishes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import pid_is_alive, slack, wait_until
from distributed import Client
from network import INTERFACE, Network, why_not

from ddp_core import Job, LaunchOptions, WorkerLostError, current_rank, launch

pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or "hosts can be made"),
]

FAST = LaunchOptions(grace_s=2)
PORT = 8786
# Two workers on host a, one on host b.
WORKERS = {"a1": "a", "a2": "a", "b1": "b"}


class Hosts:
    """A Dask cluster on three hosts."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self._folder = folder
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"tcp://{network.address('s')}:{PORT}"
        self._dask("s", "scheduler", "--port", str(PORT))

    def pids(self) -> set[int]:
        """The processes of Dask's workers."""
        return {worker.pid for worker in self._workers.values()}

    def workers(self, client: Client) -> dict[str, str]:
        """Name and address of each worker that the scheduler counts."""
        untyped: Any = client
        known = untyped.sync(client.scheduler.identity, n_workers=-1)["workers"]
        return {str(info["name"]): address for address, info in known.items()}

    def complete(self, client: Client) -> None:
        """Bring back what a test has cut off."""
        self.network.reappear("b")
        if "b1" in self._workers:
            self._stop("b1")
        wait_until(lambda: "b1" not in self.workers(client))
        for name, host in WORKERS.items():
            if name not in self._workers:
                options = ("--name", name, "--nthreads", "1", "--no-nanny")
                self._workers[name] = self._dask(host, "worker", self.address, *options)
        wait_until(lambda: set(self.workers(client)) == set(WORKERS), 60)

    def log(self, name: str) -> str:
        """What a worker has written, and the stacks of its threads."""
        self._workers[name].send_signal(signal.SIGUSR1)
        time.sleep(1)
        return (self._folder / f"{WORKERS[name]}.log").read_text()

    def _stop(self, name: str) -> None:
        worker = self._workers.pop(name)
        worker.kill()
        worker.wait()

    def _dask(self, host: str, what: str, *words: str) -> subprocess.Popen[bytes]:
        code = (
            "import faulthandler, signal; faulthandler.register(signal.SIGUSR1);"
            f"from distributed.cli.dask_{what} import main; main()"
        )
        here = ("--host", self.network.address(host), "--no-dashboard")
        return self.network.start(host, self._folder / f"{host}.log", "-c", code, *words, *here)


@pytest.fixture(scope="module")
def cluster_of_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Network.made("s", "a", "b") as network:
        yield Hosts(network, tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def hosts(cluster_of_hosts: Hosts) -> Iterator[tuple[Hosts, Client]]:
    with Client(cluster_of_hosts.address, timeout=60) as client:
        cluster_of_hosts.complete(client)
        yield cluster_of_hosts, client


def train(folder: str, steps: int = 10**9) -> int:
    """Train a real DDP model; the file ``step-RANK-ATTEMPT`` says that it goes on."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    me = current_rank()
    Path(folder, f"pid-{me.rank}-{me.attempt}").write_text(str(os.getpid()))
    for step in range(steps if me.attempt == 0 else 10):
        model(torch.ones(2, 4)).sum().backward()
        if step == 3:
            Path(folder, f"step-{me.rank}-{me.attempt}").touch()
    return me.world_size


def pids_of_training(job: Job, folder: Path) -> list[int]:
    def is_training() -> bool:
        assert job.state not in ("failed", "cancelled")
        return len(list(folder.glob("step-*-0"))) == len(WORKERS)

    wait_until(is_training, 60)
    return [int((folder / f"pid-{rank}-0").read_text()) for rank in range(len(WORKERS))]


def test_ranks_are_numbered_host_by_host_and_train_over_the_workers_interface(
    hosts: tuple[Hosts, Client],
) -> None:
    def look() -> Any:
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE")
        numbers = [int(os.environ[name]) for name in names]
        gradient = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        return numbers, gradient, os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"]

    cluster, client = hosts
    found = launch(client, look).result(90)
    assert [numbers for numbers, *_ in found] == [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 1, 1, 2]]
    assert all(gradient == found[0][1] for _, gradient, *_ in found)
    assert {name for _, _, name, _ in found} == {INTERFACE}
    assert {master for *_, master in found} == {cluster.network.address("a")}


def test_store_and_gloo_listen_on_the_workers_address_only(
    hosts: tuple[Hosts, Client], tmp_path: Path
) -> None:
    cluster, client = hosts
    job = launch(client, train, args=(str(tmp_path),), options=FAST)
    pids_of_training(job, tmp_path)
    for host in ("a", "b"):
        # Dask's own pages are on every interface; they are not ours.
        ours = {
            address: pids
            for address, pids in cluster.network.listeners(host).items()
            if not pids & cluster.pids()
        }
        n_ranks = sum(h == host for h in WORKERS.values())
        assert len(ours) >= n_ranks + (host == "a"), "each rank listens for gloo, and the store"
        assert {a.rpartition(":")[0] for a in ours} == {cluster.network.address(host)}
    job.cancel()
    wait_until(lambda: job.state == "cancelled")


def test_a_host_that_vanishes_is_lost_and_the_next_job_does_without_it(
    hosts: tuple[Hosts, Client], tmp_path: Path
) -> None:
    cluster, client = hosts
    job = launch(client, train, args=(str(tmp_path),), options=FAST)
    *near, far = pids_of_training(job, tmp_path)
    cluster.network.vanish("b")
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match="its host does not answer") as caught:
        job.result(90)
    assert time.monotonic() - began < (15 + FAST.grace_s) * slack()
    assert caught.value.host == cluster.network.address("b")
    assert not [pid for pid in near if pid_is_alive(pid)]
    assert launch(client, dist.get_world_size).result(60) == [2, 2]
    cluster.network.reappear("b")
    wait_until(lambda: not pid_is_alive(far), 60, lambda: cluster.log("b1"))


def test_a_job_goes_on_where_the_other_hosts_are(
    hosts: tuple[Hosts, Client], tmp_path: Path
) -> None:
    cluster, client = hosts
    options = LaunchOptions(grace_s=2, max_restarts=1)
    job = launch(client, train, args=(str(tmp_path),), options=options)
    pids_of_training(job, tmp_path)
    cluster.network.vanish("b")
    assert job.result(120) == [2, 2]
    assert job.attempt == 1


def test_a_job_that_starts_before_anybody_has_noticed_does_not_wait_for_the_host(
    hosts: tuple[Hosts, Client], tmp_path: Path
) -> None:
    cluster, client = hosts
    cluster.network.vanish("b")
    began = time.monotonic()
    with pytest.raises(WorkerLostError):
        launch(client, train, args=(str(tmp_path),), options=FAST).result(90)
    assert time.monotonic() - began < (15 + FAST.grace_s) * slack()
    assert launch(client, train, args=(str(tmp_path), 3), options=FAST).result(60) == [2, 2]
