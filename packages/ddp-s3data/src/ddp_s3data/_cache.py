"""Objects kept on a local disk, shared by every process that names the same directory.

An object is kept under a hash of bucket, key and ETag, so what changes in the bucket is another
object here. A file is written beside its place and renamed into it: other processes see all of it
or nothing. Its head holds length and CRC-32 of the rest: whatever a crash, a full disk or a bad
sector leaves behind is found, removed and read from S3 again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator

_log = logging.getLogger("ddp_s3data")

_HEAD = struct.Struct("<4sIQ")  # magic, CRC-32, length
_MAGIC = b"ddp1"
_TOTAL = struct.Struct("<Q")
_KEPT = 0.9  # of the bound, after making room
_FORGOTTEN_S = 3600.0  # a file half written for so long belongs to a process that died
_PAUSE_S = 60.0  # without writing, after the disk refused


class DiskCache:
    """A bounded set of objects on disk; the least recently used ones go first.

    Holds no descriptor and no thread, so it may be used from any thread and inherited through fork.
    It never raises for what the disk does: what cannot be kept is read from S3 again, and the log
    says why.

    Args:
        directory: made when missing; each user's files lie in a directory of their own in it, and
            nobody else can read them.
        limit_bytes: of all files together.
    """

    def __init__(self, directory: str, limit_bytes: int) -> None:
        self._directory = os.path.join(os.path.abspath(directory), f"ddp-s3data-1-{os.getuid()}")
        self._limit_bytes = limit_bytes
        self._silent_until_s = 0.0

    def has(self, bucket: str, key: str, etag: str) -> bool:
        """Return whether a file is there; only `get` finds out whether it is good."""
        return bool(etag) and os.path.exists(self._path(bucket, key, etag))

    def get(self, bucket: str, key: str, etag: str) -> bytes | None:
        """Return the object, or None when it is not there (any more) or damaged."""
        path = self._path(bucket, key, etag)
        try:
            with open(path, "rb", buffering=0) as file:
                magic, checksum, length = _HEAD.unpack(file.read(_HEAD.size))
                body = file.read()
            good = magic == _MAGIC and len(body) == length and zlib.crc32(body) == checksum
            if good:
                os.utime(path)  # used just now
                return body
        except FileNotFoundError:
            return None
        except (OSError, struct.error) as error:
            _log.warning("the cached file %s cannot be read: %s", path, error)
        else:
            _log.warning("the cached file %s is damaged and is read from S3 again", path)
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None

    def put(self, bucket: str, key: str, etag: str, body: bytes) -> None:
        """Keep the object, if the disk and the bound allow it; return when it is kept."""
        size = _HEAD.size + len(body)
        if not etag or size > self._limit_bytes or time.monotonic() < self._silent_until_s:
            return
        path = self._path(bucket, key, etag)
        if os.path.exists(path):
            return
        temporary = ""
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(".part", "", self._directory)
            with os.fdopen(descriptor, "wb") as file:
                file.truncate(size)  # whoever counts the files now counts this one in full
                self._make_room(size)
                file.write(_HEAD.pack(_MAGIC, zlib.crc32(body), len(body)))
                file.write(body)
            os.replace(temporary, path)
        except OSError as error:
            self._silent_until_s = time.monotonic() + _PAUSE_S
            _log.warning("%s keeps nothing for %.0f s: %s", self._directory, _PAUSE_S, error)
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _path(self, bucket: str, key: str, etag: str) -> str:
        name = f"{bucket}\0{key}\0{etag}".encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(name).hexdigest()
        return os.path.join(self._directory, digest[:2], digest[2:])

    def _make_room(self, size: int) -> None:
        """Add a new file to the total of all processes; remove old ones when it is too much."""
        with self._total() as descriptor:
            stored = os.pread(descriptor, _TOTAL.size, 0)
            total = size + (_TOTAL.unpack(stored)[0] if len(stored) == _TOTAL.size else 0)
            if total > self._limit_bytes or len(stored) != _TOTAL.size:
                total = self._evict()
            os.pwrite(descriptor, _TOTAL.pack(total), 0)

    @contextlib.contextmanager
    def _total(self) -> Iterator[int]:
        """Lock and open the file that holds the number of bytes in all others."""
        descriptor = os.open(os.path.join(self._directory, "total"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # ends with the descriptor
            yield descriptor
        finally:
            os.close(descriptor)

    def _evict(self) -> int:
        """Remove the least recently used files while there are too many; return their bytes."""
        found, total = [], 0
        forgotten_s = time.time() - _FORGOTTEN_S
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                if not entry.name.endswith(".part"):
                    found.append((stat.st_mtime_ns, stat.st_size, entry.path))
                elif stat.st_mtime < forgotten_s:
                    os.unlink(entry.path)
                    continue
                total += stat.st_size
        if total <= self._limit_bytes:
            return total
        for _, size, path in sorted(found):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
            if total <= self._limit_bytes * _KEPT:
                break
        return total

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._directory) as top:
            for entry in top:
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inner:
                        yield from inner
                elif entry.name.endswith(".part"):
                    yield entry
