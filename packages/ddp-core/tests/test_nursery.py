"""The process from which ranks are forked."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import pid_is_alive, wait_until
from distributed import Client

from ddp_core import LaunchOptions, launch
from ddp_core._environment import rank_environment
from ddp_core._process import ChildProcess, NurseryProcess, nursery
from ddp_core._ranks import WorkerInfo, plan_ranks

pytestmark = pytest.mark.xdist_group("cluster")


def parent() -> tuple[int, str]:
    command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode()
    return os.getppid(), command


def test_ranks_of_later_jobs_are_forked_from_the_same_process(client: Client) -> None:
    first, second = (launch(client, parent).result(60) for _ in range(2))
    assert first == second
    assert all("_nursery" in command for _, command in first)


def test_forked_ranks_share_no_random_numbers(client: Client) -> None:
    def draw() -> tuple[float, float]:
        import numpy as np

        return random.random(), float(np.random.rand())

    drawn = [value for _ in range(2) for pair in launch(client, draw).result(60) for value in pair]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("warm", [True, False])
def test_a_rank_has_its_share_of_threads_and_its_own_modules(client: Client, warm: bool) -> None:
    def look() -> Any:
        import sys

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], "distributed" in sys.modules

    for threads, wanted, dask_is_loaded in launch(
        client, look, options=LaunchOptions(warm=warm)
    ).result(60):
        assert str(threads) == wanted
        assert not dask_is_loaded


def test_variables_that_are_read_when_a_library_loads_get_a_process_of_their_own(
    client: Client,
) -> None:
    options = LaunchOptions(env={"TORCH_LOGS": "+dynamo", "MINE": "1"})
    changed = launch(client, parent, options=options).result(60)
    assert not {pid for pid, _ in changed} & {pid for pid, _ in launch(client, parent).result(60)}


def test_the_nursery_dies_with_its_worker(client: Client) -> None:
    from distributed import LocalCluster

    with (
        LocalCluster(n_workers=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        pids = [pid for pid, _ in launch(own, parent).result(60)]
        assert all(map(pid_is_alive, pids))
        os.kill(next(iter(own.run(os.getpid).values())), 9)
        wait_until(lambda: not any(map(pid_is_alive, pids)), 5)


def test_a_killed_nursery_fails_the_job_and_the_next_one_has_another(client: Client) -> None:
    from ddp_core import RankFailedError

    def kill_parent() -> None:
        os.kill(os.getppid(), 9)
        time.sleep(60)

    with pytest.raises(RankFailedError):
        launch(client, kill_parent, options=LaunchOptions(grace_s=1)).result(60)
    assert launch(client, dist.get_rank).result(60) == [0, 1]


def an_environment() -> dict[str, str]:
    rank = plan_ranks([WorkerInfo("tcp://127.0.0.1:1", "127.0.0.1", "w")])[0]
    return rank_environment(os.environ, rank, job_id="j", attempt=0, max_restarts=0, extra={})


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def ask_a_nursery_that_is_gone() -> None:
    source = NurseryProcess(an_environment(), {})
    before = open_files()
    source.kill()
    with pytest.raises(OSError, match="Broken pipe"):
        ChildProcess(source, "_child", an_environment(), {})
    assert open_files() == before
    assert not source.users
    source.close()


def test_a_nursery_that_does_not_answer_goes_with_its_children() -> None:
    """It may hang with a network file system; a task that waited for it would block its worker."""
    source = NurseryProcess(an_environment(), {})
    child = ChildProcess(source, "_child", an_environment(), {}, warm=False)
    os.kill(source._popen.pid, signal.SIGSTOP)
    child.stop(0.1)
    wait_until(child.reap)
    assert not source.is_alive()
    child.close()
    source.close()


def start_children_with_too_few_files(folder: str) -> None:
    source = NurseryProcess(an_environment(), {})
    before = open_files()
    free = [n for n in range(64) if not Path(f"/proc/self/fd/{n}").exists()]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(10):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            ChildProcess(source, "_child", an_environment(), {})
        if spare < 5:
            with pytest.raises(OSError, match="Too many open files"):
                NurseryProcess(an_environment(), {})
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (spare, open_files()) == (spare, before)
    env = an_environment()
    os.chdir(folder)
    os.rmdir(folder)
    removed = r"working directory of worker process \d+ has been removed"
    with pytest.raises(FileNotFoundError, match=removed):
        an_environment()
    with pytest.raises(FileNotFoundError, match=removed):
        ChildProcess(source, "_child", env, {})
    assert open_files() == before
    assert not source.users
    source.close()


def in_its_own_process(function: Callable[..., None], *arguments: str) -> None:
    """Run where no other thread opens or closes a file, as those of Dask's client here do."""
    code = f"import sys, test_nursery; test_nursery.{function.__name__}(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parent,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_child_that_cannot_be_asked_for_leaves_nothing_open() -> None:
    in_its_own_process(ask_a_nursery_that_is_gone)


def test_a_child_for_which_something_is_missing_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    in_its_own_process(start_children_with_too_few_files, str(tmp_path / "gone"))


def test_a_nursery_that_is_about_to_be_used_is_kept() -> None:
    """Another worker of this process may ask for one with other variables in that moment."""
    env, other = an_environment(), {**an_environment(), "TORCH_OF_NOBODY": "1"}
    with nursery(env) as mine, nursery(other) as theirs:
        assert mine is not theirs
        child = ChildProcess(mine, "_child", env, {}, warm=False)
        child.close()
    with nursery(other) as theirs_again:
        assert theirs_again is theirs
    # Nobody uses it now: it goes when another is needed.
    assert mine not in kept()
    with nursery(env):
        assert theirs not in kept()


def kept() -> list[NurseryProcess]:
    from ddp_core import _process

    return _process._kept
