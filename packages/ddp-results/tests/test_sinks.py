from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from ddp_results import (
    LocalSink,
    MemorySink,
    S3ResultsHandler,
    SinkError,
    SinkUnavailableError,
    open_run,
    open_sink,
)
from ddp_results.sinks import Point, Source
from ddp_results.testing import check_sink
from s3_server import S3Server


def test_local_sink_keeps_the_contract(tmp_path: Path) -> None:
    check_sink(lambda: LocalSink(tmp_path))


def test_local_sink_with_fsync_keeps_the_contract(tmp_path: Path) -> None:
    check_sink(lambda: LocalSink(tmp_path, fsync=True))


class _Forgetful(MemorySink):
    """Keeps the first 100 bytes of what is written."""

    def write(self, path: str, data: bytes) -> None:
        super().write(path, data[:100])


def test_check_finds_a_sink_that_cuts_results() -> None:
    sink = _Forgetful()
    with pytest.raises(AssertionError, match="comes back as it was"):
        check_sink(lambda: sink)


def test_points_keep_their_order_though_the_clock_is_set_back() -> None:
    sink = MemorySink()
    times = [10.0, 20.0, 5.0, 6.0, 30.0]
    points = [Point(n, time, None, {"n": n}) for n, time in enumerate(times, 1)]
    sink.append(Source("a", 0, 0, "h", 1, ""), points)
    sink.append(Source("b", 1, 0, "h", 2, ""), [Point(1, 25.0, None, {"n": 9})])
    assert [point["metrics"]["n"] for point in open_run(sink).metrics()] == [1, 2, 3, 4, 9, 5]


def test_what_is_no_target_is_refused() -> None:
    for wrong in (None, ["results"], 3, b"results"):
        with pytest.raises(TypeError, match="s3://bucket/prefix"):
            open_sink(wrong)
        with pytest.raises(TypeError, match="s3://bucket/prefix"):
            open_run(wrong)
    assert repr(open_sink("S3://Bucket/Run")) == "S3Sink('s3://Bucket/Run/')"


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    def temporary(folder: Path) -> set[Path]:
        return set(folder.rglob(".ddp-tmp-*"))

    program = (
        "import os, signal, sys\n"
        "from ddp_results import LocalSink\n"
        "sink = LocalSink(sys.argv[1])\n"
        "for path in ('a/large', 'b/large'):\n"
        "    sink.writer(path, 10).append(b'x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for _ in range(2):
        command = [sys.executable, "-c", program, str(tmp_path)]
        assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
        left = temporary(tmp_path)
    assert len(left) == 4  # of the second, too: those of the first were new
    old, *new = temporary(tmp_path / "a")
    hours_ago = time.time() - 2 * 3600
    os.utime(old, (hours_ago, hours_ago))
    os.utime(next(iter(temporary(tmp_path / "b"))), (hours_ago, hours_ago))

    sink = LocalSink(tmp_path)
    sink.write("a/small", b"x")
    assert temporary(tmp_path / "a") == set(new)
    assert len(temporary(tmp_path / "b")) == 2  # nothing was written there
    assert sink.names() == ["a/small"]


def test_metrics_after_the_folder_was_deleted_are_stored_in_a_new_one(tmp_path: Path) -> None:
    source = Source("c0ffee", 0, 0, "here", 1, "")
    sink = LocalSink(tmp_path / "run")
    for n in range(1, 5):
        sink.append(source, [Point(n, 1e9, n, {"loss": n})])
        if n == 2:
            shutil.rmtree(tmp_path / "run")
    sink.close()
    assert [point["seq"] for point in open_run(tmp_path / "run").metrics()] == [3, 4]


def test_memory_sink_keeps_the_contract() -> None:
    sink = MemorySink()
    check_sink(lambda: sink)


@pytest.mark.xdist_group("s3")
def test_s3_sink_keeps_the_contract(s3: S3Server) -> None:
    bucket = f"b-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(bucket)
    check_sink(lambda: open_sink(f"s3://{bucket}/runs/1"))


@pytest.mark.xdist_group("s3")
def test_large_result_is_a_multipart_upload(s3: S3Server) -> None:
    bucket = f"b-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(bucket)
    sink = open_sink(f"s3://{bucket}/runs/1")
    data = os.urandom(20 * 2**20)
    writer = sink.writer("large", len(data))
    for start in range(0, len(data), 2**20):
        writer.append(data[start : start + 2**20])
    assert "runs/1/large" not in s3.list_keys(bucket)
    writer.commit()
    sink.close()
    assert s3.get_object(bucket, "runs/1/large") == data


@pytest.mark.xdist_group("s3")
def test_missing_bucket_is_said_at_the_start(s3: S3Server) -> None:
    sink = open_sink("s3://no-such-bucket/x")
    with pytest.raises(SinkUnavailableError, match=r"no-such-bucket.*does not exist"):
        sink.open()
    sink.close()


@pytest.mark.xdist_group("s3")
def test_s3_handler_writes_without_dask(s3: S3Server) -> None:
    bucket = f"b-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(bucket)
    handler = S3ResultsHandler(f"s3://{bucket}/runs/1")
    handler.submit_result("a b?#%+.txt", "x")
    for step in range(100):
        handler.log_metrics({"loss": 1.0}, step=step)
    handler.flush(timeout=30)
    assert s3.get_object(bucket, "runs/1/a b?#%+.txt") == b"x"
    run = open_run(f"s3://{bucket}/runs/1")
    assert len(run.metrics()) == 100
    assert len(s3.list_keys(bucket, "runs/1/_ddp/metrics/")) == 1
    run.close()


@pytest.mark.xdist_group("s3")
def test_s3_run_needs_no_close(s3: S3Server, bucket: str) -> None:
    program = (
        "import gc, sys, threading\n"
        "from ddp_results import RunNotFoundError, open_run, open_sink\n"
        "address = sys.argv[1]\n"
        "sink = open_sink(address)\n"
        "sink.write('a', b'x')\n"
        "sink.close()\n"
        "assert open_run(address).results() == ['a']\n"
        "gc.collect()\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "try:\n"
        "    open_run(address + 'none')\n"
        "except RunNotFoundError:\n"
        "    pass\n"
        "until_the_end = open_run(address)\n"
        "print(until_the_end.read('a'))\n"
    )
    command = [sys.executable, "-X", "dev", "-c", program, f"s3://{bucket}/run"]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "b'x'\n"), done.stderr
    assert "nclosed" not in done.stderr


@pytest.mark.xdist_group("s3")
def test_s3_run_can_be_read_in_a_forked_process(s3: S3Server, bucket: str) -> None:
    sink = open_sink(f"s3://{bucket}/run")
    sink.write("a", b"x")
    sink.close()
    run = open_run(f"s3://{bucket}/run")
    assert run.read("a") == b"x"
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply_async(run.read, ("a",)).get(30) == b"x"
        assert pool.apply_async(_read_inherited, (id(run),)).get(30) == b"x"
    assert run.read("a") == b"x"
    run.close()


def _read_inherited(number: int) -> bytes:
    (run,) = [each for each in gc.get_objects() if id(each) == number]
    data: bytes = run.read("a")
    run.close()
    return data


def test_symbolic_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "file")
    sink = LocalSink(root)
    for path in ("link/x", "link/deep/x", "file"):
        with pytest.raises(SinkError, match="symbolic link"):
            sink.write(path, b"x")
    assert list(outside.iterdir()) == []


def test_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path)
    sink.write("a", b"1")
    with pytest.raises(SinkError, match="'a/b'") as caught:
        sink.write("a/b", b"2")
    assert not caught.value.transient
    sink.write("c/d", b"3")
    with pytest.raises(SinkError, match="a folder of that name"):
        sink.write("c", b"4")
