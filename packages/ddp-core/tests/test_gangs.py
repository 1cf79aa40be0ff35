"""Jobs that want the same workers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import wait_until
from distributed import Client, LocalCluster

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
