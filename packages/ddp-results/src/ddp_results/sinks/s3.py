"""Results in an S3 bucket."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_results._record import Point, Source
from ddp_results.errors import SinkError, SinkUnavailableError
from ddp_results.sinks._jsonl import encode_points, metrics_name
from ddp_results.sinks._multipart import MULTIPART_FROM_BYTES, MultipartWriter
from ddp_results.sinks._s3_client import REMEDIES, S3Client, S3Options, is_overload, translated
from ddp_results.sinks._upload import Upload, Uploader, complete
from ddp_results.sinks.base import BufferedWriter, ReadableSink, Writer

_SEGMENT_BYTES = 4 * 2**20
_PENDING_BYTES = 64 * 2**20  # accepted and not stored; then `write` waits
_CONCURRENT = 16
_CHUNK_BYTES = 8 * 2**20
MARKER = "_ddp/version"


class S3Sink(ReadableSink):
    """Stores each named result as one object, and metrics as segments.

    `write` accepts and returns; uploads run concurrently, one at a time for each key, and `flush`
    waits for them. An upload that fails stays accepted and is tried again by the next `flush`.
    Metrics of a source become an object `_ddp/metrics/…/<first number>.jsonl` when 4 MiB have
    gathered or at `flush`, so that a long run costs an object each 15 seconds, not one each step.

    Args:
        address: `s3://bucket/prefix`; taken literally, `?`, `#`, `%` and `+` are parts of a key.
        options: how to reach the server, see `S3Options`; also as keyword arguments.

    Raises:
        ValueError: for something else than an S3 address.
        SinkUnavailableError: if aiobotocore is not installed.
    """

    flush_every_s = 15.0

    def __init__(self, address: str, options: S3Options | None = None, **settings: Any) -> None:
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        if not address.startswith("s3://") or not bucket:
            raise ValueError(f"not an address of the form s3://bucket/prefix: {address!r}")
        self.bucket = bucket
        self.prefix = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        self.options = options or S3Options(**settings)
        self._client: S3Client | None = None
        self._segments: dict[str, tuple[Source, list[Point], int]] = {}
        self._last_seq: dict[str, int] = defaultdict(int)
        self._reset()

    def open(self) -> None:
        """Look for the bucket, then store a small marker, which shows that it may be written to."""
        try:
            self._s3.run(self._check_patiently())
        except BaseException as error:
            self._s3.close()
            self._client = None
            if not isinstance(error, SinkError):
                raise
            raise SinkUnavailableError(str(error)) from error

    def write(self, path: str, data: bytes) -> None:
        """Accept a result; wait only while too much is on its way."""
        self._s3.run(self._accept(path, data))

    def append(self, source: Source, points: Sequence[Point]) -> None:
        """Accept metrics."""
        new = [point for point in points if point.seq > self._last_seq[source.uid]]
        if not new:
            return
        _, gathered, size = self._segments.get(source.uid, (source, [], 0))
        gathered += new
        size += sum(80 + 24 * len(point.values) for point in new)
        self._segments[source.uid] = (source, gathered, size)
        self._last_seq[source.uid] = new[-1].seq
        if size >= _SEGMENT_BYTES:
            self._cut_segment(source.uid)

    def writer(self, path: str, size_bytes: int) -> Writer:
        """Return a writer by multipart upload."""
        if size_bytes < MULTIPART_FROM_BYTES:
            return BufferedWriter(self, path, size_bytes)
        return MultipartWriter(
            self._s3, self.bucket, self.prefix + path, size_bytes, lambda: self._settle(path)
        )

    def uploader(self) -> Uploader:
        """Return what stores the parts of large results from another process."""
        return Uploader(self.bucket, self.prefix, self.options)

    def adopt(self, path: str, upload: Sequence[Any]) -> bool:
        """Make the parts that a rank has uploaded the object at `path`."""
        found = Upload(*upload)
        if (found.bucket, found.key) != (self.bucket, self.prefix + path):
            return False
        self._settle(path)
        self._s3.run(complete(self._s3, found))
        return True

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield an object piece by piece."""
        start, total = 0, 1
        while start < total:
            data, total = self._s3.run(self._get(path, start))
            start += len(data)
            yield data

    def delete(self, path: str) -> None:
        """Accept a removal."""
        self._s3.run(self._accept(path, None))

    def flush(self) -> None:
        """Wait until all uploads are stored."""
        for uid in list(self._segments):
            self._cut_segment(uid)
        if self._client is not None:
            self._settle(None)

    def close(self) -> None:
        """Flush, and disconnect."""
        if self._client is not None:
            try:
                self.flush()
            finally:
                client, self._client = self._client, None
                client.close()

    def names(self, prefix: str = "") -> list[str]:
        """Return the paths below the prefix."""

        async def collect() -> list[str]:
            try:
                found = self._s3.pages(self.bucket, self.prefix + prefix)
                return [entry["Key"][len(self.prefix) :] async for entry in found]
            except Exception as error:
                raise translated(error, f"listing s3://{self.bucket}/{self.prefix}") from error

        return sorted(name for name in self._s3.run(collect()) if name)

    def read(self, path: str) -> bytes:
        """Return an object."""
        return self._s3.run(self._get(path))[0]

    async def _get(self, path: str, start: int | None = None) -> tuple[bytes, int]:
        """Return an object, or a chunk of it from `start`, and the size of the whole."""
        where = {"Bucket": self.bucket, "Key": self.prefix + path}
        if start is not None:
            where["Range"] = f"bytes={start}-{start + _CHUNK_BYTES - 1}"
        try:
            answer = await self._s3.call("get_object", **where)
            async with answer["Body"] as body:
                data: bytes = await body.read()
        except Exception as error:
            raise translated(error, f"reading s3://{self.bucket}/{where['Key']}") from error
        return data, int(answer.get("ContentRange", f"/{len(data)}").rpartition("/")[2])

    @property
    def _s3(self) -> S3Client:
        if self._client is None or self._client.pid != os.getpid():
            self._client = S3Client(self.options)
            self._reset()
        return self._client

    def _reset(self) -> None:
        """Begin without anything on its way. All of these belong to the client's loop."""
        self._pending: dict[str, bytes | None] = {}  # path -> what is to be there; None: nothing
        self._active: set[str] = set()
        self._failed: dict[str, Exception] = {}
        self._pending_bytes = 0
        self._changed: asyncio.Condition | None = None
        self._gate = asyncio.Semaphore(_CONCURRENT)

    def _cut_segment(self, uid: str) -> None:
        source, points, _ = self._segments[uid]
        path = metrics_name(source, points[0].seq)
        self._s3.run(self._accept(path, encode_points(source, points)))
        del self._segments[uid]

    def _settle(self, path: str | None) -> None:
        """Wait for the uploads to `path`, or for all; raise what went wrong."""
        self._s3.run(self._settled(path))

    async def _accept(self, path: str, data: bytes | None) -> None:
        changed = self._condition()
        async with changed:
            while self._pending_bytes >= _PENDING_BYTES and path not in self._pending:
                if self._failed and not self._active:
                    await self._retry_failed()
                    raise next(iter(self._failed.values()), None) or SinkError(
                        "waiting for room", transient=True
                    )
                await changed.wait()
        self._pending_bytes += len(data or b"") - len(self._pending.get(path) or b"")
        self._pending[path] = data
        self._failed.pop(path, None)
        self._begin(path)

    def _begin(self, path: str) -> None:
        if path not in self._active:
            self._active.add(path)
            task = asyncio.ensure_future(self._upload(path))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    _tasks: set[asyncio.Future[None]] = set()  # noqa: RUF012 - only keeps them from collection

    async def _upload(self, path: str) -> None:
        """Bring the object at `path` to what is pending, until it is, or fail."""
        try:
            while path in self._pending:
                data = self._pending[path]
                try:
                    async with self._gate:
                        await self._put(path, data)
                except Exception as error:  # noqa: BLE001 - raised by the next flush
                    if self._pending.get(path) is data:
                        self._failed[path] = error
                        break
                    continue
                if self._pending.get(path) is data and path in self._pending:
                    self._drop(path)
        finally:
            self._active.discard(path)
            async with self._condition():
                self._condition().notify_all()

    def _drop(self, path: str) -> None:
        self._pending_bytes -= len(self._pending.pop(path) or b"")

    async def _settled(self, path: str | None) -> None:
        await self._retry_failed()
        changed = self._condition()
        async with changed:
            await changed.wait_for(
                lambda: path not in self._active if path is not None else not self._active
            )
        failed = [path] if path in self._failed else [] if path else list(self._failed)
        if not failed:
            return
        # What passes comes first: only then is everything stored that ever will be.
        worst = min(failed, key=lambda each: _is_final(self._failed[each]))
        error = self._failed[worst]
        if _is_final(error):
            self._failed.pop(worst)
            self._drop(worst)  # it will never be accepted
        raise error

    async def _retry_failed(self) -> None:
        failed, self._failed = self._failed, {}
        for path in failed:
            self._begin(path)

    async def _check_patiently(self) -> None:
        """Let a server that is overloaded recover: botocore's attempts last a few seconds."""
        for pause_s in (1.0, 3.0, 6.0):
            try:
                return await self._check()
            except SinkError as error:
                if not is_overload(error.__cause__):
                    raise
                await asyncio.sleep(pause_s)
        return await self._check()

    async def _check(self) -> None:
        doing = f"writing results to s3://{self.bucket}/{self.prefix}"
        try:
            await self._s3.call(
                "list_objects_v2", Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1
            )
        except Exception as error:
            found = translated(error, doing)
            if isinstance(found, FileNotFoundError):
                raise SinkError(f"{doing}: {REMEDIES['NoSuchBucket']}") from error
            if "AccessDenied" not in str(found):  # listing may be forbidden, writing allowed
                raise found from error
        await self._put(MARKER, b"1\n")

    async def _put(self, path: str, data: bytes | None) -> None:
        key = self.prefix + path
        try:
            if data is None:
                await self._s3.call("delete_object", Bucket=self.bucket, Key=key)
            else:
                await self._s3.call("put_object", Bucket=self.bucket, Key=key, Body=data)
        except Exception as error:
            raise translated(error, f"storing s3://{self.bucket}/{key}") from error

    def _condition(self) -> asyncio.Condition:
        if self._changed is None:
            self._changed = asyncio.Condition()
        return self._changed

    def __getstate__(self) -> dict[str, Any]:
        """A sink travels as its address and options, not with what is on its way."""
        return {"address": f"s3://{self.bucket}/{self.prefix}", "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["address"], state["options"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"S3Sink('s3://{self.bucket}/{self.prefix}')"


def _is_final(error: Exception) -> bool:
    return isinstance(error, SinkError) and not error.transient
