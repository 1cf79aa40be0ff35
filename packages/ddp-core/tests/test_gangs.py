"""Jobs that want the same workers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
import torch.distributed as dist
from conftest import wait_until
from distributed import Client, LocalCluster, get_worker

from ddp_core import LaunchOptions, launch

pytestmark = pytest.mark.xdist_group("cluster")


def train(tag: int) -> tuple[int, float, float]:
    began = time.monotonic()
    total = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(total)
        dist.barrier()
    return tag, began, time.monotonic()


def test_jobs_never_interleave_on_workers_with_several_threads() -> None:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=3, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
        Client(cluster) as other,
    ):
        owners = [client, other, client, other]
        jobs = [launch(owner, train, args=(tag,)) for tag, owner in enumerate(owners)]
        found: list[list[Any]] = [job.result(90) for job in jobs]
    assert [{tag for tag, *_ in ranks} for ranks in found] == [{0}, {1}, {2}, {3}]
    spans = sorted((min(b for _, b, _ in r), max(e for *_, e in r)) for r in found)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_job_leaves_other_workers_to_others(client: Client, tmp_path: Path) -> None:
    """Two jobs of one rank each run beside each other."""

    def meet(me: str, other: str) -> str:
        (tmp_path / me).touch()
        wait_until((tmp_path / other).exists, 60)
        return me

    alone = LaunchOptions(n_ranks=1)
    jobs = [launch(client, meet, args=pair, options=alone) for pair in (("a", "b"), ("b", "a"))]
    assert [job.result(90) for job in jobs] == [["a"], ["b"]]


def hold(path: str) -> None:
    """Keep a worker busy until the file is there."""
    while not Path(path).exists():
        time.sleep(0.02)


def test_every_worker_runs_the_agents_of_jobs_in_the_order_of_their_launch(
    cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    """Else two jobs of which each has got one worker would wait for each other."""
    release = tmp_path / "release"
    held = [
        client.submit(hold, str(release), workers=[w], pure=False)
        for w in cluster.scheduler.workers
    ]
    wait_until(lambda: [len(tasks) for tasks in client.processing().values()] == [1, 1])
    jobs = [launch(client, dist.get_rank) for _ in range(3)]
    wait_until(lambda: len(cluster.scheduler.tasks) == 2 + 6)
    spans = []
    for job in jobs:
        found = [cluster.scheduler.tasks[future.key].priority for future in job.futures]
        spans.append((min(found), max(found)))
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(spans))
    release.touch()
    assert [job.result(90) for job in jobs] == [[0, 1]] * 3
    del held


def test_a_rank_that_waits_is_not_stolen(tmp_path: Path) -> None:
    """Not even by an idle worker that steals everything else that waits beside it."""

    def short(number: int) -> str:
        time.sleep(0.1)
        return str(get_worker().address)

    with (
        dask.config.set({"distributed.scheduler.work-stealing": True}),
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        *wanted, idle = sorted(cluster.scheduler.workers)
        release = tmp_path / "release"
        held = [client.submit(hold, str(release), workers=[w], pure=False) for w in wanted]
        wait_until(lambda: [len(t) for t in client.processing().values() if t] == [1, 1])
        job = launch(client, dist.get_rank, options=LaunchOptions(workers=wanted))
        others = client.map(short, range(60), workers=wanted, allow_other_workers=True, pure=False)
        wait_until(lambda: all(future.done() for future in others), 60)
        assert {future.result() for future in others} == {idle}
        assert job.state == "waiting"
        release.touch()
        assert job.result(60) == [0, 1]
        del held
