"""Clusters that live in the client's own process: ``LocalCluster(processes=False)``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import wait_until
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


def test_workers_of_one_process_do_not_take_each_others_ranks_away(tmp_path: Path) -> None:
    """Ranks that load libraries with other variables get a nursery beside the one in use."""

    def hold(me: str, other: str) -> str:
        (tmp_path / me).touch()
        wait_until((tmp_path / other).exists, 60)
        return me

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        first = launch(client, hold, args=("a", "b"), options=LaunchOptions(workers=[0]))
        wait_until((tmp_path / "a").exists, 60)
        other = LaunchOptions(workers=[1], env={"TORCH_OF_MINE": "1"})
        assert launch(client, hold, args=("b", "a"), options=other).result(90) == ["b"]
        assert first.result(90) == ["a"]
