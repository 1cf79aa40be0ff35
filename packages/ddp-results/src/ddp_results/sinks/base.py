"""The contract of a sink: where results end up."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from ddp_results._record import Point, Source

__all__ = ["BufferedWriter", "Point", "ReadableSink", "Sink", "Source", "Writer"]


class Writer(abc.ABC):
    """Receives one large result in pieces; nothing is visible before `commit`."""

    @abc.abstractmethod
    def append(self, data: bytes | memoryview) -> None:
        """Add the next piece; a view is good until the call returns."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Make the whole visible at once."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Forget the pieces; a second call, or one after `commit`, does nothing."""


class Uploader(Protocol):
    """Stores large results from the process of a rank, for `Sink.adopt` to make visible."""

    from_bytes: int

    def start(self, path: str, data: bytes) -> Future[Any]:
        """Begin; the result has a `row()`, which travels to the client."""

    def close(self) -> None:
        """Give up what is under way."""


class Sink(abc.ABC):
    """Stores named results and metrics.

    All calls come from one thread at a time, for one `process_results`. What a call raises decides
    what happens next: `SinkError(transient=True)` or an `OSError` means that the same call is made
    again later, with growing pauses; any other error means that this one record cannot be stored
    here, which is reported at the end while the others go on. Paths have been checked.

    Attributes:
        flush_every_s: how long stored records may wait for `flush`, unless a rank asks.
    """

    flush_every_s = 0.2

    def open(self) -> None:  # noqa: B027 - many sinks have nothing to check
        """Check that writing is possible, so that a mistake shows at the start.

        Raises:
            SinkUnavailableError: if it is not; the message says what to do.
        """

    @abc.abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Store `data` at `path`: a reader sees the old or the new, never part of one.

        Idempotent. Writes to one path take effect in the order of the calls.
        """

    @abc.abstractmethod
    def append(self, source: Source, points: Sequence[Point]) -> None:
        """Store metrics of one process, in order.

        A point with a `seq` that was stored before for the `uid` of this source changes nothing.
        """

    def writer(self, path: str, size_bytes: int) -> Writer:
        """Return a writer for a large result, by default one that gathers it in memory."""
        return BufferedWriter(self, path, size_bytes)

    def uploader(self) -> Uploader | None:
        """Return what lets ranks store large results themselves, if this sink has such a way."""
        return None

    def adopt(self, path: str, upload: Sequence[Any]) -> bool:
        """Make visible at `path` what an uploader has stored; False if it is none of this sink.

        Idempotent.
        """
        del path, upload
        return False

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Remove what is at `path`; if nothing is there, do nothing."""

    def flush(self) -> None:  # noqa: B027 - a sink may be durable at once
        """Return when everything accepted so far is durable."""

    def close(self) -> None:  # noqa: B027 - many sinks hold nothing
        """Flush and give back what is held; once that is done, a further call does nothing."""

    @property
    def members(self) -> tuple[Sink, ...]:
        """The sinks that this one stands for: itself, unless it is a `TeeSink`."""
        return (self,)


class ReadableSink(Sink):
    """A sink that `open_run` can read from.

    It keeps metrics as files of lines below `_ddp/metrics/`, in the format of the README:
    `ddp_results.sinks.encode_points` makes the lines, `metrics_name` the paths.
    """

    @abc.abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Return the paths that begin with `prefix`, sorted."""

    @abc.abstractmethod
    def read(self, path: str) -> bytes:
        """Return what is stored at `path`.

        Raises:
            FileNotFoundError: if nothing is.
        """

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield what is stored at `path` piece by piece."""
        yield self.read(path)


class BufferedWriter(Writer):
    """Gathers the pieces in memory and writes them as one result."""

    def __init__(self, sink: Sink, path: str, size_bytes: int) -> None:
        self._sink = sink
        self._path = path
        self._buffer = bytearray()
        self._size_bytes = size_bytes

    def append(self, data: bytes | memoryview) -> None:
        """Add the next piece."""
        self._buffer += data

    def commit(self) -> None:
        """Write the whole."""
        self._sink.write(self._path, bytes(self._buffer))
        self.abort()

    def abort(self) -> None:
        """Forget the pieces."""
        self._buffer = bytearray()
