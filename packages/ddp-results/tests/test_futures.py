"""Which end of a run is taken for its end: of futures, and of jobs that are restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from distributed import Client, LocalCluster, default_client

from ddp_results import DaskResultsHandler, MemorySink

pytestmark = pytest.mark.xdist_group("cluster")


class Job:
    """Attempts after attempts, each of real futures, until one succeeds or none is left."""

    def __init__(self, client: Client, attempts: list[Callable[[int], Any]]) -> None:
        self.state = "running"
        self.futures: list[Any] = []
        self.client = client
        self._attempts = attempts
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._next()
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def result(self, timeout: float | None = None) -> None:
        if not self._over.wait(timeout):
            raise TimeoutError("still running")
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        self._thread.join(60)

    def _next(self) -> None:
        self.futures = self.client.map(self._attempts.pop(0), range(2), pure=False)

    def _drive(self) -> None:
        while error := self._wait():
            if not self._attempts:
                self._error = RuntimeError("the job's own words")
                self._error.__cause__ = error
                break
            time.sleep(0.2)  # the failed futures are seen for a while
            self._next()
        self.futures = []
        self.state = "failed" if self._error else "finished"
        self._over.set()

    def _wait(self) -> BaseException | None:
        errors = [future.exception(timeout=60) for future in self.futures]
        return next((error for error in errors if error is not None), None)


def test_job_is_followed_through_its_restarts(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def first(rank: int) -> None:
        handler.submit_result(f"first/{rank}", "x")
        raise ZeroDivisionError

    def second(rank: int) -> None:
        time.sleep(0.5)
        for n in range(200):
            handler.submit_result(f"second/{rank}/{n}", "x")

    job = Job(client, [first, second])
    handler.process_results(sink, job)
    assert job.state == "finished"
    job.join()
    assert len([path for path in sink.results if path.startswith("second/")]) == 400
    assert len([path for path in sink.results if path.startswith("first/")]) == 2


@pytest.mark.parametrize("late", [False, True], ids=["while-it-runs", "after-its-end"])
def test_failed_job_raises_its_own_error_after_all_is_stored(client: Client, late: bool) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def work(rank: int) -> None:
        for n in range(100):
            handler.submit_result(f"{rank}/{n}", "x")
        raise ZeroDivisionError(rank)

    job = Job(client, [work, work])
    if late:
        job.join()
        assert job.futures == []
    with pytest.raises(RuntimeError, match="own words") as caught:
        handler.process_results(sink, job)
    job.join()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(sink.history) == 400


def test_job_that_has_finished_before_ends_normally(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()
    job = Job(client, [lambda rank: handler.submit_result(str(rank), "x")])
    job.join()
    assert job.futures == []
    handler.process_results(sink, job)
    assert sorted(sink.results) == ["0", "1"]


def test_failed_job_is_logged_without_raise_errors(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> None:
        raise ZeroDivisionError

    job = Job(client, [work])
    DaskResultsHandler().process_results(MemorySink(), job, raise_errors=False)
    job.join()
    assert "a rank failed" in caplog.text


@pytest.fixture
def other(client: Client) -> Iterator[Client]:
    """A second cluster, whose client is the default one of this process while it is there."""
    del client  # it is there before
    with LocalCluster(n_workers=1, dashboard_address=":0") as cluster, Client(cluster) as other:
        yield other


def test_futures_say_on_which_of_two_clusters_they_run(client: Client, other: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()
    assert default_client() is other
    futures = client.map(lambda rank: handler.submit_result(str(rank), "x"), range(2), pure=False)
    handler.process_results(sink, futures)
    assert sorted(sink.results) == ["0", "1"]


def test_job_that_has_ended_says_on_which_of_two_clusters_it_ran(
    client: Client, other: Client
) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()
    job = Job(client, [lambda rank: handler.submit_result(str(rank), "x")])
    job.join()
    handler.process_results(sink, job)
    assert sorted(sink.results) == ["0", "1"]


def test_futures_of_two_clusters_are_refused(client: Client, other: Client) -> None:
    futures = [each.submit(int, pure=False) for each in (client, other)]
    with pytest.raises(ValueError, match="several Dask clusters") as caught:
        DaskResultsHandler().process_results(MemorySink(), futures)
    assert client.scheduler.address in str(caught.value)
    assert other.scheduler.address in str(caught.value)


def test_futures_of_a_closed_client_are_named(cluster: LocalCluster) -> None:
    with Client(cluster, set_as_default=False) as other:
        future = other.submit(int, 7, pure=False)
        future.result(30)
    with pytest.raises(CancelledError, match="its Dask client has been closed"):
        DaskResultsHandler().process_results(MemorySink(), [future])


def test_what_is_no_future_is_refused(client: Client) -> None:
    with pytest.raises(TypeError, match="not int"):
        DaskResultsHandler().process_results(MemorySink(), [1])
