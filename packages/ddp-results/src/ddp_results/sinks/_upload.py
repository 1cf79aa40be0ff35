"""A large object whose parts one process stores and another makes visible."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ddp_results.sinks._multipart import MULTIPART_FROM_BYTES, part_size
from ddp_results.sinks._s3_client import S3Client, S3Options, translated

_CONCURRENT = 4
_TOKEN = "ddp-upload"


@dataclass(frozen=True, slots=True)
class Upload:
    """All parts of an object are stored; it is not to be seen before `complete`.

    Attributes:
        token: metadata of the object, by which it is known again.
        tags: the parts' ETags, in order.
    """

    bucket: str
    key: str
    upload_id: str
    token: str
    tags: list[str]

    def row(self) -> list[Any]:
        """Return the fields for the wire."""
        return [self.bucket, self.key, self.upload_id, self.token, self.tags]


class Uploader:
    """Stores the parts of large results, on the thread of its client.

    Attributes:
        from_bytes: smaller results are not worth it.
    """

    from_bytes = MULTIPART_FROM_BYTES

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._options = options
        self._client: S3Client | None = None

    def start(self, path: str, data: bytes) -> Future[Upload]:
        """Begin; a failure removes the parts that were stored.

        Raises:
            SinkUnavailableError: if aiobotocore is not installed.
        """
        if self._client is None:
            self._client = S3Client(self._options)
        return self._client.start(_store(self._client, self._bucket, self._prefix + path, data))

    def close(self) -> None:
        """Give up what is under way, and disconnect."""
        if self._client is not None:
            self._client.close()


async def _store(client: S3Client, bucket: str, key: str, data: bytes) -> Upload:
    where = {"Bucket": bucket, "Key": key}
    token, view, size = secrets.token_hex(16), memoryview(data), part_size(len(data))
    answer = await client.call("create_multipart_upload", **where, Metadata={_TOKEN: token})
    upload_id = answer["UploadId"]
    gate = asyncio.Semaphore(_CONCURRENT)

    async def put(number: int) -> str:
        async with gate:
            start = (number - 1) * size
            answer = await client.call(
                "upload_part",
                **where,
                UploadId=upload_id,
                PartNumber=number,
                Body=bytes(view[start : start + size]),
            )
        tag: str = answer["ETag"]
        return tag

    n_parts = -(-len(data) // size)
    tasks = [asyncio.ensure_future(put(number)) for number in range(1, n_parts + 1)]
    try:
        tags = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(Exception):
            await client.call("abort_multipart_upload", **where, UploadId=upload_id)
        raise
    return Upload(bucket, key, upload_id, token, tags)


async def complete(client: S3Client, upload: Upload) -> None:
    """Make the object visible; a second call, after a lost answer, changes nothing.

    Raises:
        SinkError: if it cannot be done, for example because the parts have been removed.
    """
    where = {"Bucket": upload.bucket, "Key": upload.key}
    parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(upload.tags, 1)]
    try:
        await client.call(
            "complete_multipart_upload",
            **where,
            UploadId=upload.upload_id,
            MultipartUpload={"Parts": parts},
        )
    except Exception as error:
        if not await _is_there(client, where, upload.token):
            raise translated(error, f"completing s3://{upload.bucket}/{upload.key}") from error


async def _is_there(client: S3Client, where: dict[str, str], token: str) -> bool:
    try:
        head = await client.call("head_object", **where)
    except Exception:  # noqa: BLE001 - whatever it is, it was not seen; the first error is told
        return False
    return bool(head.get("Metadata", {}).get(_TOKEN) == token)
