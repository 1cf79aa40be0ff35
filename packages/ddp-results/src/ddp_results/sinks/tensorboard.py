"""Metrics as event files of TensorBoard, without torch or TensorFlow."""
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from ddp_results._metrics import Scalar, as_float
from ddp_results._record import Point, Source
from ddp_results.errors import SinkUnavailableError
from ddp_results.sinks.base import Sink, Writer
from ddp_results.sinks.local import LocalSink

_WRITER = "ddp-results/"


class TensorBoardSink(Sink):
    """A folder that TensorBoard shows: one run for each rank, one tag for each metric.

    Numbers become scalars and texts become texts at the step of the point, or at its number if it
    has no step. Each point is one record with a checksum, which readers see whole or not at all,
    and carries its number, so that nothing is stored twice when it comes again, even by another
    client. Named results become files of the same folder, which TensorBoard passes over.

    Args:
        address: the folder, or `tensorboard://` and the folder.
        results: whether named results are stored; not needed beside another sink in a `TeeSink`.

    Raises:
        SinkUnavailableError: if tensorboard is not installed.
    """

    def __init__(self, address: str | os.PathLike[str], *, results: bool = True) -> None:
        try:
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError as error:
            raise SinkUnavailableError(
                "TensorBoardSink needs tensorboard: pip install 'ddp-results[tensorboard]'"
            ) from error
        self._files = LocalSink(os.fspath(address).removeprefix("tensorboard://"))
        self._results = results
        self._logs: dict[str, _Log] = {}

    def open(self) -> None:
        """Create the folder and try to write into it."""
        self._files.open()

    def write(self, path: str, data: bytes) -> None:
        """Store a named result as a file."""
        if self._results:
            self._files.write(path, data)

    def writer(self, path: str, size_bytes: int) -> Writer:
        """Return a writer into a temporary file."""
        return self._files.writer(path, size_bytes) if self._results else _Nowhere()

    def delete(self, path: str) -> None:
        """Remove a named result."""
        self._files.delete(path)

    def append(self, source: Source, points: Sequence[Point]) -> None:
        """Write a record for each point that is not there yet."""
        with self._files.errors(f"metrics of {source.label}"):
            log = self._logs.get(source.uid)
            if log is None:
                log = self._logs[source.uid] = _open_log(self._files.root, source)
            try:
                log.append(points)
            except OSError:  # what has been written is read from the file at the next try
                self._logs.pop(source.uid).file.close()
                raise

    def close(self) -> None:
        """Close the files."""
        while self._logs:
            self._logs.popitem()[1].file.close()
        self._files.close()

    def __repr__(self) -> str:
        return f"TensorBoardSink({str(self._files.root)!r})"


@dataclass(slots=True)
class _Log:
    """The event file of one source, and the number of the last point in it."""

    file: FileIO
    last: int

    def append(self, points: Sequence[Point]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        writer = RecordWriter(_Whole(self.file))
        for point in points:
            if point.seq > self.last:
                writer.write(_event(point))
                self.last = point.seq


class _Whole:
    """Writes all that it is given."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]


class _Nowhere(Writer):
    def append(self, data: bytes | memoryview) -> None:
        pass

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass


def _open_log(root: Path, source: Source) -> _Log:
    """Begin a new file: a record that a killed client has left half-written ends an old one."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder = root / (f"rank-{source.rank:05d}" if source.rank >= 0 else f"process-{source.uid}")
    folder.mkdir(parents=True, exist_ok=True)
    earlier = sorted(folder.glob(f"events.out.tfevents.*.{source.uid}"))
    last = max((number for path in earlier for number in _numbers(path)), default=0)
    name = f"events.out.tfevents.{time.time():020.9f}.{socket.gethostname()}.{source.uid}"
    file = FileIO(folder / name, "x")
    try:
        head = Event(wall_time=time.time(), file_version="brain.Event:2")
        RecordWriter(_Whole(file)).write(head.SerializeToString())
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
        raise
    return _Log(file, last)


def _numbers(path: Path) -> Iterator[int]:
    """Yield the numbers of the points in a file."""
    from tensorboard.compat.proto.event_pb2 import Event

    left = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (size,) = struct.unpack("<Q", head[:8])
            left -= 16 + size
            if left < 0:
                return
            writer = Event.FromString(file.read(size + 4)[:size]).source_metadata.writer
            if writer.startswith(_WRITER):
                yield int(writer.removeprefix(_WRITER))


def _event(point: Point) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [_value(tag, value) for tag, value in point.values.items() if value is not None]
    event = Event(
        wall_time=point.time_s,
        step=_step(point),
        summary=Summary(value=values),
        source_metadata=SourceMetadata(writer=f"{_WRITER}{point.seq}"),
    )
    data: bytes = event.SerializeToString()
    return data


def _step(point: Point) -> int:
    step = point.seq if point.step is None else point.step
    return max(-(2**63), min(step, 2**63 - 1))


def _value(tag: str, value: Scalar) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    if not isinstance(value, str):
        return Summary.Value(tag=tag, simple_value=as_float(value or 0))
    text = TensorProto(dtype=DT_STRING, string_val=[value.encode()])
    return Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=text)
