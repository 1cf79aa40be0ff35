"""What ddp_core relies on and Dask does not promise: each test names what breaks without it.

They are run with every version of distributed that is supported; the first one to fail tells what
has changed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import distributed
import pytest
from conftest import wait_until
from dask.base import annotate
from dask.delayed import delayed
from distributed import Client, LocalCluster, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import heartbeat_interval

from ddp_core import errors
from ddp_core._submit import fail_pending, lend

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(60)]


@contextmanager
def else_breaks(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        raise AssertionError(f"distributed {distributed.__version__} breaks {what}") from exc


@contextmanager
def cluster_of(n_workers: int) -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=n_workers, threads_per_worker=1, processes=False, dashboard_address=":0"
    ) as cluster:
        yield cluster


@pytest.fixture
def inside() -> Iterator[Client]:
    """A client of a scheduler and two workers that live in this process."""
    with cluster_of(2) as cluster, Client(cluster) as client:
        yield client


def scheduler_of(client: Client) -> Any:
    assert client.cluster is not None
    return client.cluster.scheduler


class Record(SchedulerPlugin):
    """Writes down which hooks are called, and what came in a later step of the event loop."""

    name = "record"

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "forgotten":
            self.events.append(("forgotten", key))
            asyncio.get_running_loop().call_soon(self.events.append, ("next step",))

    def restart(self, scheduler: Any) -> None:
        self.events.append(("restart", len(scheduler.workers)))

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self.events.append(("remove_worker", worker))

    def remove_client(self, scheduler: Any, client: str) -> None:
        self.events.append(("remove_client", client))

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        self.events.append(("downscaling", *sorted(w.address for w in workers)))
        return workers[:1]


@pytest.fixture
def record(inside: Client) -> Record:
    inside.register_plugin(Record())
    found: Record = scheduler_of(inside).plugins["record"]
    return found


def hold(path: str) -> str:
    """Run until the file is there, or the worker closes."""
    worker = get_worker()
    while not Path(path).exists() and worker.status.name in ("running", "paused", "init"):
        time.sleep(0.01)
    return str(worker.status.name)


def test_identity_of_minus_one_tells_of_every_worker() -> None:
    with (
        cluster_of(6) as cluster,
        Client(cluster) as client,
        else_breaks("the plan of the ranks: workers would be left out"),
    ):
        told = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        assert set(told) == set(cluster.scheduler.workers)
        assert {info["status"] for info in told.values()} == {"running"}
        assert all("name" in info for info in told.values())


def test_a_handler_that_a_plugin_adds_answers_clients_and_workers(inside: Client) -> None:
    async def answer(number: int) -> int:
        return number + 1

    def from_a_worker(address: str) -> Any:
        worker = get_worker()
        call = worker.scheduler.ddp_test(number=2)
        return asyncio.run_coroutine_threadsafe(call, worker.loop.asyncio_loop).result(10)

    scheduler_of(inside).handlers["ddp_test"] = answer
    with else_breaks("every call to the coordinator"):
        assert inside.sync(inside.scheduler.ddp_test, number=1) == 2
        assert inside.submit(from_a_worker, "").result(10) == 3


def test_a_plugin_of_the_same_name_is_kept_when_it_is_idempotent(inside: Client) -> None:
    class Once(Record):
        name = "once"
        idempotent = True

    inside.register_plugin(Once())
    first = scheduler_of(inside).plugins["once"]
    inside.register_plugin(Once())
    with else_breaks("running jobs: a second launch would replace their coordinator"):
        assert scheduler_of(inside).plugins["once"] is first


def test_plugins_hear_of_a_task_that_nobody_wants(inside: Client, record: Record) -> None:
    future: Any = inside.submit(str, 1, key="unwanted", pure=False)
    future.result(10)
    del future
    with else_breaks("the end of jobs whose futures were dropped"):
        wait_until(lambda: ("forgotten", "unwanted") in record.events, 3)


def test_plugins_hear_of_a_restart_in_the_step_that_forgets_the_tasks(
    inside: Client, record: Record
) -> None:
    future: Any = inside.submit(str, 1, key="wanted", pure=False)
    future.result(10)
    inside.restart(timeout=20, wait_for_workers=False)
    with else_breaks("restarts after Client.restart: it would look like a cancellation"):
        assert record.events[:3] == [("forgotten", "wanted"), ("restart", 2), ("next step",)]
    with else_breaks("what is told of results that went with a restart"):
        error = future._state.exception
        assert isinstance(error, concurrent.futures.CancelledError)
        assert error.reason == "scheduler-restart"


def test_plugins_hear_of_workers_and_clients_that_go(inside: Client, record: Record) -> None:
    address = next(iter(scheduler_of(inside).workers))
    with Client(inside.cluster) as other:
        owner = other.id
        assert owner in scheduler_of(inside).clients
    inside.retire_workers([address], close_workers=True)
    with else_breaks("the loss of workers and of clients: jobs would hang"):
        wait_until(lambda: ("remove_client", owner) in record.events, 3)
        wait_until(lambda: ("remove_worker", address) in record.events, 3)


def test_plugins_choose_which_workers_may_be_scaled_away(inside: Client, record: Record) -> None:
    workers = sorted(scheduler_of(inside).workers)
    with else_breaks("jobs on adaptive clusters: their workers would be scaled away"):
        chosen = scheduler_of(inside).workers_to_close(n=2)
        assert record.events == [("downscaling", *workers)]
        assert len(chosen) == 1


def test_the_state_of_a_worker_tells_its_tasks_and_when_it_was_heard(
    inside: Client, tmp_path: Path
) -> None:
    future: Any = inside.submit(hold, str(tmp_path / "go"), key="held")
    states = scheduler_of(inside).workers.values()
    with else_breaks("who a waiting job waits for, and which workers are silent"):
        wait_until(lambda: [ts.key for ws in states for ts in ws.processing] == ["held"], 3)
        assert all(abs(time.time() - ws.last_seen) < 30 for ws in states)
        assert 0 < heartbeat_interval(2) <= heartbeat_interval(2000)
    (tmp_path / "go").touch()
    future.result(10)


def test_a_worker_that_is_retired_says_so_to_its_tasks(inside: Client, tmp_path: Path) -> None:
    address = next(iter(scheduler_of(inside).workers))

    def note() -> None:
        (tmp_path / "closing").write_text(hold(str(tmp_path / "never")))

    future: Any = inside.submit(note, workers=[address])
    wait_until(lambda: inside.processing()[address])
    inside.retire_workers([address], close_workers=True)
    with else_breaks("ranks on a worker that is retired: they would outlive it"):
        wait_until((tmp_path / "closing").exists, 3)
    del future


def test_a_task_finds_its_worker_and_its_own_key(inside: Client) -> None:
    def look() -> tuple[Any, ...]:
        worker = get_worker()
        return (
            worker.address,
            worker.scheduler.address,
            worker.loop.asyncio_loop.is_running(),
            hasattr(worker, "security"),
            errors._inside_agent(),
        )

    address = next(iter(scheduler_of(inside).workers))
    with else_breaks("the line of an agent to its scheduler"):
        found = inside.submit(look, workers=[address], key="ddp-agent-x").result(10)
        assert found == (address, scheduler_of(inside).address, True, True, True)


def test_tasks_of_one_graph_are_pinned_not_tried_again_and_never_overtaken(inside: Client) -> None:
    workers = list(scheduler_of(inside).workers)
    futures = []
    for graph in range(2):
        tasks = []
        for number in range(2):
            with annotate(workers=[workers[number]], allow_other_workers=False, retries=0):
                tasks.append(delayed(str, pure=False)(number, dask_key_name=f"{graph}-{number}"))
        futures += inside.compute(tasks, optimize_graph=False, fifo_timeout=0)
        wait_until(lambda: len(scheduler_of(inside).tasks) == len(futures))  # noqa: B023
    with else_breaks("the placement of ranks, and that workers run jobs in one order"):
        known = [scheduler_of(inside).tasks[f.key] for f in futures]
        assert [ts.worker_restrictions for ts in known] == [{w} for w in workers * 2]
        assert not any(ts.loose_restrictions or ts.retries for ts in known)
        assert max(ts.priority for ts in known[:2]) < min(ts.priority for ts in known[2:])
    assert inside.gather(futures) == list("0101")


def test_a_copy_of_a_future_counts(inside: Client) -> None:
    future: Any = inside.submit(str, 1, pure=False)
    with else_breaks("jobs of run: they would end while somebody holds their futures"):
        assert inside.refcount[future.key] == 1
        copies = lend([future])
        assert inside.refcount[future.key] == 2
        assert copies[0].result(10) == "1"


def test_a_future_can_be_failed_from_outside(inside: Client) -> None:
    future: Any = inside.submit(str, 1, workers=["10.1.2.3:1"], pure=False)
    error = ValueError("lost")

    async def fail() -> None:
        fail_pending([future], error)

    with else_breaks("the futures of run: they would wait for ever for a worker that is lost"):
        assert future.status == "pending"
        inside.sync(fail)
        assert future.exception(5) is error
        assert future._state.exception is error
        with pytest.raises(ValueError, match="lost"):
            inside.sync(inside._gather, [future])


def test_a_future_whose_value_is_gone_is_no_longer_finished(inside: Client) -> None:
    address = next(iter(scheduler_of(inside).workers))
    future: Any = inside.submit(str, 1, workers=[address], pure=False)
    future.result(10)
    inside.run_on_scheduler(_remove, address)
    with else_breaks("the loss of results: a job would wait for them for ever"):
        wait_until(lambda: future.status in ("pending", "lost"), 3)


async def _remove(address: str, dask_scheduler: Any) -> None:
    await dask_scheduler.remove_worker(address, stimulus_id="test")


def test_a_function_can_be_run_in_one_worker_and_in_the_scheduler(inside: Client) -> None:
    address = next(iter(scheduler_of(inside).workers))

    def fail() -> None:
        raise ValueError("boom")

    def run(function: Callable[[], Any]) -> Any:
        return inside.sync(inside._run, function, workers=[address], on_error="return")

    with else_breaks("the doctor"):
        assert run(int) == {address: 0}
        assert isinstance(run(fail)[address], ValueError)
        assert inside.sync(inside._run_on_scheduler, int) == 0


def test_the_loop_of_a_client_takes_callbacks_and_its_end_is_seen(inside: Client) -> None:
    done = concurrent.futures.Future[int]()
    with Client(inside.cluster) as other, else_breaks("Job.cancel"):
        other.loop.add_callback(done.set_result, 1)
        assert done.result(5) == 1
        assert other.status == "running"
    with else_breaks("the end of jobs whose client is closed"):
        assert other.status == "closed"
