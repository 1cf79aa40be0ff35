"""Dead clients, dead ranks, dead schedulers, forked workers, TLS: with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from distributed import Client, KilledWorker, LocalCluster
from distributed.security import Security

from ddp_results import (
    ChannelLostError,
    DaskResultsHandler,
    MemorySink,
    NoClusterError,
    ResultsError,
    open_run,
)

pytestmark = pytest.mark.xdist_group("cluster")


def wait_for(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.02)


def run_program(program: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), *args])


def test_killed_client_is_followed_by_another_without_loss_or_repetition(
    client: Client, cluster: LocalCluster, tmp_path: Path
) -> None:
    handler = DaskResultsHandler(f"killed-client-{os.getpid()}-{time.time()}")
    go_on = tmp_path / "go-on"

    def work(rank: int) -> None:
        for step in range(600):
            handler.log_metrics({"loss": step}, step=step)
            handler.submit_result(f"r/{rank}/{step}", str(step))
            time.sleep(0.002)
            if step == 500:
                while not go_on.exists():
                    time.sleep(0.05)

    futures = client.map(work, range(2), pure=False)
    folder = tmp_path / "out"
    first = run_program(
        """
        import sys, time
        from distributed import Client
        from ddp_results import DaskResultsHandler

        class Pending:
            def done(self): return False

        with Client(sys.argv[1]):
            DaskResultsHandler(sys.argv[2]).process_results(sys.argv[3], [Pending()])
        """,
        cluster.scheduler_address,
        handler.pub_sub_key,
        str(folder),
    )
    wait_for(lambda: len(list(folder.glob("r/*/*"))) > 100)
    first.send_signal(signal.SIGKILL)
    first.wait()
    go_on.touch()
    handler.process_results(folder, futures)
    assert len(list(folder.glob("r/*/[0-9]*"))) == 1200
    points = open_run(folder).metrics()
    by_source: dict[str, list[int]] = {}
    for point in points:
        by_source.setdefault(point["src"], []).append(point["step"])
    assert sum(map(len, by_source.values())) == 1200


def test_interrupted_processing_goes_on_with_the_same_handler(
    client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler()

    def work() -> None:
        for n in range(400):
            handler.submit_result(str(n), b"x")
            time.sleep(0.002)

    future = client.submit(work, pure=False)

    class Interrupting(MemorySink):
        def write(self, path: str, data: bytes) -> None:
            super().write(path, data)
            if len(self.results) == 50:
                signal.raise_signal(signal.SIGINT)

    first, second = Interrupting(), MemorySink()
    with pytest.raises(KeyboardInterrupt):
        handler.process_results(first, [future])
    handler.process_results(second, [future])
    names = [path for path, _ in first.history] + [path for path, _ in second.history]
    assert sorted(map(int, names)) == list(range(400))


def test_killed_rank_leaves_what_was_durable_and_is_named(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = DaskResultsHandler()
    program = """
        import os, pickle, signal, sys
        handler = pickle.loads(bytes.fromhex(sys.argv[1]))
        handler.submit_result("durable", "x")
        handler.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """

    def work() -> int:
        import pickle

        return run_program(program, pickle.dumps(handler).hex()).wait()

    future = client.submit(work, pure=False)
    report = handler.process_results(tmp_path, [future])
    assert future.result() == -signal.SIGKILL
    assert (tmp_path / "durable").exists()
    assert len(report.unfinished) == 1
    assert "without a last word" in caplog.text


def test_cancelled_futures_end_the_processing(client: Client, tmp_path: Path) -> None:
    future = client.submit(time.sleep, 1, pure=False)
    future.cancel()
    with pytest.raises((CancelledError, asyncio.CancelledError)):
        DaskResultsHandler().process_results(tmp_path, [future])
    DaskResultsHandler().process_results(tmp_path, [future], raise_errors=False)


def test_future_whose_worker_died_raises_that(tmp_path: Path) -> None:
    handler = DaskResultsHandler()

    def work() -> None:
        handler.submit_result("before", "x")
        handler.flush()
        os._exit(1)

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        cluster.scheduler.allowed_failures = 0
        future = client.submit(work, pure=False)
        with pytest.raises(KilledWorker):
            handler.process_results(tmp_path, [future])
    assert (tmp_path / "before").exists()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_rank_deliver(client: Client, tmp_path: Path, method: str) -> None:
    """As DataLoader workers do: forked after the parent has submitted, or spawned."""
    handler = DaskResultsHandler()
    program = """
        import multiprocessing, pickle, sys
        from pathlib import Path

        def child(handler, index):
            for n in range(50):
                handler.submit_result(f"child/{index}/{n}", "x")
            handler.log_metrics({"n": index}, step=1)

        if __name__ == "__main__":
            handler = pickle.loads(bytes.fromhex(sys.argv[1]))
            handler.submit_result("parent/0", "x")
            context = multiprocessing.get_context(sys.argv[2])
            children = [context.Process(target=child, args=(handler, n)) for n in range(2)]
            [each.start() for each in children]
            handler.submit_result("parent/1", "x")
            [each.join() for each in children]
            assert all(each.exitcode == 0 for each in children)
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))

    def work() -> int:
        import pickle

        args = [sys.executable, str(script), pickle.dumps(handler).hex(), method]
        return subprocess.run(args, timeout=90).returncode

    future = client.submit(work, pure=False)
    handler.process_results(tmp_path / "out", [future])
    assert future.result() == 0
    assert len(list((tmp_path / "out").glob("child/*/*"))) == 100
    assert len(list((tmp_path / "out").glob("parent/*"))) == 2
    assert len(open_run(tmp_path / "out").metrics("n")) == 2


def test_dead_scheduler_is_told_within_bounds_and_durable_results_stay(tmp_path: Path) -> None:
    program = """
        import sys
        from distributed import LocalCluster
        cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0")
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
    """
    script = tmp_path / "cluster.py"
    script.write_text(
        "if __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(program), "    ")
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    address = process.stdout.readline().decode().strip()
    handler = DaskResultsHandler()

    def work() -> None:
        handler.submit_result("durable", "x")
        time.sleep(100)

    class Killing(MemorySink):
        def flush(self) -> None:
            process.kill()

    sink = Killing()
    with Client(address) as client:
        future = client.submit(work, pure=False)
        start = time.monotonic()
        with pytest.raises((ResultsError, asyncio.CancelledError, CancelledError)) as caught:
            handler.process_results(sink, [future])
        assert time.monotonic() - start < 90
    assert "durable" in sink.results
    if isinstance(caught.value, ChannelLostError):
        assert "scheduler" in str(caught.value)
    process.wait()


def test_results_travel_over_tls(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    handler = DaskResultsHandler()
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, security=Security.temporary(), dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        future = client.submit(lambda: handler.submit_result("a", "b"), pure=False)
        handler.process_results(tmp_path, [future])
    assert (tmp_path / "a").read_bytes() == b"b"


def test_handler_without_any_scheduler_says_so(tmp_path: Path) -> None:
    program = """
        import pickle
        from ddp_results import DaskResultsHandler, NoClusterError
        handler = pickle.loads(pickle.dumps(DaskResultsHandler()))
        try:
            handler.submit_result("a", "b")
        except NoClusterError as error:
            assert "Client" in str(error)
        else:
            raise SystemExit(1)
    """
    assert run_program(program).wait(60) == 0
    assert issubclass(NoClusterError, ResultsError)


def test_many_tiny_results_arrive(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def work(rank: int) -> None:
        for n in range(25_000):
            handler.submit_result(f"{rank}/{n}", b"")

    handler.process_results(sink, client.map(work, range(4), pure=False))
    assert len(sink.results) == 100_000


def test_task_that_raises_at_once_loses_nothing(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def work(rank: int) -> None:
        handler.submit_result(str(rank), "x")
        raise ValueError(rank)

    futures = client.map(work, range(4), pure=False)
    wait_for(lambda: all(future.done() for future in futures))
    with pytest.raises(ValueError, match="0"):
        handler.process_results(sink, futures)
    assert sorted(sink.results) == ["0", "1", "2", "3"]


def test_handler_made_anew_in_a_rank_is_refused_there() -> None:
    program = """
        import os
        os.environ["RANK"] = "0"
        from ddp_results import DaskResultsHandler, NoClusterError
        try:
            DaskResultsHandler().submit_result("a", "b")
        except NoClusterError as error:
            assert "as an argument" in str(error)
        else:
            raise SystemExit(1)
    """
    assert run_program(program).wait(60) == 0


def test_scheduler_inside_another_process_is_said_to_be_out_of_reach() -> None:
    program = """
        from ddp_results import DaskResultsHandler, NoClusterError
        from ddp_results._locate import SchedulerAddress
        handler = DaskResultsHandler()
        handler._carried = SchedulerAddress("inproc://127.0.0.1/1/1")
        try:
            handler.submit_result("a", "b")
        except NoClusterError as error:
            assert "LocalCluster()" in str(error)
        else:
            raise SystemExit(1)
    """
    assert run_program(program).wait(60) == 0


def test_handler_made_in_a_task_is_refused_there(client: Client, tmp_path: Path) -> None:
    future = client.submit(lambda: DaskResultsHandler().submit_result("a", "b"), pure=False)
    with pytest.raises(NoClusterError, match="as an argument"):
        DaskResultsHandler().process_results(tmp_path, [future])
