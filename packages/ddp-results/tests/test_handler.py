"""Whole ways, from a rank to a sink, on a real cluster."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from distributed import Client

from ddp_results import (
    DaskResultsHandler,
    MemorySink,
    PathError,
    SinkUnavailableError,
    TeeSink,
    open_run,
)

pytestmark = pytest.mark.xdist_group("cluster")


def test_results_and_metrics_arrive_as_submitted(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()

    def work(rank: int) -> None:
        for step in range(50):
            handler.log_metrics({"loss": rank + step / 100}, step=step)
            handler.submit_result(f"worker/{rank}/{step}.json", json.dumps({"step": step}))

    handler.process_results(str(tmp_path), client.map(work, range(4), pure=False))
    for rank in range(4):
        files = sorted((tmp_path / "worker" / str(rank)).iterdir())
        assert len(files) == 50
        assert json.loads((tmp_path / f"worker/{rank}/7.json").read_text()) == {"step": 7}
    points = open_run(tmp_path).metrics("loss")
    assert len(points) == 200
    assert len(open_run(tmp_path).to_pandas()) == 200


def test_what_was_submitted_before_processing_starts_is_kept(
    client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler("early-" + tmp_path.name)
    future = client.submit(lambda: handler.submit_result("early.txt", "é"), pure=False)
    future.result()
    handler.process_results(tmp_path, [future])
    assert (tmp_path / "early.txt").read_text("utf-8") == "é"


def test_failure_is_raised_after_everything_before_it_is_stored(
    client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler()

    def work() -> None:
        for n in range(500):
            handler.submit_result(f"{n}.txt", b"x" * 1000)
        raise ZeroDivisionError("the last line")

    with pytest.raises(ZeroDivisionError, match="the last line"):
        handler.process_results(tmp_path, [client.submit(work, pure=False)])
    assert len(list(tmp_path.glob("*.txt"))) == 500


def test_without_raise_errors_the_others_go_on(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()

    def work(rank: int) -> None:
        if rank == 0:
            raise ZeroDivisionError
        time.sleep(0.5)
        handler.submit_result("late.txt", "late")

    handler.process_results(tmp_path, client.map(work, range(2), pure=False), raise_errors=False)
    assert (tmp_path / "late.txt").exists()


def test_large_result_travels_in_parts(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()

    def work() -> None:
        handler.submit_result("large", bytes(range(256)) * 200_000)
        handler.submit_result("empty", b"")

    handler.process_results(tmp_path, [client.submit(work, pure=False)])
    assert (tmp_path / "large").read_bytes() == bytes(range(256)) * 200_000
    assert (tmp_path / "empty").read_bytes() == b""


def test_order_of_writes_to_one_path_is_kept(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def work() -> None:
        for n in range(300):
            handler.submit_result("same", str(n))

    handler.process_results(sink, [client.submit(work, pure=False)])
    assert [int(data) for _, data in sink.history] == list(range(300))


def test_ranks_that_write_to_one_path_each_keep_their_order(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def work(rank: int) -> None:
        for n in range(300):
            handler.submit_result("same", f"{rank} {n}")
            if n % 50 == 0:
                handler.submit_result("same", f"{rank} {n} ".encode() + bytes(2**21))

    futures = [
        client.submit(work, r, workers=[w], pure=False) for r, w in enumerate(client.nthreads())
    ]
    handler.process_results(sink, futures)
    history = [(data.split(None, 2), len(data)) for _, data in sink.history]
    for rank in range(2):
        own = [(int(words[1]), size > 100) for words, size in history if int(words[0]) == rank]
        assert own == [
            (n, large) for n in range(300) for large in (False, True) if not large or n % 50 == 0
        ]
    assert sink.results["same"] == sink.history[-1][1]


def test_every_sink_gets_everything(client: Client, tmp_path: Path) -> None:
    memory = MemorySink()
    handler = DaskResultsHandler()
    future = client.submit(lambda: handler.submit_result("a", "b"), pure=False)
    handler.process_results(TeeSink([tmp_path, memory]), future)
    assert (tmp_path / "a").read_bytes() == memory.results["a"] == b"b"


def test_same_key_continues(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()
    for name in ("first", "second"):
        future = client.submit(lambda n: handler.submit_result(n, n), name, pure=False)
        handler.process_results(tmp_path, [future])
        assert (tmp_path / name).exists()


def test_silent_ranks_are_told_of_only_if_nobody_has_ever_submitted(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = DaskResultsHandler()
    future = client.submit(lambda: handler.submit_result("a", "b"), pure=False)
    for _ in range(2):
        handler.process_results(tmp_path, [future])
        assert "no process has submitted anything" not in caplog.text
    DaskResultsHandler().process_results(tmp_path, [future])
    assert "no process has submitted anything" in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "\0\n\r\t", "é", "e\u0301", "日本語", "\U0001f680", "\u202e\ufeff", "\uffff\U0010ffff"],
    ids=ascii,
)
def test_text_arrives_as_utf_8(client: Client, text: str) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()
    future = client.submit(lambda: handler.submit_result("text", text), pure=False)
    handler.process_results(sink, [future])
    assert sink.results["text"].decode("utf-8") == text


def test_text_with_a_lone_surrogate_is_an_error_in_the_line_of_the_rank(client: Client) -> None:
    handler, sink = DaskResultsHandler(), MemorySink()

    def work() -> None:
        handler.submit_result("before", "x")
        handler.submit_result("name", os.fsdecode(b"\xff.jpg"))

    with pytest.raises(UnicodeEncodeError) as caught:
        handler.process_results(sink, [client.submit(work, pure=False)])
    assert "'name'" in str(caught.value.__notes__)
    assert sink.results == {"before": b"x"}


def test_no_futures_is_no_error(client: Client, tmp_path: Path) -> None:
    DaskResultsHandler().process_results(tmp_path, [])


def test_flush_in_a_rank_returns_when_durable(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()

    def work() -> bool:
        handler.submit_result("flushed", "x")
        handler.flush(timeout=30)
        return (tmp_path / "flushed").exists()

    future = client.submit(work, pure=False)
    handler.process_results(tmp_path, [future])
    assert future.result() is True


def test_bad_path_is_an_error_in_the_line_of_the_rank(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()
    future = client.submit(lambda: handler.submit_result("../x", "y"), pure=False)
    with pytest.raises(PathError, match="segment"):
        handler.process_results(tmp_path, [future])


def test_unwritable_folder_is_said_at_the_start(client: Client) -> None:
    future = client.submit(time.sleep, 20, pure=False)
    with pytest.raises(SinkUnavailableError, match="/proc/nowhere"):
        DaskResultsHandler().process_results("/proc/nowhere", [future])
    assert not future.done()
    future.cancel()


def test_child_process_finds_the_scheduler_and_delivers_at_exit(
    client: Client, tmp_path: Path
) -> None:
    """As a rank of ddp-core does: a child of the worker, told the address by its environment."""
    handler = DaskResultsHandler()
    program = (
        "import pickle, sys\n"
        "handler = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "handler.submit_result('child.txt', 'last line')\n"
    )

    def work() -> int:
        from distributed import get_worker

        env = {
            **os.environ,
            "RANK": "3",
            "DASK_SCHEDULER_ADDRESS": get_worker().scheduler.address,
        }
        command = [sys.executable, "-c", program, pickle.dumps(handler).hex()]
        return subprocess.run(command, env=env, timeout=60).returncode

    future = client.submit(work, pure=False)
    report = handler.process_results(tmp_path, [future])
    assert future.result() == 0
    assert (tmp_path / "child.txt").read_text() == "last line"
    assert report.sources[0].startswith("rank 3")


def test_thread_of_a_worker_submits(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()

    def work() -> None:
        thread = threading.Thread(target=handler.submit_result, args=("thread.txt", "x"))
        thread.start()
        thread.join()

    handler.process_results(tmp_path, [client.submit(work, pure=False)])
    assert (tmp_path / "thread.txt").exists()


def run_alone(folder: Path, *more: str) -> None:
    """Store `a.txt` in a script without a cluster, which then goes on with more lines."""
    lines = (
        "import sys",
        "from ddp_results import DaskResultsHandler",
        "handler = DaskResultsHandler()",
        "handler.submit_result('a.txt', 'a')",
        "handler.process_results(sys.argv[1], [])",
        *more,
    )
    command = [sys.executable, "-c", "\n".join(lines), str(folder)]
    subprocess.run(command, check=True, timeout=60)


def test_script_without_cluster_keeps_results_in_its_process(tmp_path: Path) -> None:
    run_alone(tmp_path)
    assert (tmp_path / "a.txt").read_text() == "a"


def test_flush_returns_at_once_when_everything_is_stored(tmp_path: Path) -> None:
    run_alone(tmp_path, "handler.flush(timeout=5)")


@pytest.mark.parametrize("key", ["", "\udc00"], ids=["empty", "surrogate"])
def test_key_that_cannot_be_told_to_others_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        DaskResultsHandler(key)
