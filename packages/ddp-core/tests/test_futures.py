"""The futures of ``run`` behave as Dask's users expect: they keep the job alive, and end it."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import pid_is_alive, wait_until
from distributed import Client, as_completed, wait

from ddp_core import JobCancelledError, jobs, launch, run

pytestmark = pytest.mark.xdist_group("cluster")


def hold(folder: str) -> int:
    """Run until the file ``go`` is there."""
    Path(folder, f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return dist.get_rank()


def pids(folder: Path) -> list[int]:
    return [int(p.read_text() or 0) for p in folder.glob("pid-*")]


def wait_for_ranks(folder: Path) -> None:
    wait_until(lambda: len([pid for pid in pids(folder) if pid]) == 2, 40)


def are_gone(folder: Path) -> bool:
    return not any(map(pid_is_alive, pids(folder)))


def test_dropping_every_future_ends_the_ranks(client: Client, tmp_path: Path) -> None:
    futures = run(client, hold, str(tmp_path))
    wait_for_ranks(tmp_path)
    del futures
    gc.collect()
    wait_until(lambda: are_gone(tmp_path))
    wait_until(lambda: not client.futures)


def test_cancelling_one_future_ends_every_rank(client: Client, tmp_path: Path) -> None:
    futures = run(client, hold, str(tmp_path))
    wait_for_ranks(tmp_path)
    futures[1].cancel()
    wait_until(lambda: are_gone(tmp_path))
    assert isinstance(futures[0].exception(timeout=30), JobCancelledError)


def test_one_kept_future_keeps_the_job(client: Client, tmp_path: Path) -> None:
    kept = run(client, hold, str(tmp_path))[1]
    wait_for_ranks(tmp_path)
    gc.collect()
    time.sleep(4)  # longer than the client waits for news of its job
    Path(tmp_path, "go").touch()
    assert kept.result(timeout=60) == 1


def test_a_task_that_needs_the_results_keeps_the_job(client: Client, tmp_path: Path) -> None:
    futures = run(client, hold, str(tmp_path))
    total = client.submit(sum, futures)
    wait_for_ranks(tmp_path)
    del futures
    gc.collect()
    time.sleep(4)  # longer than the client waits for news of its job
    Path(tmp_path, "go").touch()
    assert total.result(timeout=60) == 1


def test_everything_that_waits_for_futures_works(client: Client) -> None:
    futures = run(client, dist.get_rank)
    called: list[Any] = []
    done = threading.Event()

    def note(future: Any) -> None:
        called.append(future.key)
        if len(called) == 2:
            done.set()

    for future in futures:
        future.add_done_callback(note)
    assert wait(futures, timeout=60).not_done == set()
    assert sorted(f.result() for f in as_completed(futures)) == [0, 1]
    assert client.gather(futures) == [0, 1]
    assert done.wait(30)
    assert sorted(called) == sorted(f.key for f in futures)


def test_results_stay_as_long_as_their_futures(client: Client) -> None:
    futures = run(client, dist.get_rank)
    wait(futures, timeout=60)
    wait_until(lambda: jobs(client) == [])
    gc.collect()
    assert client.gather(futures) == [0, 1]
    keys = [f.key for f in futures]
    del futures
    wait_until(lambda: not set(keys) & set(client.futures))


def test_the_results_of_launch_leave_the_workers_memory(client: Client) -> None:
    size = 20_000_000

    def train() -> bytes:
        return bytes(size)

    job = launch(client, train)
    assert len(job.futures) == 2
    first = job.result(60)
    assert [len(data) for data in first] == [size, size]
    assert job.futures == []
    wait_until(lambda: not any(client.has_what().values()), seen=client.has_what)
    assert [a is b for a, b in zip(job.result(), first, strict=True)] == [True, True]


def test_the_results_of_a_failed_launch_leave_the_workers_memory(client: Client) -> None:
    def train() -> bytes:
        if dist.get_rank() == 1:
            dist.barrier()
            raise ValueError("boom")
        dist.barrier()
        return bytes(1_000_000)

    job = launch(client, train)
    with pytest.raises(Exception, match="boom") as caught:
        job.result(60)
    wait_until(lambda: not any(client.has_what().values()), seen=client.has_what)
    assert job.futures == []
    assert isinstance(caught.value.results, dict)  # type: ignore[attr-defined]
