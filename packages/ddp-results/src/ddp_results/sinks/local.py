"""Results in a folder of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

from ddp_results._paths import check_path
from ddp_results._record import Point, Source
from ddp_results.errors import SinkError, SinkUnavailableError
from ddp_results.sinks._jsonl import encode_points, last_seq, metrics_name
from ddp_results.sinks.base import ReadableSink, Writer

# Conditions that pass: somebody frees space, a network file system comes back.
_TRANSIENT = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT),
        *(errno.EROFS, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY, errno.EINTR, errno.ENOTCONN),
    }
)
_TEMPORARY = ".ddp-tmp-"
_ABANDONED_S = 3600.0  # four times the default of `sink_timeout_s`
_REMEMBERED_DIRECTORIES = 10_000


class LocalSink(ReadableSink):
    """Writes each result to a temporary file beside its place and renames it over it.

    A process that is killed leaves such files, called `.ddp-tmp-…`; the next one that writes into
    the same folder removes those that nobody has touched for an hour.

    Symbolic links below the folder are followed only while they stay inside it. Metrics of each
    source are appended to one file of JSON lines below `_ddp/metrics/`.

    Args:
        root: the folder; created if it does not exist. It may itself be a link.
        fsync: let `flush` wait until the disk has confirmed the data, so that it survives a
            power failure; without it, it survives the death of any process, but not of the
            machine. Large results (in pieces) and checkpoints are always confirmed.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.root = Path(root).absolute()
        self._fsync = fsync
        self._real_root = ""
        self._known_directories: set[str] = set()
        self._unconfirmed: list[str] = []
        self._metrics: dict[str, tuple[FileIO, int]] = {}  # uid -> file, last number in it

    def open(self) -> None:
        """Create the folder and try to write into it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._real_root = os.path.realpath(self.root)
            with tempfile.TemporaryFile(dir=self._real_root, prefix=_TEMPORARY) as probe:
                probe.write(b"x")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._real_root:
                return  # full now; the collector waits for space
            raise SinkUnavailableError(
                f"cannot write results to {str(self.root)!r}: {error.strerror};"
                " choose a folder that you may write to"
            ) from error

    def write(self, path: str, data: bytes) -> None:
        """Store a result atomically."""
        with self.errors(path):
            writer = _FileWriter(self, self._place(path), path)
            try:
                writer.append(data)
                writer.publish(confirm=False)
            finally:
                writer.abort()

    def writer(self, path: str, size_bytes: int) -> Writer:
        """Return a writer into a temporary file."""
        del size_bytes  # the file grows as it comes
        with self.errors(path):
            return _FileWriter(self, self._place(path), path)

    def append(self, source: Source, points: Sequence[Point]) -> None:
        """Append metrics to the file of their source."""
        path = metrics_name(source)
        with self.errors(path):
            file, last = self._metrics.get(source.uid) or self._open_metrics(source)
            self._metrics[source.uid] = (file, max(last, last_seq(points)))
            new = [point for point in points if point.seq > last]
            try:
                _write_whole(file, encode_points(source, new))
                is_there = os.fstat(file.fileno()).st_nlink > 0
            except OSError:  # opened anew, a half-written line is ended before the next try
                self._forget_metrics(source)
                raise
            if not is_there:  # somebody has deleted the file, and with it what it held
                self._forget_metrics(source)
                self.append(source, points)

    def delete(self, path: str) -> None:
        """Remove a file, and the directories that this leaves empty."""
        with self.errors(path):
            target = self._place(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
            parent = os.path.dirname(target)
            with contextlib.suppress(OSError):  # not empty, or gone
                while parent != self._real_root:
                    os.rmdir(parent)
                    self._known_directories.discard(parent)
                    parent = os.path.dirname(parent)

    def flush(self) -> None:
        """Make what was written durable, in the sense of `fsync=`."""
        if not self._fsync:
            return
        with self.errors("flush"):
            for file, _ in self._metrics.values():
                os.fsync(file.fileno())
            for target in self._unconfirmed:
                with contextlib.suppress(FileNotFoundError):  # replaced or deleted since
                    _sync(target)
            for directory in {os.path.dirname(target) for target in self._unconfirmed}:
                with contextlib.suppress(FileNotFoundError):
                    _sync(directory)
            self._unconfirmed.clear()

    def close(self) -> None:
        """Flush, and close the files of metrics."""
        self.flush()
        while self._metrics:
            self._metrics.popitem()[1][0].close()

    def names(self, prefix: str = "") -> list[str]:
        """Return the paths of all files; temporary ones are left out."""
        found = []
        for directory, _, files in os.walk(self.root):
            below = os.path.relpath(directory, self.root).replace(os.sep, "/")
            for name in files:
                path = name if below == "." else f"{below}/{name}"
                if path.startswith(prefix) and not name.startswith(_TEMPORARY):
                    found.append(path)
        return sorted(found)

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return (self.root / check_path(path, reserved=True)).read_bytes()

    def written(self, target: str) -> None:
        """Remember a file for `flush`."""
        if self._fsync:
            self._unconfirmed.append(target)

    def _place(self, path: str) -> str:
        """Return the absolute place of `path`, with its directory made and checked."""
        if not self._real_root:
            self.open()
        check_path(path, reserved=True)
        target = f"{self._real_root}{os.sep}{path.replace('/', os.sep)}"
        directory = os.path.dirname(target)
        if directory not in self._known_directories or not os.path.isdir(directory):
            self._make_directory(directory, path)
        if os.path.islink(target):
            self._refuse_escape(target, path)
        elif os.path.isdir(target):
            raise SinkError(f"cannot store {path!r} in {self.root}: there is a folder of that name")
        return target

    def _make_directory(self, directory: str, path: str) -> None:
        self._refuse_escape(directory, path)
        try:
            os.makedirs(directory, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise SinkError(
                f"cannot store {path!r} in {self.root}: a part of its path is a file already"
            ) from error
        self._refuse_escape(directory, path)
        if len(self._known_directories) >= _REMEMBERED_DIRECTORIES:
            self._known_directories.clear()
        if not self._holds_link(directory):
            self._known_directories.add(directory)
            _remove_abandoned(directory)

    def _holds_link(self, directory: str) -> bool:
        return os.path.realpath(directory) != directory

    def _refuse_escape(self, place: str, path: str) -> None:
        real = os.path.realpath(place)
        if real != self._real_root and not real.startswith(self._real_root + os.sep):
            raise SinkError(
                f"refused to store {path!r}: a symbolic link leads out of {self.root} to {real}"
            )

    def _forget_metrics(self, source: Source) -> None:
        file, _ = self._metrics.pop(source.uid)
        file.close()

    def _open_metrics(self, source: Source) -> tuple[FileIO, int]:
        target = self._place(metrics_name(source))
        file = FileIO(target, "a+")
        size = file.seek(0, os.SEEK_END)
        if size:  # an earlier client wrote here, and may have died within a line
            file.seek(size - 1)
            if file.read(1) != b"\n":
                _write_whole(file, b"\n")
        return file, 0

    @contextlib.contextmanager
    def errors(self, path: str) -> Iterator[None]:
        """Raise what the disk says about `path` in our words."""
        try:
            yield
        except OSError as error:
            transient = error.errno in _TRANSIENT
            raise SinkError(
                f"storing {path!r} in {self.root}: {error.strerror or error}"
                + ("; free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""),
                transient=transient,
            ) from error

    def __repr__(self) -> str:
        return f"LocalSink({str(self.root)!r})"


class _FileWriter(Writer):
    """A temporary file beside its target."""

    def __init__(self, sink: LocalSink, target: str, path: str = "") -> None:
        self._sink = sink
        self._target = target
        self._path = path
        self._temporary = (
            f"{os.path.dirname(target)}{os.sep}{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"
        )
        self._file: FileIO | None = FileIO(self._temporary, "xb")
        self._written = 0

    def append(self, data: bytes | memoryview) -> None:
        """Add a piece; after a failure the same piece may be given again."""
        if self._file is None:
            raise SinkError("writing to a result that has been stored or given up")
        with self._sink.errors(self._path):
            self._file.seek(self._written)
            _write_whole(self._file, data)
            self._written += len(data)

    def commit(self) -> None:
        """Confirm the data, then rename it into place."""
        with self._sink.errors(self._path):
            self.publish(confirm=True)

    def publish(self, *, confirm: bool) -> None:
        """Rename the temporary file into place."""
        if self._file is None:
            return
        if confirm:
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._target)
        self._file = None
        self._sink.written(self._target)

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


def _remove_abandoned(directory: str) -> None:
    before = time.time() - _ABANDONED_S
    # A folder that may not be listed is no obstacle, nor is a file that is gone meanwhile.
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.path)


def _write_whole(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
