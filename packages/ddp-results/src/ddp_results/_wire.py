"""The bytes that travel: frames from a source to the client, acknowledgements back.

A frame is one msgpack map with short keys; the README documents it for other programs. Nothing
in it is ever unpickled: msgpack knows numbers, text, bytes, lists and maps, and one extension
(type 1: an integer beyond 64 bits, as decimal text).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import msgpack

from ddp_results._record import Kind, Record, Source
from ddp_results.errors import WireError

VERSION = 1
_BIG_INTEGER = 1
_DATA = 3  # of the fields of a PART
_SIZED = (bytes, memoryview, str, dict)
_ARITY = {
    Kind.RESULT: 2,
    Kind.METRICS: 2,
    Kind.PART: 5,
    Kind.DELETE: 1,
    Kind.MARK: 1,
    Kind.END: 0,
    Kind.RETAIN: 4,
    Kind.UPLOAD: 3,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """Consecutive records of one source.

    Attributes:
        run: the key of the handler.
        source: who speaks.
        confirmed: the last sequence number that the source knows to be durable.
        first: sequence number of the first record (they count from 1).
        records: the records `first`, `first + 1`, …
    """

    run: str
    source: Source
    confirmed: int
    first: int
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Ack:
    """What the client tells one source.

    Attributes:
        epoch: identifies the client's collector; a new one may have to be told again.
        durable: every record up to this one is stored for good.
        taken: every record up to this one has left the client's memory.
        received: every record up to this one has arrived.
        drains: how often the collector has emptied the queue: a frame that was put before two
            complete drains and is not received is lost.
        window_bytes: how much the source may have under way.
        mark: the source shall send a MARK with this number, once; 0 for none.
        closed: the collector has gone in good order; a source that has nothing left may rest.
    """

    epoch: str
    durable: int
    taken: int
    received: int
    drains: int
    window_bytes: int
    mark: int = 0
    closed: bool = False

    def pack(self) -> bytes:
        """Return the bytes for the scheduler's metadata."""
        packed: bytes = msgpack.packb([VERSION, *astuple(self)])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Ack:
        """Read what `pack` wrote.

        Raises:
            WireError: if it is something else.
        """
        row = _unpack(data)
        if not isinstance(row, list) or len(row) != 9 or row[0] != VERSION:
            raise WireError(f"not an acknowledgement of version {VERSION}: {row!r:.80}")
        return cls(*row[1:])


@dataclass(frozen=True, slots=True)
class Lease:
    """Says which collector a key has; `beat` grows while it lives."""

    epoch: str
    host: str
    pid: int
    beat: int


def is_dead_here(process: Lease | Source) -> bool:
    """Whether a process was on this machine and has ended."""
    if process.host != socket.gethostname() or process.pid == os.getpid():
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def pack_lease(lease: Lease) -> bytes:
    """Return the bytes of a lease."""
    packed: bytes = msgpack.packb([VERSION, *astuple(lease)])
    return packed


def unpack_lease(data: bytes | None) -> Lease | None:
    """Read what `pack_lease` wrote; None if nobody holds it."""
    if not data:
        return None
    row = _unpack(data)
    if not isinstance(row, list) or len(row) != 5 or row[0] != VERSION:
        raise WireError(f"not a lease of version {VERSION}: {row!r:.80}")
    return Lease(*row[1:])


def pack_held(size_bytes: int) -> bytes:
    """Return the note by which a source says how much it has under way."""
    packed: bytes = msgpack.packb([VERSION, size_bytes])
    return packed


def unpack_held(notes: dict[str, bytes] | None) -> dict[str, int]:
    """Read the notes of all sources: uid to bytes."""
    return {uid: int(_unpack(note)[1]) for uid, note in (notes or {}).items() if note}


Packed = Sequence[bytes | memoryview]


def pack_frame(frame: Frame) -> Packed:
    """Return the bytes of a frame, and after it the data of the parts in it, not copied."""
    packed: bytes = msgpack.packb(
        {
            "v": VERSION,
            "run": frame.run,
            "src": frame.source.row(),
            "ok": frame.confirmed,
            "first": frame.first,
            "recs": [_row(record) for record in frame.records],
        },
        default=_big_integer,
    )
    return [packed, *(r.fields[_DATA] for r in frame.records if r.kind is Kind.PART)]


def unpack_frame(packed: Packed) -> Frame:
    """Read a frame.

    Raises:
        WireError: if `packed` is no frame, or of another version.
    """
    head, *parts = packed
    body = _unpack(head)
    if not isinstance(body, dict) or "v" not in body:
        raise WireError(f"not a frame: {body!r:.80}")
    if body["v"] != VERSION:
        raise WireError(
            f"a frame of version {body['v']}, this program reads {VERSION}: install the same"
            " ddp-results on the client and on the workers"
        )
    try:
        data = iter(parts)
        records = [_record(row, data) for row in body["recs"]]
        return Frame(body["run"], Source(*body["src"]), body["ok"], body["first"], records)
    except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise WireError(f"a damaged frame: {error!r}") from error


def pack_source(source: Source) -> bytes:
    """Return the bytes by which a source registers."""
    packed: bytes = msgpack.packb([VERSION, *source.row()])
    return packed


def unpack_source(data: bytes) -> Source:
    """Read what `pack_source` wrote.

    Raises:
        WireError: if it is something else.
    """
    row = _unpack(data)
    if not isinstance(row, list) or len(row) != 7 or row[0] != VERSION:
        raise WireError(f"not a source of version {VERSION}: {row!r:.80}")
    return Source(*row[1:])


def _row(record: Record) -> list[Any]:
    row = [int(record.kind), record.time_s, *record.fields]
    if record.kind is Kind.PART:
        row[2 + _DATA] = None  # it travels beside the frame
    return row


def _record(row: list[Any], data: Iterator[bytes | memoryview]) -> Record:
    kind = Kind(row[0])
    if len(row) != 2 + _ARITY[kind]:
        raise ValueError(f"a {kind.name} record with {len(row) - 2} fields")
    if kind is Kind.PART:
        row[2 + _DATA] = next(data)
    size = sum(len(field) for field in row[2:] if isinstance(field, _SIZED))
    return Record(kind, row[1], tuple(row[2:]), size)


def _unpack(data: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=_extension, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {error!r}") from error


def _big_integer(value: object) -> Any:
    if isinstance(value, int):
        return msgpack.ExtType(_BIG_INTEGER, str(value).encode())
    raise TypeError(f"cannot send {type(value).__name__}")


def _extension(code: int, data: bytes) -> int:
    if code != _BIG_INTEGER or len(data) > 4300:
        raise ValueError(f"unknown extension type {code}")
    return int(data)
