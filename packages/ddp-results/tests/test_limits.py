"""What a run may cost: memory of scheduler and client, lines in the scheduler's log."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from distributed import Client, SubprocessCluster

from ddp_results import DaskResultsHandler, MemorySink
from ddp_results.sinks.local import LocalSink

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(240)]

MIB = 2**20


@pytest.fixture
def apart() -> Iterator[Client]:
    """A cluster whose scheduler is a process of its own, so that its memory can be told apart."""
    with (
        SubprocessCluster(n_workers=2, worker_kwargs={"nthreads": 2}) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        yield client


class Peak:
    """Measures by how much scheduler and client have grown at most; a thread that looks often."""

    def __init__(self, client: Client) -> None:
        scheduler = psutil.Process(client.run_on_scheduler(os.getpid))
        self._processes = (scheduler, psutil.Process())
        self._start = self._sizes()
        self._most = self._start
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown_bytes(self) -> int:
        return max(most - start for most, start in zip(self._most, self._start, strict=True))

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self._most = [max(pair) for pair in zip(self._most, self._sizes(), strict=True)]

    def _sizes(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def wait_until_steady(self) -> None:
        """Return when neither has grown for three seconds."""
        last, since = self.grown_bytes, time.monotonic()
        deadline = since + 100
        while time.monotonic() - since < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            if self.grown_bytes > last + MIB:
                last, since = self.grown_bytes, time.monotonic()


def submit_mebibytes(handler: DaskResultsHandler) -> Callable[[int], None]:
    def work(rank: int) -> None:
        for n in range(200):
            handler.submit_result(f"{rank}/{n}", bytes([n]) * (MIB - 1))

    return work


class SlowSink(MemorySink):
    """Stores slower than four ranks submit, and keeps only how large each result was."""

    def write(self, path: str, data: bytes) -> None:
        time.sleep(0.01)
        super().write(path, str(len(data)).encode())


def test_slow_sink_fills_neither_scheduler_nor_client(apart: Client) -> None:
    handler, sink = DaskResultsHandler(), SlowSink()
    with Peak(apart) as peak:
        futures = apart.map(submit_mebibytes(handler), range(4), pure=False)
        handler.process_results(sink, futures)
    assert len(sink.results) == 800
    assert set(sink.results.values()) == {str(MIB - 1).encode()}
    assert peak.grown_bytes < 300 * MIB


def test_ranks_without_a_client_do_not_fill_the_scheduler(apart: Client) -> None:
    handler, sink = DaskResultsHandler(), SlowSink()
    with Peak(apart) as peak:
        futures = apart.map(submit_mebibytes(handler), range(4), pure=False)
        peak.wait_until_steady()
        assert not any(future.done() for future in futures)
        handler.process_results(sink, futures)
    assert len(sink.results) == 800
    assert peak.grown_bytes < 300 * MIB


def test_result_of_a_gigabyte_arrives_whole(apart: Client, tmp_path: Path) -> None:
    handler, size = DaskResultsHandler(), 2**30

    def work() -> str:
        data = os.urandom(MIB) * (size // MIB)
        handler.submit_result("large", data)
        handler.submit_result("after", b"")
        return hashlib.sha256(data).hexdigest()

    with Peak(apart) as peak:
        future = apart.submit(work, pure=False)
        handler.process_results(LocalSink(tmp_path), [future])
    assert (tmp_path / "large").stat().st_size == size
    with (tmp_path / "large").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == future.result()
    assert (tmp_path / "after").exists()
    (tmp_path / "large").unlink()
    assert peak.grown_bytes < 300 * MIB


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_clean_run_leaves_no_error_in_the_log_of_the_scheduler(
    client: Client, tmp_path: Path
) -> None:
    """The scheduler of this cluster runs in this process, and so does its log."""
    handler, lines = DaskResultsHandler(), Lines()

    def work(rank: int) -> None:
        for step in range(100):
            handler.log_metrics({"loss": step}, step=step)
            handler.submit_result(f"{rank}/{step}", b"x" * 100_000)
            time.sleep(0.01)
        handler.flush()

    logging.getLogger("distributed").addHandler(lines)
    try:
        handler.process_results(tmp_path, client.map(work, range(4), pure=False))
        handler.process_results(tmp_path, [])
        logging.getLogger("distributed.scheduler").error("a line that is seen")
    finally:
        logging.getLogger("distributed").removeHandler(lines)
    errors = [each.getMessage() for each in lines.records if each.levelno >= logging.ERROR]
    assert errors == ["a line that is seen"]
