"""Clusters that live in the client's own process: ``LocalCluster(processes=False)``."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster

from ddp_core import LaunchOptions, launch

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]


def total() -> tuple[float, int]:
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return float(value.item()), os.getpid()


@pytest.mark.parametrize(("n_workers", "expected"), [(1, [1.0]), (2, [3.0, 3.0])])
def test_a_cluster_in_this_process_runs_ranks_and_says_what_they_lack(
    caplog: pytest.LogCaptureFixture, n_workers: int, expected: list[float]
) -> None:
    with (
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        with caplog.at_level(logging.WARNING, "ddp_core"):
            results = launch(client, total, options=LaunchOptions(grace_s=2)).result(100)
        assert [value for value, _ in results] == expected
        assert os.getpid() not in [pid for _, pid in results]
        assert "processes=True" in caplog.text
