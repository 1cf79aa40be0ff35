"""Sinks that cannot store for a while: a full disk, S3 that refuses or is away."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Pending, wait_for

from ddp_results import (
    DaskResultsHandler,
    LocalSink,
    MemorySink,
    S3ResultsHandler,
    SinkError,
    SinkUnavailableError,
    TeeSink,
    open_run,
    open_sink,
)
from ddp_results._delivery import Delivery
from ddp_results.errors import CollectorBusyError
from fault_proxy import Fault, FaultProxy
from s3_server import S3Server


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_full_disk_is_waited_for_and_nothing_is_lost(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(800_000))
    handler = DaskResultsHandler()
    for n in range(20):
        handler.submit_result(f"{n}.bin", bytes([n]) * 30_000)
        handler.log_metrics({"loss": n}, step=n)
    thread, errors = _in_thread(lambda: handler.process_results(small_disk / "out"))
    wait_for(lambda: "No space left" in caplog.text)
    ballast.unlink()
    thread.join(60)
    assert not errors
    for n in range(20):
        assert (small_disk / f"out/{n}.bin").read_bytes() == bytes([n]) * 30_000
    assert len(open_run(small_disk / "out").metrics("loss")) == 20
    assert not list((small_disk / "out").rglob(".ddp-tmp-*"))


def test_disk_that_is_read_only_for_a_while_is_waited_for(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(small_disk)], check=True)

    handler, future = DaskResultsHandler(), Pending()
    handler.submit_result("first", "x")
    thread, errors = _in_thread(lambda: handler.process_results(small_disk / "out", future))
    wait_for((small_disk / "out/first").exists)
    remount("ro")
    handler.submit_result("second", "x")
    wait_for(lambda: "Read-only" in caplog.text)
    remount("rw")
    future.ended = True
    thread.join(60)
    assert not errors
    assert (small_disk / "out/second").exists()


def test_second_call_for_a_key_leaves_the_sink_of_the_first_alone() -> None:
    class Counted(MemorySink):
        n_closed = 0

        def close(self) -> None:
            self.n_closed += 1

    sink, future = Counted(), Pending()
    handler = DaskResultsHandler(sink=sink)
    handler.submit_result("a", "x")
    thread, errors = _in_thread(lambda: handler.process_results(None, future))
    wait_for(lambda: sink.results)
    with pytest.raises(CollectorBusyError, match="in this process"):
        handler.process_results(None)
    with pytest.raises(CollectorBusyError, match="in use by another"):
        DaskResultsHandler().process_results(sink)
    assert sink.n_closed == 0
    future.ended = True
    thread.join(60)
    assert not errors
    handler.process_results(None)
    assert sink.n_closed == 2


@pytest.mark.parametrize(
    ("failures", "tries", "error"),
    [
        ([TimeoutError("passing")], 2, None),
        ([ValueError("for good")], 1, "MemorySink.* could not be closed: for good"),
    ],
)
def test_close_that_fails_in_passing_is_tried_again(
    failures: list[Exception], tries: int, error: str | None
) -> None:
    class Closing(MemorySink):
        n_tries = 0

        def close(self) -> None:
            self.n_tries += 1
            if failures:
                raise failures.pop()

    closing, after = Closing(), MemorySink()
    handler = DaskResultsHandler(sink=TeeSink([closing, after]))
    handler.submit_result("a", "x")
    with pytest.raises(SinkError, match=error) if error else contextlib.nullcontext():
        handler.process_results(None)
    assert closing.n_tries == tries
    assert closing.results == after.results == {"a": b"x"}


def test_sink_that_stays_away_is_given_up_and_the_other_has_everything(tmp_path: Path) -> None:
    class Away(MemorySink):
        def write(self, path: str, data: bytes) -> None:
            raise SinkError("away", transient=True)

    handler = DaskResultsHandler(sink_timeout_s=0.5)
    for n in range(10):
        handler.submit_result(str(n), "x")
    with pytest.raises(SinkError, match="given up"):
        handler.process_results(TeeSink([Away(), tmp_path]))
    assert len(list(tmp_path.iterdir())) == 10


def test_result_that_cannot_be_stored_is_told_after_the_others_are(tmp_path: Path) -> None:
    handler = DaskResultsHandler()
    handler.submit_result("a", "file")
    handler.submit_result("a/b", "below a file")
    handler.submit_result("c", "after")
    with pytest.raises(SinkError, match="'a/b'"):
        handler.process_results(tmp_path)
    assert (tmp_path / "c").read_text() == "after"
    assert (tmp_path / "a").read_text() == "file"


@pytest.mark.parametrize(
    "error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
)
def test_sink_of_a_stranger_that_raises_anything_does_not_stop_the_others(
    tmp_path: Path, error: type[BaseException]
) -> None:
    class Buggy(MemorySink):
        def append(self, source: object, points: object) -> None:
            raise error("a bug")

    handler = DaskResultsHandler()
    handler.log_metrics({"loss": 1})
    handler.submit_result("a", "x")
    with pytest.raises(SinkError, match="a bug"):
        handler.process_results(TeeSink([Buggy(), tmp_path]))
    assert (tmp_path / "a").exists()
    assert len(open_run(tmp_path).metrics()) == 1


def test_sinks_that_are_equal_by_value_are_refused() -> None:
    @dataclass
    class Labelled(MemorySink):
        label: str = ""

    with pytest.raises(TypeError, match=r"Labelled .*eq=False"):
        DaskResultsHandler().process_results(Labelled())


def test_end_of_the_thread_that_stores_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr(Delivery, "_store", fail)
    handler = DaskResultsHandler()
    handler.submit_result("a", "x")
    with pytest.raises(SinkError, match="nobody foresaw this"):
        handler.process_results(MemorySink())


@pytest.mark.xdist_group("s3")
def test_s3_that_refuses_for_a_while_gets_everything(
    s3: S3Server, bucket: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    sink = open_sink(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
    handler = DaskResultsHandler()
    for n in range(20):
        handler.submit_result(f"{n}.txt", str(n))
        handler.log_metrics({"loss": n}, step=n)
    proxy.script([Fault(status=503)] * 5, path=f"/{bucket}")  # when the bucket is looked for
    for n in range(20):
        refusals = [Fault(status=503)] * 2 + [Fault(status=403, code="AccessDenied")] * 3
        proxy.script(refusals, path=f"/{bucket}/run/{n}.txt")
    with caplog.at_level(logging.WARNING):
        handler.process_results(sink)
    for n in range(20):
        assert s3.get_object(bucket, f"run/{n}.txt") == str(n).encode()
    run = open_run(f"s3://{bucket}/run")
    assert len(run.metrics()) == 20
    run.close()


@pytest.mark.xdist_group("s3")
def test_s3_tells_what_it_never_takes_after_everything_else_is_stored(
    s3: S3Server, bucket: str, proxy: FaultProxy
) -> None:
    sink = open_sink(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
    proxy.script([Fault(status=400, code="InvalidRequest")] * 99, path=f"/{bucket}/run/never")
    proxy.script([Fault(status=503)] * 8, path=f"/{bucket}/run/late")
    sink.write("never", b"x")
    sink.write("late", b"x")
    errors: list[SinkError] = []
    while not errors or errors[-1].transient:
        with pytest.raises(SinkError) as caught:
            sink.flush()
        errors.append(caught.value)
    assert "InvalidRequest" in str(errors[-1])
    assert len(errors) > 1
    assert s3.get_object(bucket, "run/late") == b"x"
    sink.close()


@pytest.mark.xdist_group("s3")
def test_s3_that_is_gone_for_a_while_gets_everything(
    s3: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    handler = DaskResultsHandler()
    with FaultProxy(s3.endpoint_url) as proxy:
        port = int(proxy.endpoint_url.rpartition(":")[2])
        sink = open_sink(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
        handler.submit_result("first", "x")
        processing = Pending()
        thread, errors = _in_thread(lambda: handler.process_results(sink, [processing]))
        wait_for(lambda: "run/first" in s3.list_keys(bucket))
    for n in range(50):  # nobody listens there any more: connections are refused
        handler.submit_result(f"{n}.txt", str(n))
        handler.log_metrics({"loss": n}, step=n)
    wait_for(lambda: "waiting for" in caplog.text)
    with FaultProxy(s3.endpoint_url, port=port):
        processing.ended = True
        thread.join(100)
        assert not thread.is_alive()
    assert not errors
    for n in range(50):
        assert s3.get_object(bucket, f"run/{n}.txt") == str(n).encode()
    run = open_run(f"s3://{bucket}/run")
    assert [point["step"] for point in run.metrics()] == list(range(50))
    run.close()


def test_s3_that_hangs_up_leaves_no_tracebacks_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        port = listener.getsockname()[1]
        sink = open_sink("s3://bucket/run", endpoint_url=f"http://127.0.0.1:{port}")
        for n in range(20):
            sink.write(f"{n}", b"x")
        with pytest.raises(SinkError):
            sink.flush()
        with pytest.raises(SinkError):
            sink.close()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    gc.collect()  # a task that nobody awaited speaks when it is collected
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.xdist_group("s3")
def test_large_upload_survives_resets_and_refusals(
    s3: S3Server, bucket: str, proxy: FaultProxy
) -> None:
    data = os.urandom(30 * 2**20)
    handler = S3ResultsHandler(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
    handler.submit_result("small", "x")
    handler.flush(60)
    proxy.script([Fault(status=503)] * 5 + [Fault(hang_up=True)] * 5)
    handler.submit_result("large", data)
    handler.submit_result("after", "y")
    handler.flush(100)
    assert s3.get_object(bucket, "run/large") == data
    assert s3.get_object(bucket, "run/after") == b"y"


@pytest.mark.xdist_group("s3")
def test_last_write_to_a_key_wins_whatever_the_uploads_do(
    s3: S3Server, bucket: str, proxy: FaultProxy
) -> None:
    sink = open_sink(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
    sink.open()
    proxy.script([Fault(delay_s=0.5), Fault(status=503), Fault(delay_s=0.2)])
    for n in range(50):
        sink.write("same", str(n).encode())
    sink.write("gone", b"x")
    sink.delete("gone")
    with contextlib.suppress(SinkError):
        sink.flush()
    sink.flush()
    sink.close()
    assert s3.get_object(bucket, "run/same") == b"49"
    assert "run/gone" not in s3.list_keys(bucket)


@pytest.mark.xdist_group("s3")
def test_server_that_is_not_there_is_said_at_the_start() -> None:
    handler = S3ResultsHandler("s3://b/run", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(SinkUnavailableError, match="s3://b/run"):
        handler.submit_result("a", "b")


def test_wrong_addresses_are_refused_at_once() -> None:
    for wrong in ("bucket/x", "s3:/b/x", "s3://"):
        with pytest.raises(ValueError, match="s3://bucket/prefix"):
            S3ResultsHandler(wrong)
    with pytest.raises(ValueError, match="addressing"):
        S3ResultsHandler("s3://b/x", addressing="dns")
    with pytest.raises(SinkUnavailableError, match="no sink for 'gs'"):
        open_sink("gs://b/x")
    assert isinstance(open_sink("C:results"), LocalSink)
