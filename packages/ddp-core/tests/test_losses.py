"""Workers, clients and hosts that go away while a job runs. Each test has a cluster of its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
import torch.distributed as dist
from commandline import cluster_with_fixed_ports
from conftest import pid_is_alive, slack, wait_until
from distributed import Client, LocalCluster, wait
from distributed.diagnostics.plugin import SchedulerPlugin

from ddp_core import (
    GangTimeoutError,
    JobCancelledError,
    LaunchOptions,
    RankFailedError,
    RendezvousError,
    WorkerLostError,
    current_rank,
    launch,
    run,
)
from ddp_core._submit import gather

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]

FAST = LaunchOptions(grace_s=2)


def train(folder: str, steps: int = 10**9) -> int:
    """Train a real DDP model; the file ``step-RANK`` says that it goes on."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    rank = dist.get_rank()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        if step == 3:
            Path(folder, f"step-{rank}").touch()
    return rank


def read(path: Path) -> int:
    return int(path.read_text())


def wait_for_training(folder: Path) -> list[int]:
    wait_until(lambda: len(list(folder.glob("step-*"))) == 2, 40)
    return [read(folder / f"pid-{rank}") for rank in (0, 1)]


def assert_gone(pids: list[int]) -> None:
    assert not [pid for pid in pids if pid_is_alive(pid)]


def worker_pids(client: Client) -> dict[str, int]:
    return dict(client.run(os.getpid))


def kill_worker(client: Client, job: Any, rank: int) -> float:
    address = job._plan[rank].worker
    os.kill(worker_pids(client)[address], signal.SIGKILL)
    return time.monotonic()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_named_and_all_ranks_go(
    fresh: Client, tmp_path: Path, rank: int
) -> None:
    job = launch(fresh, train, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    began = kill_worker(fresh, job, rank)
    with pytest.raises(WorkerLostError) as caught:
        job.result(60)
    assert time.monotonic() - began < (6 + FAST.grace_s) * slack()
    assert caught.value.worker == job._plan[rank].worker
    assert_gone(pids)
    # The nanny starts another worker; the next job finds it.
    fresh.wait_for_workers(2, timeout=30)
    assert launch(fresh, dist.get_rank).result(60) == [0, 1]


def test_the_futures_of_run_end_when_a_worker_is_killed(fresh: Client, tmp_path: Path) -> None:
    futures = run(fresh, train, str(tmp_path))
    wait_for_training(tmp_path)
    os.kill(next(iter(worker_pids(fresh).values())), signal.SIGKILL)
    for future in futures:
        assert isinstance(future.exception(timeout=30), WorkerLostError)


def test_the_futures_of_run_fail_when_a_worker_goes_that_has_returned(fresh: Client) -> None:
    """Dask would wait for ever for the worker to come back and compute the result again."""
    futures = run(fresh, dist.get_rank)
    wait(futures, timeout=60)
    [lost] = fresh.who_has(futures[1])[futures[1].key]
    os.kill(worker_pids(fresh)[lost], signal.SIGKILL)
    wait_until(lambda: futures[1].status == "error", 30)
    assert isinstance(futures[1].exception(), WorkerLostError)
    assert futures[0].result(timeout=30) == 0


def test_a_retired_worker_is_named(fresh: Client, tmp_path: Path) -> None:
    job = launch(fresh, train, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    began = time.monotonic()
    fresh.retire_workers([job._plan[1].worker], close_workers=True)
    with pytest.raises(WorkerLostError):
        job.result(60)
    assert time.monotonic() - began < (6 + FAST.grace_s) * slack()
    assert_gone(pids)


def test_a_worker_that_is_scaled_away_is_named(fresh: Client, tmp_path: Path) -> None:
    job = launch(fresh, train, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    began = time.monotonic()
    fresh.cluster.scale(1)
    with pytest.raises(WorkerLostError):
        job.result(60)
    assert time.monotonic() - began < (6 + FAST.grace_s) * slack()
    assert_gone(pids)


def test_restarting_the_cluster_loses_the_workers(fresh: Client, tmp_path: Path) -> None:
    job = launch(fresh, train, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    fresh.restart(timeout=60)
    with pytest.raises(WorkerLostError, match="the cluster was restarted"):
        job.result(60)
    assert_gone(pids)
    assert launch(fresh, dist.get_rank).result(60) == [0, 1]


def test_jobs_that_may_start_again_do_so_after_the_cluster_was_restarted(
    fresh: Client, tmp_path: Path
) -> None:
    """The one that runs and the one that waits; on an old worker either would be lost again."""

    def first_for_ever() -> int:
        me = current_rank()
        train(str(tmp_path), 10**9 if me.attempt == 0 else 5)
        return me.attempt

    once = LaunchOptions(grace_s=2, max_restarts=1)
    running = launch(fresh, first_for_ever, options=once)
    pids = wait_for_training(tmp_path)
    waiting = launch(fresh, lambda: current_rank().attempt, options=once)
    wait_until(lambda: len(fresh.cluster.scheduler.tasks) == 4)
    fresh.restart(timeout=60)
    assert running.result(60) == [1, 1]
    assert waiting.result(60) == [1, 1]
    assert_gone(pids)


def test_restarting_the_cluster_cancels_the_futures_of_run(fresh: Client, tmp_path: Path) -> None:
    futures = run(fresh, train, str(tmp_path))
    pids = wait_for_training(tmp_path)
    fresh.restart(timeout=60)
    assert all(future.cancelled() for future in futures)
    wait_until(lambda: not any(map(pid_is_alive, pids)), 6 + FAST.grace_s)


def test_results_that_went_with_their_worker_are_lost(fresh: Client) -> None:
    address = sorted(fresh.scheduler_info()["workers"])[0]
    future: Any = fresh.submit(os.getpid, workers=[address], pure=False)
    os.kill(future.result(30), signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        fresh.sync(gather, fresh, [future])


def test_results_that_went_with_a_restart_are_lost(fresh: Client) -> None:
    future: Any = fresh.submit(os.getpid, pure=False)
    future.result(30)
    fresh.restart(timeout=60)
    with pytest.raises(WorkerLostError, match="restarted"):
        fresh.sync(gather, fresh, [future])


def test_a_worker_that_stands_still_is_kept_and_its_owner_told(
    fresh: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped worker says nothing, but its host still answers."""
    job = launch(fresh, train, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    silent = worker_pids(fresh)[job._plan[1].worker]
    with caplog.at_level(logging.WARNING, "ddp_core"):
        os.kill(silent, signal.SIGSTOP)
        try:
            wait_until(lambda: "host answers" in caplog.text, 30)
            assert job.state == "running"
        finally:
            os.kill(silent, signal.SIGCONT)
    assert all(map(pid_is_alive, pids))
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(60)
    assert_gone(pids)


def test_a_killed_client_takes_its_ranks_along(fresh: Client, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from distributed import Client; from ddp_core import launch\n"
        "from test_losses import train\n"
        "launch(Client(sys.argv[2]), train, args=(sys.argv[3],)).result()"
    )
    here = str(Path(__file__).parent)
    arguments = [here, fresh.scheduler_info()["address"], str(tmp_path)]
    owner = subprocess.Popen([sys.executable, "-c", code, *arguments])
    try:
        pids = wait_for_training(tmp_path)
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not any(map(pid_is_alive, pids)), 2 + 5)
    assert launch(fresh, dist.get_rank).result(60) == [0, 1]


def test_a_rank_that_ignores_sigterm_goes_all_the_same(fresh: Client, tmp_path: Path) -> None:
    def stubborn(folder: str) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        train(folder)

    job = launch(fresh, stubborn, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    began = time.monotonic()
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(60)
    assert time.monotonic() - began < (2 + FAST.grace_s) * slack()
    assert_gone(pids)


def hold_the_gil(seconds: float) -> None:
    """Sleep in C without giving up the GIL."""
    import ctypes

    ctypes.PyDLL(None).sleep(int(seconds))


def holder(folder: str) -> None:
    """Look like a training rank, and hold the GIL."""
    Path(folder, f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    Path(folder, f"step-{dist.get_rank()}").touch()
    hold_the_gil(1000)


def test_a_rank_that_holds_the_gil_costs_the_worker_nothing_and_can_be_stopped(
    fresh: Client, tmp_path: Path
) -> None:
    job = launch(fresh, holder, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    workers = worker_pids(fresh)
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result((2 + 2 * FAST.grace_s) * slack())
    assert_gone(pids)
    assert worker_pids(fresh) == workers


def test_training_that_holds_the_gil_past_the_workers_time_to_live_goes_on() -> None:
    def held() -> int:
        hold_the_gil(60)
        return dist.get_rank()

    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "8s"}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        workers = worker_pids(client)
        assert launch(client, held).result(180) == [0, 1]
        assert worker_pids(client) == workers


def test_ranks_that_hold_the_gil_die_with_their_worker(fresh: Client, tmp_path: Path) -> None:
    job = launch(fresh, holder, args=(str(tmp_path),), options=FAST)
    pids = wait_for_training(tmp_path)
    kill_worker(fresh, job, 1)
    with pytest.raises(WorkerLostError):
        job.result(60)
    wait_until(lambda: not any(map(pid_is_alive, pids)), 5)


def in_work(client: Client) -> list[Any]:
    return [key for keys in client.processing().values() for key in keys]


def test_a_job_waits_for_busy_workers_and_says_for_whom(
    fresh: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = sorted(fresh.scheduler_info()["workers"])[0]
    release = tmp_path / "release"

    def someone_elses_long_task(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.05)

    busy = fresh.submit(someone_elses_long_task, str(release), workers=[address], pure=False)
    wait_until(lambda: busy.key in in_work(fresh))
    with caplog.at_level(logging.WARNING, "ddp_core"):
        job = launch(fresh, dist.get_rank)
        wait_until(lambda: "someone_elses_long_task" in caplog.text, 20)
    assert job.state == "waiting"
    release.touch()
    assert job.result(60) == [0, 1]


def test_workers_that_stay_busy_are_named_in_the_error(fresh: Client) -> None:
    slow = fresh.map(time.sleep, [8, 8.1], pure=False)
    wait_until(lambda: len(in_work(fresh)) == 2)
    with pytest.raises(GangTimeoutError, match="sleep"):
        launch(fresh, dist.get_rank, options=LaunchOptions(start_timeout_s=1)).result(60)
    del slow
    assert launch(fresh, dist.get_rank).result(60) == [0, 1]


@contextmanager
def mute_listener() -> Iterator[int]:
    """A foreign server that accepts and says nothing; torch's own timeout does not cover it."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield server.getsockname()[1]


def test_a_port_in_use_is_named(fresh: Client) -> None:
    with mute_listener() as port, pytest.raises(RendezvousError, match=f"{port}.*port=0"):
        launch(fresh, dist.get_rank, options=LaunchOptions(port=port)).result(60)


def test_a_port_may_be_asked_for(fresh: Client) -> None:
    with mute_listener() as port:
        pass
    ports = launch(
        fresh, lambda: int(os.environ["MASTER_PORT"]), options=LaunchOptions(port=port)
    ).result(60)
    assert ports == [port, port]


def test_a_rendezvous_that_does_not_complete_tells_the_state_of_each_rank(
    fresh: Client, tmp_path: Path
) -> None:
    """One rank hangs while torch is imported, as on a dead network file system."""
    lame = (
        "import os, time\nparent = os.getppid()\n"
        "while os.environ.get('RANK') == '1' and os.getppid() == parent: time.sleep(0.1)\n"
    )

    (tmp_path / "sitecustomize.py").write_text(lame)
    options = LaunchOptions(rendezvous_timeout_s=6, grace_s=1, env={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(RendezvousError, match="rank 1 starting"):
        launch(fresh, dist.get_rank, options=options).result(60)


def test_the_store_listens_on_the_workers_address_only(fresh: Client) -> None:
    import psutil

    def train() -> Any:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _listeners()

    def _listeners() -> list[tuple[str, int]]:
        return [
            (c.laddr.ip, c.laddr.port)
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        ]

    for host, port, listeners in launch(fresh, train).result(60):
        assert (host, port) in listeners
        assert (host, [ip for ip, p in listeners if p == port]) == ("127.0.0.1", ["127.0.0.1"])


def test_who_returns_first_is_told_to_those_who_wait(fresh: Client) -> None:
    def uneven() -> None:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(3 + dist.get_rank()):
            model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(RankFailedError, match=r"rank 0 had returned first: .*uneven") as caught:
        launch(fresh, uneven, options=FAST).result(60)
    assert caught.value.results == {0: None}


class Offered(SchedulerPlugin):
    """Notes which workers the scheduler may give away, each time that it is asked."""

    name = "offered"

    def __init__(self) -> None:
        self.offers: list[list[str]] = []

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        self.offers.append([worker.address for worker in workers])
        return workers


def test_an_adaptive_cluster_takes_no_worker_that_trains(fresh: Client, tmp_path: Path) -> None:
    """Though it wants to: at first, while two tasks seem to be no work for two workers, and then
    because it may have one only."""
    fresh.register_plugin(Offered())
    seen = fresh.cluster.scheduler.plugins["offered"]
    workers = worker_pids(fresh)
    job = launch(fresh, train, args=(str(tmp_path),), options=FAST)
    fresh.cluster.adapt(minimum=1, maximum=2, interval="200ms", wait_count=1)
    pids = wait_for_training(tmp_path)
    before = len(seen.offers)
    fresh.cluster.adapt(minimum=1, maximum=1, interval="200ms", wait_count=1)
    wait_until(lambda: len(seen.offers) >= before + 5)
    assert not any(seen.offers)
    assert all(map(pid_is_alive, pids))
    assert worker_pids(fresh) == workers
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(60)
    wait_until(lambda: len(fresh.cluster.scheduler.workers) == 1)


def test_a_lost_rank_that_dask_runs_again_alone_is_refused(tmp_path: Path) -> None:
    """With a fixed worker port the restarted worker has the address that the task is pinned to."""
    with cluster_with_fixed_ports() as (client, start_worker):
        job = launch(client, train, args=(str(tmp_path),), options=FAST)
        pids = wait_for_training(tmp_path)
        lost = job._plan[1].worker
        os.kill(worker_pids(client)[lost], signal.SIGKILL)
        wait_until(lambda: client.run_on_scheduler(_n_workers) == 1, 30)
        start_worker(int(lost.rpartition(":")[2]))
        wait_until(lambda: client.run_on_scheduler(_n_workers) == 2, 30)
        with pytest.raises(WorkerLostError):
            job.result(60)
        assert_gone(pids)
        assert launch(client, dist.get_rank).result(60) == [0, 1]


def _n_workers(dask_scheduler: Any) -> int:
    return len(dask_scheduler.workers)


def test_a_dead_scheduler_raises_dasks_error_and_leaves_no_rank_behind(tmp_path: Path) -> None:
    with cluster_with_fixed_ports() as (client, _):
        job = launch(client, train, args=(str(tmp_path),))
        pids = wait_for_training(tmp_path)
        os.kill(int(client.run_on_scheduler(os.getpid)), signal.SIGKILL)
        with pytest.raises((OSError, JobCancelledError)):
            job.result(60)
        wait_until(lambda: not any(map(pid_is_alive, pids)), 30)


def test_a_cluster_inside_this_process_works(tmp_path: Path) -> None:
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        assert launch(client, dist.get_world_size).result(60) == [1]
