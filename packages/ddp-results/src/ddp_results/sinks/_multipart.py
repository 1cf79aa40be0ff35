"""A large object in parts, several on their way at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from ddp_results.sinks._s3_client import S3Client, translated
from ddp_results.sinks.base import Writer

PART_BYTES = 8 * 2**20
MULTIPART_FROM_BYTES = 2 * PART_BYTES
_MAX_PARTS = 9_000  # S3 allows 10,000
_CONCURRENT = 4


def part_size(size_bytes: int) -> int:
    """Return how large the parts of an object of `size_bytes` are."""
    return max(PART_BYTES, -(-size_bytes // _MAX_PARTS))


class MultipartWriter(Writer):
    """Uploads parts as they fill; a part that failed is sent again by the next call.

    Nothing is visible before `commit`. Memory: five parts.
    """

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        key: str,
        size_bytes: int,
        settle: Callable[[], None],
    ) -> None:
        self._client = client
        self._where = {"Bucket": bucket, "Key": key}
        self._part_bytes = part_size(size_bytes)
        self._settle = settle
        self._buffer = bytearray()
        self._upload_id = ""
        self._tags: dict[int, str] = {}
        self._waiting: dict[int, bytes] = {}  # parts that are not stored, by number
        self._active: dict[int, asyncio.Task[None]] = {}
        self._n_parts = 0
        self._over = False
        client.run(self._create())

    def append(self, data: bytes | memoryview) -> None:
        """Add the next piece; after a failure the same piece is given again."""
        full = len(self._buffer) + len(data) >= self._part_bytes
        if full:
            self._client.run(self._make_room(_CONCURRENT - 1))
        self._buffer += data
        if full:
            self._cut()

    def commit(self) -> None:
        """Complete the upload."""
        if self._over:
            return
        if self._buffer:
            self._cut()
        self._settle()
        self._client.run(self._complete())
        self._over = True

    def abort(self) -> None:
        """Remove the parts."""
        if not self._over:
            self._over = True
            with contextlib.suppress(Exception):
                self._client.run(self._abort())

    def _cut(self) -> None:
        self._n_parts += 1
        self._waiting[self._n_parts] = bytes(self._buffer)
        self._buffer.clear()
        self._client.run(self._begin(self._n_parts))

    async def _create(self) -> None:
        answer = await self._call("create_multipart_upload", "starting")
        self._upload_id = answer["UploadId"]

    async def _begin(self, number: int) -> None:
        self._active[number] = asyncio.ensure_future(self._send(number))

    async def _send(self, number: int) -> None:
        answer = await self._call(
            "upload_part",
            f"storing part {number} of",
            UploadId=self._upload_id,
            PartNumber=number,
            Body=self._waiting[number],
        )
        self._tags[number] = answer["ETag"]
        del self._waiting[number]

    async def _make_room(self, allowed: int) -> None:
        """Wait until at most `allowed` parts are on their way; raise if one failed."""
        for number in self._waiting:
            if number not in self._active:
                await self._begin(number)
        while len(self._active) > allowed:
            done, _ = await asyncio.wait(self._active.values(), return_when=asyncio.FIRST_COMPLETED)
            finished = [number for number, task in self._active.items() if task in done]
            errors = [self._active.pop(number).exception() for number in finished]
            for error in errors:
                if error is not None:
                    raise error

    async def _complete(self) -> None:
        await self._make_room(0)
        if self._waiting:
            await self._make_room(0)
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        await self._call(
            "complete_multipart_upload",
            "completing",
            UploadId=self._upload_id,
            MultipartUpload={"Parts": parts},
        )

    async def _abort(self) -> None:
        for task in self._active.values():
            task.cancel()
        await asyncio.gather(*self._active.values(), return_exceptions=True)
        await self._call("abort_multipart_upload", "aborting", UploadId=self._upload_id)

    async def _call(self, operation: str, doing: str, **arguments: Any) -> Any:
        try:
            return await self._client.call(operation, **self._where, **arguments)
        except Exception as error:
            address = f"s3://{self._where['Bucket']}/{self._where['Key']}"
            raise translated(error, f"{doing} {address}") from error
