"""Large results that ranks store on S3 themselves, while only their place travels."""

from __future__ import annotations

import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from ddp_results import DaskResultsHandler, SinkError, open_sink
from ddp_results._collector import Collector
from ddp_results._delivery import Delivery
from ddp_results._local_channel import LocalChannel
from ddp_results._payload import result_records
from ddp_results._record import Kind
from ddp_results._sender import Sender
from ddp_results._wire import unpack_frame
from ddp_results.sinks.base import Sink
from ddp_results.sinks.memory import MemorySink
from fault_proxy import Fault, FaultProxy
from s3_server import S3Server

pytestmark = pytest.mark.xdist_group("s3")

LARGE = 20 * 2**20


def _unfinished(s3: S3Server, bucket: str) -> list[Any]:
    async def find(client: Any) -> Any:
        return await client.list_multipart_uploads(Bucket=bucket)

    found: list[Any] = s3._call(find).get("Uploads", [])
    return found


def _wait_until_sent(sender: Sender) -> None:
    deadline = time.monotonic() + 60
    while sender._outbox.sent < sender._outbox.submitted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _collect(key: str, *sinks: Sink) -> Delivery:
    delivery = Delivery(sinks, sink_timeout_s=60)
    delivery.start()
    collector = Collector(key, lambda: LocalChannel(key), delivery)
    collector.start()
    collector.finish()
    assert collector.wait_finished(60)
    collector.stop(30)
    for sink in sinks:
        sink.close()
    return delivery


def _kinds(key: str) -> list[Kind]:
    frames = map(unpack_frame, LocalChannel(key)._frames)
    return [record.kind for frame in frames for record in frame.records]


def test_only_the_place_of_a_large_result_travels(s3: S3Server, bucket: str) -> None:
    key, data = uuid.uuid4().hex, os.urandom(LARGE)
    sink = open_sink(f"s3://{bucket}/run")
    sender = Sender(key, lambda: LocalChannel(key), sink.uploader())
    sender.submit(result_records("same", b"before"))
    sender.submit(result_records("same", data))
    sender.submit(result_records("other", b"after"))
    _wait_until_sent(sender)
    assert sum(len(each) for frame in LocalChannel(key)._frames for each in frame) < 100_000
    assert Kind.PART not in _kinds(key)
    assert "run/same" not in s3.list_keys(bucket)
    memory = MemorySink()
    delivery = _collect(key, sink, memory)
    sender.close(5)
    assert s3.get_object(bucket, "run/same") == memory.results["same"] == data
    assert [path for path, _ in memory.history] == ["same", "same", "other"]
    assert not delivery.failures
    assert _unfinished(s3, bucket) == []


def test_later_write_to_the_same_path_counts(s3: S3Server, bucket: str) -> None:
    key = uuid.uuid4().hex
    sink = open_sink(f"s3://{bucket}/run")
    sender = Sender(key, lambda: LocalChannel(key), sink.uploader())
    for data in (b"first", bytes(LARGE), b"last"):
        sender.submit(result_records("same", data))
    _collect(key, sink)
    sender.close(5)
    assert s3.get_object(bucket, "run/same") == b"last"


def test_upload_that_is_adopted_again_changes_nothing(s3: S3Server, bucket: str) -> None:
    sink, data = open_sink(f"s3://{bucket}/run"), os.urandom(LARGE)
    uploader = sink.uploader()
    assert uploader is not None
    upload = uploader.start("large", data).result(60).row()
    uploader.close()
    for _ in range(2):  # as after a lost answer, or when another client takes over
        assert sink.adopt("large", upload)
    assert s3.get_object(bucket, "run/large") == data
    s3.delete_object(bucket, "run/large")
    with pytest.raises(SinkError, match="parts have been removed") as caught:
        sink.adopt("large", upload)
    assert not caught.value.transient
    sink.close()


def test_upload_that_fails_leaves_no_parts_and_goes_through_dask(
    s3: S3Server, bucket: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    key, data = uuid.uuid4().hex, os.urandom(LARGE)
    there = open_sink(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
    sender = Sender(key, lambda: LocalChannel(key), there.uploader())
    proxy.plan = lambda request: (
        Fault(status=403, code="AccessDenied") if "partNumber=2" in request.target else None
    )
    sender.submit(result_records("large", data))
    sender.submit(result_records("after", b"x"))
    _wait_until_sent(sender)
    assert _unfinished(s3, bucket) == []
    assert Kind.UPLOAD not in _kinds(key)
    _collect(key, open_sink(f"s3://{bucket}/run"))
    sender.close(5)
    assert s3.get_object(bucket, "run/large") == data
    assert "through Dask" in caplog.text


def test_source_is_not_taken_for_dead_while_it_uploads(
    s3: S3Server, bucket: str, proxy: FaultProxy
) -> None:
    key, data = uuid.uuid4().hex, os.urandom(LARGE)
    sink = open_sink(f"s3://{bucket}/run", endpoint_url=proxy.endpoint_url)
    sender = Sender(key, lambda: LocalChannel(key), sink.uploader())
    go_on = threading.Event()
    proxy.plan = lambda request: (
        Fault(delay_s=8.0) if "partNumber=2" in request.target and not go_on.is_set() else None
    )
    sender.submit(result_records("large", data))
    delivery = Delivery([sink], sink_timeout_s=60)
    delivery.start()
    collector = Collector(key, lambda: LocalChannel(key), delivery)
    collector.silent_s = 4.0
    collector.start()
    collector.finish()
    assert collector.wait_finished(60)
    collector.stop(30)
    assert not any(stream.given_up for stream in collector.streams.values())
    go_on.set()
    sender.close(5)
    sink.close()
    assert s3.get_object(bucket, "run/large") == data


def test_large_result_of_a_rank_is_in_the_bucket_and_in_the_folder(
    s3: S3Server, bucket: str, client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler(sink=f"s3://{bucket}/run")
    environment, data = s3.environment(), bytes(range(256)) * (LARGE // 256)

    def work() -> None:
        os.environ.update(environment)  # the workers may be older than the server
        data = bytes(range(256)) * (LARGE // 256)
        handler.submit_result("large", data)
        handler.log_metrics({"loss": 1.0})

    handler.process_results(tmp_path, [client.submit(work, pure=False)])
    assert (tmp_path / "large").read_bytes() == data
    assert s3.get_object(bucket, "run/large") == data
