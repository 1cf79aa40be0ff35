"""What the owner of a job holds, and how a forgotten one is found again."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import wait_until
from distributed import Client, LocalCluster
from test_futures import are_gone, hold, wait_for_ranks

from ddp_core import JobCancelledError, LaunchOptions, jobs, launch, run
from ddp_core._coordinator import Coordinator
from ddp_core._submit import ask

pytestmark = pytest.mark.xdist_group("cluster")


def test_a_job_that_nobody_keeps_is_found_and_cancelled(client: Client, tmp_path: Path) -> None:
    launch(client, hold, args=(str(tmp_path),))
    wait_for_ranks(tmp_path)
    gc.collect()
    (found,) = jobs(client)
    assert (found.name, found.state, found.client) == ("hold", "running", client)
    found.cancel()
    with pytest.raises(JobCancelledError):
        found.result(60)
    assert are_gone(tmp_path)


def test_ended_jobs_are_known_as_long_as_they_are_kept(client: Client) -> None:
    kept = launch(client, dist.get_rank)
    kept.result(60)
    launch(client, dist.get_rank, options=LaunchOptions(name="not kept")).result(60)
    wait_until(lambda: [gc.collect(), jobs(client) == [kept]][1], seen=lambda: jobs(client))
    with Client(client.scheduler.address) as other:
        assert jobs(other) == []


def test_the_jobs_of_run_are_found_too(client: Client, tmp_path: Path) -> None:
    futures = run(client, hold, str(tmp_path))
    wait_for_ranks(tmp_path)
    (job,) = jobs(client)
    job.cancel()
    assert isinstance(futures[0].exception(timeout=30), JobCancelledError)
    assert are_gone(tmp_path)


def test_a_job_that_its_client_did_not_close_is_forgotten_with_it(
    cluster: LocalCluster, client: Client
) -> None:
    launch(client, dist.get_rank).result(60)  # the coordinator is there
    known = cluster.scheduler.plugins[Coordinator.name].jobs
    agent = {"worker": "tcp://127.0.0.1:1", "host": "127.0.0.1", "key": "agent", "ranks": [0]}
    with Client(cluster) as other:
        other.sync(
            ask, other, "open", job="left", attempt=0, owner=other.id, name="f", agents=[agent]
        )
        assert known["left/0"].state == "ended"
    wait_until(lambda: "left/0" not in known)


def test_a_job_prints_itself(client: Client) -> None:
    one = launch(client, dist.get_rank, options=LaunchOptions(n_ranks=1, name="<b>&</b>"))
    one.result(60)
    assert "finished, 1 rank on 1 host, attempt 0" in repr(one)
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in one._repr_html_()
    assert "<b>&</b>" not in one._repr_html_()
    two = launch(client, dist.get_rank)
    two.result(60)
    assert "2 ranks on 1 host" in repr(two)
    here = launch(client, dist.get_rank, options=LaunchOptions(n_ranks=0))
    assert "in this process" in repr(here)


def test_a_job_that_waits_for_workers_to_start_again_can_be_cancelled(
    fresh: Client, tmp_path: Path
) -> None:
    options = LaunchOptions(n_ranks=2, max_restarts=1, wait_timeout_s=1000, grace_s=2)
    job = launch(fresh, hold, args=(str(tmp_path),), options=options)
    wait_for_ranks(tmp_path)
    fresh.retire_workers([job._plan[1].worker], close_workers=True)
    wait_until(lambda: (job.attempt, job.state) == (1, "placing"), 60)
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(30)
    assert are_gone(tmp_path)


def test_a_rank_that_does_not_exit_is_told(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def linger(folder: str) -> int:
        import threading

        def wait() -> None:
            while not Path(folder, "go").exists():
                time.sleep(0.05)

        if dist.get_rank() == 1:
            threading.Thread(target=wait).start()
        return dist.get_rank()

    with caplog.at_level(logging.WARNING, "ddp_core"):
        job = launch(client, linger, args=(str(tmp_path),))
        wait_until(lambda: "is stopping: rank 1 does not exit" in caplog.text, 40)
    (tmp_path / "go").touch()
    assert job.result(60) == [0, 1]


INTERRUPTED = """
import sys, threading, time
from distributed import Client
import torch.distributed as dist
from ddp_core import LaunchOptions, jobs, launch

def report(client):
    while not jobs(client):
        time.sleep(0.05)
    print("placing", flush=True)

if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        threading.Thread(target=report, args=(client,), name="report", daemon=True).start()
        try:
            launch(client, dist.get_rank, options=LaunchOptions(n_ranks=2, wait_timeout_s=300))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        sys.stdin.readline()
        print([job.state for job in jobs(client) if job.state != 'cancelled'], flush=True)
"""


def test_an_interrupted_launch_does_not_start_later(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    with LocalCluster(n_workers=0, processes=True, dashboard_address=":0") as cluster:
        owner = subprocess.Popen(
            [sys.executable, str(script), cluster.scheduler_address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == "placing\n"
            owner.send_signal(signal.SIGINT)
            assert owner.stdout.readline() == "interrupted\n"
            with Client(cluster) as client:
                cluster.scale(2)
                client.wait_for_workers(2, timeout=60)
                time.sleep(1)  # a job that waited for these workers would look for them meanwhile
                assert not client.run_on_scheduler(_tasks)
            assert owner.communicate("\n", timeout=60)[0] == "[]\n"
        finally:
            owner.kill()
            owner.wait()


def _tasks(dask_scheduler: object) -> list[str]:
    return [str(key) for key in dask_scheduler.tasks]  # type: ignore[attr-defined]
