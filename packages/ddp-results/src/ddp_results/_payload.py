"""Cut a result into records."""

from __future__ import annotations

import time
import zlib
from typing import Any

from ddp_results._record import Kind, Record

PART_BYTES = 2**20


def as_bytes(path: str, data: Any) -> bytes:
    """Return `data` as bytes that nobody changes.

    Raises:
        TypeError: if it is something else; it names the path.
        UnicodeEncodeError: if it is text with a lone surrogate, which UTF-8 cannot hold.
    """
    if isinstance(data, str):
        try:
            return data.encode("utf-8")
        except UnicodeEncodeError as error:
            error.add_note(
                f"result {path!r}: give bytes instead, data.encode('utf-8', errors=…) with"
                " 'replace' or 'surrogateescape' for what came from a file name"
            )
            raise
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise TypeError(
        f"result {path!r}: data must be bytes or str, not {type(data).__name__};"
        " json.dumps() or pickle.dumps() it first"
    )


def result_records(path: str, data: bytes) -> list[Record]:
    """Return the records that store `data` at `path`: one, or parts if it is large."""
    now = time.time()
    total = len(data)
    if total <= PART_BYTES:
        return [Record(Kind.RESULT, now, (path, data), total + len(path))]
    view = memoryview(data)
    records, checksum = [], 0
    for offset in range(0, total, PART_BYTES):
        part = view[offset : offset + PART_BYTES]
        checksum = zlib.crc32(part, checksum)
        fields = (path, offset, total, part, checksum)
        records.append(Record(Kind.PART, now, fields, len(part) + len(path)))
    return records
