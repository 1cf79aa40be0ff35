"""Every way in which a job fails is named, and no process of it is left."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import pid_is_alive, slack, wait_until
from distributed import Client

from ddp_core import JobCancelledError, LaunchOptions, RankFailedError, launch, run
from ddp_core._coordinator import Coordinator

pytestmark = pytest.mark.xdist_group("cluster")

BOUND_S = 4.0


def train_until(folder: str, event: Any, rank: int = 1) -> None:
    """Train a real DDP model; in one rank something happens after some steps."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    Path(folder, f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    for step in range(10**9):
        if dist.get_rank() == rank and step == 3:
            Path(folder, "event").write_text(repr(time.time()))
            event()
        model(torch.ones(2, 4)).sum().backward()


def pids(folder: Path) -> list[int]:
    return [int(p.read_text()) for p in folder.glob("pid-*")]


def assert_down(folder: Path, ended: float, bound_s: float = BOUND_S) -> None:
    """The failure was told within its bound, and by then nobody was alive."""
    assert not [p for p in pids(folder) if pid_is_alive(p)]
    assert ended - float((folder / "event").read_text()) < bound_s * slack()


def fail(
    client: Client,
    folder: Path,
    event: Any,
    options: LaunchOptions,
    rank: int = 1,
    bound_s: float = BOUND_S,
) -> Any:
    job = launch(client, train_until, args=(str(folder), event, rank), options=options)
    with pytest.raises(RankFailedError) as caught:
        job.result(60)
    assert_down(folder, time.time(), bound_s)
    assert job.state == "failed"
    assert not [line for line in caught.value.others if re.match(r"rank (\d+): rank \1 ", line)]
    return caught.value


@pytest.mark.parametrize("rank", [0, 1])
def test_the_exception_of_the_first_rank_is_the_cause(
    client: Client, tmp_path: Path, fast: LaunchOptions, rank: int
) -> None:
    def event() -> None:
        raise ValueError("boom")

    error = fail(client, tmp_path, event, fast, rank)
    assert isinstance(error.__cause__, ValueError)
    assert "in event" in str(error.__cause__.__cause__)
    assert error.rank == rank
    assert error.worker in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal_is_named(
    client: Client, tmp_path: Path, fast: LaunchOptions, number: signal.Signals
) -> None:
    error = fail(client, tmp_path, lambda: os.kill(os.getpid(), number), fast)
    assert number.name in str(error)
    assert (error.signal, error.rank) == (number, 1)


def close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


def close_descriptors() -> None:
    for fd in (0, 1, 2):
        os.close(fd)


def remove_streams() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


@pytest.mark.parametrize("silence", [close_streams, close_descriptors, remove_streams])
def test_the_cause_is_told_by_a_rank_that_can_no_longer_print(
    client: Client, tmp_path: Path, fast: LaunchOptions, silence: Any
) -> None:
    def event() -> None:
        silence()
        raise ValueError("boom")

    error = fail(client, tmp_path, event, fast)
    assert isinstance(error.__cause__, ValueError)
    assert "boom" in str(error)


def test_a_crash_in_native_code_leaves_its_python_stack(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    def event() -> None:
        import ctypes

        ctypes.string_at(0)

    error = fail(client, tmp_path, event, fast)
    assert error.signal == signal.SIGSEGV
    assert "in event" in error.log


def test_a_rank_without_memory_is_named(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    error = fail(client, tmp_path, lambda: bytearray(1 << 60), fast)
    assert isinstance(error.__cause__, MemoryError)
    assert error.rank == 1


def test_an_exit_without_a_result_is_named(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    assert fail(client, tmp_path, lambda: sys.exit(0), fast).exit_code == 0


def test_a_sudden_exit_without_a_result_is_named(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    assert "exit code 0" in str(fail(client, tmp_path, lambda: os._exit(0), fast))


def test_every_future_of_run_raises_the_root_cause(client: Client, tmp_path: Path) -> None:
    def event() -> None:
        raise KeyError("boom")

    for future in run(client, train_until, str(tmp_path), event):
        error = future.exception(timeout=60)
        assert isinstance(error, RankFailedError)
        assert isinstance(error.__cause__, KeyError)


def test_cancelling_ends_every_rank(client: Client, tmp_path: Path, fast: LaunchOptions) -> None:
    job = launch(client, train_until, args=(str(tmp_path), print), options=fast)
    wait_until((tmp_path / "event").exists)
    (tmp_path / "event").write_text(repr(time.time()))
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(30)
    assert_down(tmp_path, time.time())
    assert job.state == "cancelled"


def test_cancelling_the_futures_of_run_ends_every_rank(client: Client, tmp_path: Path) -> None:
    futures = run(client, train_until, str(tmp_path), print)
    wait_until((tmp_path / "event").exists)
    client.cancel(futures)
    wait_until(lambda: not any(map(pid_is_alive, pids(tmp_path))))


def test_closing_the_client_ends_every_rank(client: Client, tmp_path: Path) -> None:
    with Client(client.scheduler.address) as owner:
        job = launch(owner, train_until, args=(str(tmp_path), print))
        wait_until((tmp_path / "event").exists)
    with pytest.raises(JobCancelledError, match="closed"):
        job.result(10)
    wait_until(lambda: not any(map(pid_is_alive, pids(tmp_path))))


def test_an_exception_that_cannot_be_pickled_leaves_its_text(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    def event() -> None:
        class LocalError(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("not me")

        raise LocalError("the text of it")

    error = fail(client, tmp_path, event, fast)
    assert "the text of it" in str(error)
    assert "in event" in str(error.__cause__)


def test_a_result_that_cannot_be_pickled_is_said(client: Client) -> None:
    def train() -> Any:
        return dist.get_rank() if dist.get_rank() == 0 else (i for i in range(3))

    with pytest.raises(RankFailedError, match="cannot pickle") as caught:
        launch(client, train).result(60)
    assert caught.value.rank == 1
    assert caught.value.results == {0: 0}


def test_a_failed_launch_leaves_the_workers_usable(client: Client) -> None:
    def train() -> None:
        raise ValueError("boom")

    with pytest.raises(RankFailedError, match="boom"):
        launch(client, train).result(60)
    assert launch(client, dist.get_rank).result(60) == [0, 1]


def test_a_rank_blocked_in_a_collective_still_runs_its_exit_functions(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    def train(folder: str) -> None:
        import atexit

        path = Path(folder, f"left-{dist.get_rank()}")
        atexit.register(path.touch)
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    with pytest.raises(RankFailedError, match="boom"):
        launch(client, train, args=(str(tmp_path),), options=fast).result(60)
    assert {p.name for p in tmp_path.glob("left-*")} == {"left-0", "left-1"}


def test_a_rank_that_does_not_exit_is_told_from_one_that_has_left(
    client: Client, tmp_path: Path
) -> None:
    def train(path: str) -> None:
        import threading

        if dist.get_rank() == 1:
            threading.Thread(target=wait_until, args=(Path(path).exists, 60)).start()

    path = tmp_path / "over"
    job = launch(client, train, args=(str(path),))
    wait_until(lambda: states(client) == {0: "left", 1: "returned"}, 60, lambda: states(client))
    assert job.state != "finished"
    path.touch()
    job.result(60)


def states(client: Client) -> dict[int, str]:
    """What the coordinator knows of the ranks of all jobs."""

    def known(dask_scheduler: Any) -> dict[int, str]:
        jobs = dask_scheduler.plugins[Coordinator.name].jobs.values()
        return {rank: news["state"] for job in jobs for rank, news in job.ranks.items()}

    found: dict[int, str] = client.run_on_scheduler(known)
    return found


def test_grandchildren_go_with_their_rank(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    def event() -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        Path(tmp_path, "pid-child").write_text(str(child.pid))
        raise ValueError("boom")

    fail(client, tmp_path, event, fast)


def test_the_processes_of_a_data_loader_go_with_their_rank(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    def event() -> None:
        import multiprocessing

        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.ones(64, 1))
        for _ in DataLoader(data, num_workers=2, persistent_workers=True):
            for child in multiprocessing.active_children():
                Path(tmp_path, f"pid-loader-{child.pid}").write_text(str(child.pid))
            raise ValueError("boom")

    fail(client, tmp_path, event, fast)
    assert len(list(tmp_path.glob("pid-loader-*"))) == 2


def test_a_collective_that_hangs_ends_with_torchs_timeout(client: Client, tmp_path: Path) -> None:
    options = LaunchOptions(grace_s=2, pg_timeout_s=4)
    error = fail(client, tmp_path, lambda: time.sleep(1000), options, bound_s=4 + BOUND_S)
    assert "imed out" in str(error.__cause__)
    assert error.rank == 0


def test_a_rank_that_returns_early_fails_those_who_wait_for_it(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    def train(folder: str) -> str:
        def event() -> None:
            raise StopIteration

        try:
            train_until(folder, event)
        except StopIteration:
            return "done"
        return "never"

    with pytest.raises(RankFailedError, match="rank 1 had returned first") as caught:
        launch(client, train, args=(str(tmp_path),), options=fast).result(60)
    assert_down(tmp_path, time.time())
    assert caught.value.rank == 0
    assert caught.value.results == {1: "done"}


def test_a_second_process_group_is_refused_with_the_remedy(client: Client) -> None:
    with pytest.raises(RankFailedError, match="init_process_group=False") as caught:
        launch(client, lambda: dist.init_process_group("gloo")).result(60)
    assert "twice" in str(caught.value.__cause__)


def test_the_words_of_sys_exit_are_in_the_error(client: Client, fast: LaunchOptions) -> None:
    def train() -> None:
        sys.exit("usage: train.py --epochs N")

    with pytest.raises(RankFailedError, match=r"usage: train\.py --epochs N"):
        launch(client, train, options=fast).result(60)


@pytest.mark.timeout(180)
def test_a_scheduler_that_stands_still_does_not_cost_the_job(tmp_path: Path) -> None:
    """Dask keeps its workers through a pause of the scheduler's event loop, and so do we."""
    from distributed import LocalCluster

    def train() -> str:
        Path(tmp_path, str(dist.get_rank())).touch()
        wait_until((tmp_path / "over").exists, 120)
        return "trained"

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        job = launch(own, train)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 90)
        own.run_on_scheduler(lambda: time.sleep(18))  # longer than SILENCE_S
        (tmp_path / "over").touch()
        assert job.result(90) == ["trained"] * 2


@pytest.mark.timeout(180)
def test_a_task_that_holds_the_interpreter_does_not_cost_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose Python stands still says nothing, but its host answers."""
    from distributed import LocalCluster

    def train() -> str:
        Path(tmp_path, str(dist.get_rank())).touch()
        wait_until((tmp_path / "over").exists, 120)
        return "trained"

    def hold(seconds: int) -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)

    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        job = launch(own, train)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 90)
        with caplog.at_level(logging.WARNING, "ddp_core"):
            own.submit(hold, 20, pure=False).result(90)  # longer than SILENCE_S and a knock
        (tmp_path / "over").touch()
        assert job.result(90) == ["trained"] * 2
    assert "has said nothing for" in caplog.text
    assert "its host answers" in caplog.text


def test_an_agent_that_cannot_follow_its_job_ends_it(
    client: Client, tmp_path: Path, fast: LaunchOptions
) -> None:
    def spoil(dask_scheduler: Any) -> None:
        coordinator = dask_scheduler.plugins[Coordinator.name]
        whole = coordinator.op_poll

        def op_poll(agent: int | None = None, **given: Any) -> Any:
            if agent is not None:
                raise ZeroDivisionError("nobody foresaw this")
            return whole(**given)

        coordinator.op_poll = op_poll

    def mend(dask_scheduler: Any) -> None:
        del dask_scheduler.plugins[Coordinator.name].op_poll

    def event() -> None:
        Path(tmp_path, "trains").touch()

    job = launch(client, train_until, args=(str(tmp_path), event), options=fast)
    wait_until(lambda: (tmp_path / "trains").exists(), 40)
    client.run_on_scheduler(spoil)
    try:
        with pytest.raises(RankFailedError, match=r"agent on .* failed: ZeroDivisionError"):
            job.result(60)
    finally:
        client.run_on_scheduler(mend)
    assert not [p for p in pids(tmp_path) if pid_is_alive(p)]
