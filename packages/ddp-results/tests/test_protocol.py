"""Sender and collector against a channel that loses what a Dask queue may lose."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import wait_for

from ddp_results import _collector
from ddp_results._collector import Collector
from ddp_results._delivery import Delivery
from ddp_results._local_channel import LocalChannel
from ddp_results._payload import result_records
from ddp_results._record import Kind, Record, Source
from ddp_results._sender import Sender
from ddp_results._stream import Stream
from ddp_results._wire import Frame, Packed, unpack_frame
from ddp_results.errors import ChannelLostError, CollectorBusyError, SinkError
from ddp_results.sinks.memory import MemorySink


class LossyChannel(LocalChannel):
    """Loses every third batch that is drained, as a client that dies in between does."""

    chance = random.Random(1)

    async def drain(self) -> list[Packed]:
        frames = await super().drain()
        return [] if frames and self.chance.random() < 0.3 else frames


class Client:
    """A collector with its delivery, as `process_results` has them."""

    def __init__(self, key: str, sink: MemorySink, channel: Callable[[str], Any]) -> None:
        self.delivery = Delivery([sink], sink_timeout_s=60)
        self.delivery.start()
        self.collector = Collector(key, lambda: channel(key), self.delivery)

    def __enter__(self) -> Client:
        try:
            self.collector.start()
        except BaseException:
            self.delivery.stop(1)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.stop(10)
        self.delivery.stop(1)

    def finish(self, timeout_s: float = 60) -> None:
        self.collector.finish()
        assert self.collector.wait_finished(timeout_s)
        assert self.collector.error is None


def _submit(sender: Sender, path: str, data: bytes) -> None:
    sender.submit(result_records(path, data))


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{time.time()}"


def test_lost_batches_are_sent_again_once_each_and_in_order(key: str) -> None:
    sink = MemorySink()
    senders = [Sender(key, lambda: LocalChannel(key)) for _ in range(3)]

    def work(index: int) -> None:
        for n in range(2000):
            _submit(senders[index], f"{index}", str(n).encode())
            if n % 100 == 0:
                time.sleep(0.01)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    with Client(key, sink, LossyChannel) as client:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.finish()
    for index, sender in enumerate(senders):
        sender.close(5)
        got = [int(data) for path, data in sink.history if path == str(index)]
        assert got == list(range(2000))


def test_large_result_survives_losses(key: str) -> None:
    sink, data = MemorySink(), bytes(range(256)) * 40_000
    sender = Sender(key, lambda: LocalChannel(key))
    with Client(key, sink, LossyChannel) as client:
        _submit(sender, "large", data)
        _submit(sender, "after", b"x")
        client.finish()
    sender.close(5)
    assert sink.results["large"] == data
    assert [path for path, _ in sink.history] == ["large", "after"]


def test_large_result_beyond_the_window_waits_for_the_client(key: str) -> None:
    sink, data = MemorySink(), bytes(100 * 2**20)
    sender = Sender(key, lambda: LocalChannel(key))
    thread = threading.Thread(target=_submit, args=(sender, "large", data))
    thread.start()
    channel = LocalChannel(key)
    while len(channel._frames) < 46:
        time.sleep(0.01)
    assert sum(len(each) for frame in channel._frames for each in frame) < 49 * 2**20
    assert thread.is_alive()
    with Client(key, sink, LocalChannel) as client:
        thread.join(30)
        client.finish()
    sender.close(5)
    assert sink.results["large"] == data


def test_another_collector_for_the_key_is_refused(key: str) -> None:
    with (
        Client(key, MemorySink(), LocalChannel),
        pytest.raises(CollectorBusyError, match="use another key"),
        Client(key, MemorySink(), LocalChannel),
    ):
        pass


def test_dead_collector_is_replaced_and_nothing_is_lost(key: str) -> None:
    """The first takes frames from the queue and dies with them in hand, before it stored any."""
    stuck, sink = _StuckSink(), MemorySink()
    sender = Sender(key, lambda: LocalChannel(key))
    for n in range(100):
        _submit(sender, "same", str(n).encode())
    first = Client(key, stuck, _DyingChannel)
    first.collector._thread.start()
    assert stuck.reached.wait(10)
    first.collector.wait_finished(30)  # its channel fails, so it ends without a word
    with Client(key, sink, LocalChannel) as client:
        client.finish()
    stuck.go_on.set()
    first.__exit__()
    sender.close(5)
    assert [int(data) for _, data in sink.history] == list(range(100))


class _AwayChannel(LocalChannel):
    """Of a scheduler that cannot be reached while `away` is set."""

    away = threading.Event()

    async def drain(self) -> list[Packed]:
        if self.away.is_set():
            raise ChannelLostError("away")
        return await super().drain()


class _FrozenChannel(LocalChannel):
    """Answers nobody while it is frozen, as if the client were stopped."""

    frozen = threading.Event()

    async def drain(self) -> list[Packed]:
        while self.frozen.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        return await super().drain()


def test_collector_that_was_frozen_stores_nothing_after_another_took_over(key: str) -> None:
    slow, sink = _SlowSink(), MemorySink()
    sender = Sender(key, lambda: LocalChannel(key))
    for n in range(2000):
        _submit(sender, "same", str(n).encode())
    first = Client(key, slow, _FrozenChannel)
    first.collector.start()
    while len(slow.history) < 10:
        time.sleep(0.01)
    _FrozenChannel.frozen.set()
    try:
        with Client(key, sink, LocalChannel) as client:
            stored = len(slow.history)
            client.finish()
    finally:
        _FrozenChannel.frozen.clear()
    assert first.collector.wait_finished(30)
    assert isinstance(first.collector.error, CollectorBusyError)
    first.__exit__()
    sender.close(5)
    assert len(slow.history) <= stored + 1 < 2000  # one may have been under way
    assert sink.results["same"] == b"1999"


def test_collector_goes_on_with_a_scheduler_that_was_away(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_collector, "_LEASE_S", 0.3)
    sender, sink = Sender(key, lambda: LocalChannel(key)), MemorySink()
    with Client(key, sink, _AwayChannel) as client:
        _submit(sender, "before", b"x")
        wait_for(lambda: "before" in sink.results)
        _AwayChannel.away.set()
        try:
            wait_for(lambda: not client.collector.holds_key())
            asyncio.run(LocalChannel(key).write((), {}))  # a new scheduler knows nothing
        finally:
            _AwayChannel.away.clear()
        _submit(sender, "after", b"x")
        client.finish()
    sender.close(5)
    assert sorted(sink.results) == ["after", "before"]


def test_source_answers_a_collector_whose_clock_is_behind(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, sink = Sender(key, lambda: LocalChannel(key)), MemorySink()
    now = time.time_ns()
    for hours in (1, 0):
        _submit(sender, str(hours), b"x")
        with monkeypatch.context() as patch, Client(key, sink, LocalChannel) as client:
            patch.setattr(time, "time_ns", lambda hours=hours: now + hours * 3600 * 10**9)
            client.finish()
            (stream,) = client.collector.streams.values()
            assert not stream.given_up
    sender.close(5)
    assert sorted(sink.results) == ["0", "1"]


def test_source_that_dies_is_named_with_what_came(key: str) -> None:
    sink = MemorySink()
    sender = Sender(key, lambda: LocalChannel(key))
    _submit(sender, "a", b"1")
    with Client(key, sink, LocalChannel) as client:
        while "a" not in sink.results:
            time.sleep(0.01)
        sender._stopping = True  # as SIGKILL: no END, no answer
        sender._wake_up()
        sender._thread.join()
        client.collector.silent_s = 1.0
        client.finish()
        (stream,) = client.collector.streams.values()
    assert (stream.given_up, stream.received) == (True, 1)


def test_source_that_dies_within_a_large_result_is_not_waited_for(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = MemorySink()
    sender, other = (Sender(key, lambda: LocalChannel(key)) for _ in range(2))
    with Client(key, sink, LocalChannel) as client:
        client.collector.silent_s = 0.5
        _submit(other, "whole", b"x")
        _submit(sender, "before", b"x")
        sender.submit(result_records("half", bytes(5 * 2**20))[:3])
        wait_for(lambda: sender._outbox.taken == 4)
        sender._stopping = True  # as SIGKILL: no END, no answer
        client.finish(20)
    assert sink.results == {"whole": b"x", "before": b"x"}
    assert "ended in the middle of 'half': 3145728 of its 5242880 bytes came" in caplog.text
    sender.close(1)
    other.close(5)


def test_gap_left_by_a_dead_source_is_reported_and_what_follows_is_stored(key: str) -> None:
    sink, channel = MemorySink(), LocalChannel(key)
    sender = Sender(key, lambda: LocalChannel(key))
    for n in range(3):
        _submit(sender, str(n), b"x")
        while len(channel._frames) <= n:
            time.sleep(0.01)
    sender.close(0.1)
    lost = unpack_frame(channel._frames.pop(1))
    with Client(key, sink, LocalChannel) as client:
        client.collector.silent_s = 1.0
        client.finish()
        (stream,) = client.collector.streams.values()
    assert sorted(sink.results) == ["0", "2"]
    assert stream.missing == [(lost.first, lost.first + len(lost.records) - 1)]


def test_confirmation_that_fills_a_gap_lets_the_rest_pass() -> None:
    source = Source("c0ffee", 0, 0, "here", 1, "")
    record = Record(Kind.RESULT, 0.0, ("path", b"x"), 5)
    stream = Stream(source)
    assert stream.feed(Frame("run", source, 0, 3, [record] * 2)) == []
    assert stream.has_gap
    assert stream.feed(Frame("run", source, 2, 5, [])) == [(3, record), (4, record)]
    assert not stream.has_gap
    assert not stream.missing


def test_foreign_bytes_in_the_queue_are_passed_over(key: str) -> None:
    sink, channel = MemorySink(), LocalChannel(key)
    channel._frames += [[b""], [b"\xc1"], [b"not ours"], [b"\x81\xa1v\x63"]]
    sender = Sender(key, lambda: LocalChannel(key))
    _submit(sender, "a", b"1")
    with Client(key, sink, LocalChannel) as client:
        client.finish()
        assert client.collector.n_bad_frames == 4
    sender.close(5)
    assert sink.results == {"a": b"1"}


def test_record_that_cannot_be_packed_does_not_hold_up_the_others(key: str) -> None:
    sink = MemorySink()
    sender = Sender(key, lambda: LocalChannel(key))
    _submit(sender, "before", b"1")
    _submit(sender, "\ud800", b"2")
    _submit(sender, "after", b"3")
    with Client(key, sink, LocalChannel) as client:
        client.finish()
    sender.close(5)
    assert sink.results == {"before": b"1", "after": b"3"}


def test_source_at_rest_is_not_waited_for(key: str) -> None:
    sender = Sender(key, lambda: LocalChannel(key))
    _submit(sender, "a", b"1")
    with Client(key, MemorySink(), LocalChannel) as client:
        client.finish()
    sender._thread.join(30)  # it has seen that the client left, and has nothing more to say
    with Client(key, MemorySink(), LocalChannel) as client:
        client.finish()
        assert not any(stream.given_up for stream in client.collector.streams.values())


def test_passing_fault_of_a_sink_is_waited_for(key: str) -> None:
    sink = _FaultySink(faults=4)
    sender = Sender(key, lambda: LocalChannel(key))
    for n in range(10):
        _submit(sender, str(n), b"x")
    with Client(key, sink, LocalChannel) as client:
        client.finish()
    sender.close(5)
    assert [path for path, _ in sink.history] == [str(n) for n in range(10)]


def test_slow_sink_slows_the_source_and_bounds_what_is_under_way(key: str) -> None:
    sink = _StuckSink()
    sender = Sender(key, lambda: LocalChannel(key))
    done = threading.Event()

    def work() -> None:
        for n in range(100):
            _submit(sender, str(n), bytes(2**20 - 100))
        done.set()

    with Client(key, sink, LocalChannel) as client:
        thread = threading.Thread(target=work)
        thread.start()
        assert sink.reached.wait(10)
        while sender._outbox.submitted < 48:
            time.sleep(0.01)
        assert not done.wait(0.5)
        assert sender._outbox.submitted <= 50
        sink.go_on.set()
        thread.join(30)
        client.finish()
    sender.close(5)
    assert len(sink.results) == 100


class _DyingChannel(LocalChannel):
    """Answers until it has handed out frames."""

    _dead = False

    async def drain(self) -> list[Packed]:
        if self._dead:
            raise _DeathError
        frames = await super().drain()
        self._dead = bool(frames)
        return frames


class _DeathError(Exception):
    """Not survived: it ends the collector's thread."""


class _SlowSink(MemorySink):
    """Takes 10 ms for each result."""

    def write(self, path: str, data: bytes) -> None:
        time.sleep(0.01)
        super().write(path, data)


class _StuckSink(MemorySink):
    """Does not store before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write(self, path: str, data: bytes) -> None:
        self.reached.set()
        self.go_on.wait(60)
        super().write(path, data)


class _FaultySink(MemorySink):
    def __init__(self, faults: int) -> None:
        super().__init__()
        self.faults = faults

    def write(self, path: str, data: bytes) -> None:
        if self.faults > 0:
            self.faults -= 1
            raise SinkError("away", transient=True)
        super().write(path, data)
