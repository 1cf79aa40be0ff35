"""The storing half: a thread that takes ordered records to the sinks and says what is durable."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ddp_results._paths import check_path
from ddp_results._record import Kind, Point, Record, Source
from ddp_results._retention import retain
from ddp_results.errors import PathError, SinkError
from ddp_results.manifests import MANIFEST, PREFIX
from ddp_results.sinks.base import ReadableSink, Sink, Writer

logger = logging.getLogger("ddp_results")

_PAUSES_S = (0.2, 15.0)  # between attempts at a sink that cannot store now
_DIRTY_BYTES = 4 * 2**20  # flush when so much waits for it
_MAX_FAILURES_KEPT = 1000

Numbered = tuple[int, Record]
T = TypeVar("T")


class Progress(Protocol):
    """Where a source stands; this module moves it on."""

    source: Source
    taken: int
    durable: int


@dataclass(eq=False, slots=True)
class _Payload:
    """A large result that arrives in pieces."""

    first: int  # number of its first record
    path: str
    writers: dict[Sink, Writer]
    size_bytes: int
    checksum: int = 0
    received_bytes: int = 0


class Delivery:
    """Thread `ddp-results-writer`. Sinks are called from it only.

    A sink that cannot store now is tried again; the others wait meanwhile, and so do the ranks.
    After `sink_timeout_s` it is given up, and the others go on. A record that a sink refuses is
    noted in `failures` and counts as done.

    Attributes:
        failures: `(source label, path, error)` of what could not be stored.
        dead: sinks that were given up, with the last error.
        error: why the thread has ended before it was told to.
        may_store: asked before each call of a sink; while it says no, nothing is stored.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        *,
        sink_timeout_s: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.sinks = list(sinks)
        self.failures: list[tuple[str, str, BaseException]] = []
        self.error: BaseException | None = None
        self.dead: dict[Sink, BaseException] = {}
        self.waiting_for = ""
        self.may_store: Callable[[], bool] = lambda: True
        self._sink_timeout_s = sink_timeout_s
        self._on_change = on_change
        self._queue: deque[tuple[Progress, Sequence[Numbered]]] = deque()
        self._payloads: dict[Progress, _Payload] = {}
        self._abandoned: set[Progress] = set()
        self._dirty: dict[Progress, None] = {}
        self._dirty_bytes = 0
        self._urgent = False
        self._stop_at = float("inf")
        self._wake = threading.Condition()
        self._interrupt = threading.Event()
        self._flushed_s = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="ddp-results-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, progress: Progress, records: Sequence[Numbered]) -> None:
        """Hand over records; the queue is bounded by the windows of the sources."""
        with self._wake:
            self._queue.append((progress, records))
            self._wake.notify()

    def abandon(self, progress: Progress) -> None:
        """Forget the unfinished result of a source that says no more: it holds up the others."""
        with self._wake:
            self._abandoned.add(progress)
            self._wake.notify()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was handed over is durable."""
        return not self._queue and not self._dirty

    def stop(self, timeout_s: float) -> bool:
        """Store what is there, within the time, and end; return whether all was stored."""
        with self._wake:
            self._stop_at = time.monotonic() + timeout_s
            self._urgent = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            self._interrupt.set()
            self._thread.join(5.0)
        for payload in self._payloads.values():
            for writer in payload.writers.values():
                writer.abort()
        return self.is_idle

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            logger.exception("storing results")
            self.error = error
            self._on_change()

    def _run(self) -> None:
        while not self._interrupt.is_set():
            with self._wake:
                while self._abandoned:
                    self._forget(self._abandoned.pop())
                if not self._queue and not self._must_flush():
                    if self._stop_at != float("inf"):
                        break
                    self._wake.wait(self._until_flush())
                item = self._queue[0] if self._queue else None
            if item is not None:
                try:
                    self._store(*item)
                except _Interrupted:
                    break
                with self._wake:
                    self._queue.popleft()
            if self._must_flush():
                self._flush()

    def _must_flush(self) -> bool:
        if not self._dirty:
            self._urgent = self._urgent and bool(self._queue)
            return False
        if self._dirty_bytes >= _DIRTY_BYTES:
            return True
        if self._urgent and not self._queue:
            return True
        return time.monotonic() - self._flushed_s >= self._flush_every_s()

    def _flush_every_s(self) -> float:
        return max((sink.flush_every_s for sink in self._alive()), default=0.2)

    def _until_flush(self) -> float:
        if not self._dirty:
            return 1.0
        return max(0.001, self._flushed_s + self._flush_every_s() - time.monotonic())

    def _flush(self) -> None:
        self._urgent = False
        try:
            for sink in self._alive():
                self._attempt(sink, sink.flush, "flush", None)
        except _Interrupted:
            return
        for progress in self._dirty:
            payload = self._payloads.get(progress)
            progress.durable = progress.taken if payload is None else payload.first - 1
        self._dirty = {each: None for each in self._dirty if each in self._payloads}
        self._dirty_bytes = 0
        self._flushed_s = time.monotonic()
        self._on_change()

    def _store(self, progress: Progress, records: Sequence[Numbered]) -> None:
        points: list[Point] = []
        for number, record in records:
            if record.kind is Kind.METRICS:
                points.append(Point(number, record.time_s, *record.fields))
                continue
            self._append(progress, points)
            points = []
            self._store_one(progress, number, record)
            progress.taken = number
        self._append(progress, points)
        if records:
            progress.taken = records[-1][0]
            self._dirty[progress] = None
            self._dirty_bytes += sum(r.size_bytes for _, r in records if r.kind is not Kind.PART)

    def _append(self, progress: Progress, points: list[Point]) -> None:
        if points:
            self._each(
                lambda sink: sink.append(progress.source, points), "metrics", progress.source.label
            )

    def _store_one(self, progress: Progress, number: int, record: Record) -> None:
        if record.kind in (Kind.MARK, Kind.END):
            self._urgent = True
            return
        if record.kind is Kind.RETAIN:
            for sink in self._alive():
                self._attempt(sink, lambda s=sink: retain(s, *record.fields), "checkpoints", None)  # type: ignore[misc]
            return
        path = record.fields[0]
        label = progress.source.label
        try:
            check_path(path, reserved=True)
        except PathError as error:  # from a rank that does not check, or not ours
            self._fail(label, repr(path), error)
            return
        if record.kind is Kind.RESULT:
            data = record.fields[1]
            if path.startswith(PREFIX) and path.endswith(f"/{MANIFEST}"):
                self._write_last(path, data, label)
            else:
                self._each(lambda sink: sink.write(path, data), path, label)
        elif record.kind is Kind.UPLOAD:
            self._adopt(progress, *record.fields)
        elif record.kind is Kind.DELETE:
            self._each(lambda sink: sink.delete(path), path, label)
        else:
            self._store_part(progress, number, record)

    def _write_last(self, path: str, data: bytes, label: str) -> None:
        """Write what must not be seen before everything else is there."""
        for sink in self._alive():
            if self._attempt(sink, lambda s=sink: s.flush() or True, path, label):  # type: ignore[misc]
                self._attempt(sink, lambda s=sink: s.write(path, data), path, label)  # type: ignore[misc]

    def _adopt(self, progress: Progress, path: str, size_bytes: int, upload: list[Any]) -> None:
        """Make visible what a rank has stored itself, then copy it to the other sinks."""
        label = progress.source.label
        home: Sink | None = None
        for sink in self._alive():
            if self._attempt(sink, lambda s=sink: s.adopt(path, upload), path, label):  # type: ignore[misc]
                home = sink
        others = [sink for sink in self._alive() if sink is not home]
        if home is None and others:
            place = f"s3://{upload[0]}/{upload[1]}"
            text = f"{path!r} waits at {place} as a multipart upload, but no sink is there"
            self._fail(label, path, SinkError(text))
        elif isinstance(home, ReadableSink):
            for sink in others:
                self._attempt(sink, lambda s=sink: _copy(home, s, path, size_bytes), path, label)  # type: ignore[misc]
        self._dirty_bytes += size_bytes

    def _store_part(self, progress: Progress, number: int, record: Record) -> None:
        path, offset, total, data, checksum = record.fields
        label = progress.source.label
        payload = self._payloads.get(progress)
        if offset == 0:
            payload = self._payloads[progress] = _Payload(number, path, {}, total)
            for sink in self._alive():
                made = self._attempt(sink, lambda s=sink: s.writer(path, total), path, label)  # type: ignore[misc]
                if made is not None:
                    payload.writers[sink] = made
        if payload is None or payload.path != path or payload.received_bytes != offset:
            self._drop_payload(progress)
            self._fail(label, path, SinkError(f"{path!r} has lost a part on its way"))
            return
        payload.checksum = zlib.crc32(data, payload.checksum)
        if payload.checksum != checksum:
            self._drop_payload(progress)
            self._fail(label, path, SinkError(f"{path!r} was damaged on its way"))
            return
        payload.received_bytes += len(data)
        for sink, writer in list(payload.writers.items()):
            if not self._attempt(sink, lambda w=writer: w.append(data) or True, path, label):  # type: ignore[misc]
                payload.writers.pop(sink).abort()
        if payload.received_bytes >= total:
            self._commit(progress, payload, label)

    def _commit(self, progress: Progress, payload: _Payload, label: str) -> None:
        for sink, writer in payload.writers.items():
            self._attempt(sink, writer.commit, payload.path, label)
        self._dirty_bytes += payload.size_bytes
        self._drop_payload(progress)

    def _forget(self, progress: Progress) -> None:
        payload = self._payloads.get(progress)
        if payload is not None:
            logger.warning(
                "%s ended in the middle of %r: %d of its %d bytes came, it is not stored",
                progress.source.label,
                payload.path,
                payload.received_bytes,
                payload.size_bytes,
            )
            self._drop_payload(progress)
        self._urgent = True

    def _drop_payload(self, progress: Progress) -> None:
        payload = self._payloads.pop(progress, None)
        for writer in payload.writers.values() if payload else ():
            writer.abort()

    def _alive(self) -> list[Sink]:
        return [sink for sink in self.sinks if sink not in self.dead]

    def _each(self, act: Callable[[Sink], None], path: str, label: str) -> None:
        for sink in self._alive():
            self._attempt(sink, lambda s=sink: act(s), path, label)  # type: ignore[misc]

    def _attempt(self, sink: Sink, act: Callable[[], T], path: str, label: str | None) -> T | None:
        """Return `act()`, tried again while it fails in passing; None if it cannot be done."""
        started = told = time.monotonic()
        pause = _PAUSES_S[0]
        while sink not in self.dead:
            while not self.may_store():
                if time.monotonic() >= self._stop_at or self._interrupt.wait(0.05):
                    self._interrupt.set()
                    raise _Interrupted
            try:
                result = act()
            except BaseException as error:  # sys.exit() of a sink, too, must not end this thread
                if not is_transient(error):
                    self._fail(label or repr(sink), path, error)
                    return None
                now = time.monotonic()
                self.waiting_for = f"{sink!r}: {error}"
                if now - started >= self._sink_timeout_s:
                    self._give_up(sink, error, now - started)
                    return None
                if now - told >= 10 or started == told:
                    told = now if now > started else now + 1e-9
                    logger.warning("waiting for %r (%.0f s): %s", sink, now - started, error)
                if self._interrupt.wait(
                    min(pause, self._stop_at - now if now < self._stop_at else 0)
                ):
                    raise _Interrupted from error
                if time.monotonic() >= self._stop_at:
                    self._interrupt.set()
                    raise _Interrupted from error
                pause = min(pause * 2, _PAUSES_S[1])
            else:
                self.waiting_for = ""
                return result
        return None

    def _give_up(self, sink: Sink, error: BaseException, seconds: float) -> None:
        self.dead[sink] = error
        self.waiting_for = ""
        logger.error("%r is given up after %.0f s: %s", sink, seconds, error)

    def _fail(self, label: str, path: str, error: BaseException) -> None:
        logger.error("%s: %s cannot be stored: %s", label, path, error)
        if len(self.failures) < _MAX_FAILURES_KEPT:
            self.failures.append((label, path, error))


class _Interrupted(Exception):  # noqa: N818 - control flow within this module
    """The thread is to end while a sink cannot store."""


def _copy(home: ReadableSink, sink: Sink, path: str, size_bytes: int) -> None:
    writer = sink.writer(path, size_bytes)
    try:
        for data in home.chunks(path):
            writer.append(data)
        writer.commit()
    finally:
        writer.abort()


def is_transient(error: BaseException) -> bool:
    """Whether what a sink raised may pass."""
    if isinstance(error, SinkError):
        return error.transient
    return isinstance(error, OSError) and not isinstance(error, PathError)
